//! NVIDIA's transfer library, for RDMA, NVLink and GPU memory.
//!
//! The library comes from NIXL's Python wheel and is loaded at run time; [`find()`] says where it is
//! looked for and [`install()`] fetches it. No C++ compiler is involved.
//!
//! NIXL cannot take a transfer back: a request that is released while its peer is silent may still
//! land later. So this back end releases a request only when NIXL says that it has ended. Until
//! then a cancelled or late operation is [`Status::Quarantined`], and a thread keeps looking after
//! it, which sleeps while there is nothing to look after.
//!
//! Copies that touch are merged before they are posted. Many equal copies on one grid on each side
//! (the blocks of a pool) are posted as entries of prepared lists, one per region and size, which
//! NIXL stores in next to no memory.

use std::collections::VecDeque;
use std::ffi::{CStr, CString};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::bytes::{Fields, put_block};
use crate::copy::Copy;
use crate::counters::Counters;
use crate::error::Error;
use crate::merge::Direction;
use crate::random::random;
use crate::rate::{Link, RateWatch};
use crate::region::{Hold, Place, Region, RegionId, Regions, Spans};
use crate::tcp::check_notification;
use crate::transport::{Instance, Notification, Operation, Report, Statistics, Status, Transport};

pub mod capi;
mod find;
mod grid;

use capi::{Agent, AgentError, AgentSettings, Code, Prepared, Request, Span};
pub use find::{VARIABLE, VERSION, cache_directory, find, install};
use grid::Grid;

/// Below this many copies, single descriptors cost next to nothing.
const FEW: usize = 64;
/// Prepared lists kept at once.
const MAX_PREPARED: usize = 64;
/// How long dropping the transport waits for operations to end of their own accord.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

/// How a [`Nixl`] transport is set up.
#[derive(Clone, Debug)]
pub struct NixlOptions {
    /// The library, or the wheel's directory. Without: see [`find()`].
    pub library: Option<PathBuf>,
    /// The plugin that moves bytes.
    pub plugin: String,
    /// Its parameters.
    pub parameters: Vec<(String, String)>,
    /// Pause between two rounds of NIXL's progress thread, in microseconds. 0 burns a core.
    pub progress_delay_us: u64,
}

impl Default for NixlOptions {
    fn default() -> Self {
        let parameters = [
            // Without this a dead peer is never reported.
            ("ucx_error_handling_mode", "peer"),
            // Without these a post on one host does the whole copy in the calling thread.
            ("num_threads", "1"),
            ("split_batch_size", "1"),
        ];
        Self {
            library: None,
            plugin: "UCX".to_owned(),
            parameters: parameters
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .to_vec(),
            progress_delay_us: 1000,
        }
    }
}

impl NixlOptions {
    /// The same as NIXL's own interface takes it.
    pub fn settings(&self) -> AgentSettings {
        AgentSettings {
            progress_delay_us: self.progress_delay_us,
            plugin: self.plugin.clone(),
            parameters: self.parameters.clone(),
        }
    }
}

/// The `nixl` back end.
#[derive(Debug)]
pub struct Nixl {
    shared: Arc<Shared>,
    driver: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    agent: Arc<Agent>,
    instance: Instance,
    regions: Regions,
    counters: Arc<Counters>,
    peers: Mutex<Vec<NixlPeer>>,
    /// The most recently used last.
    prepared: Mutex<VecDeque<(Key, Arc<Prepared>)>>,
    under_way: Mutex<UnderWay>,
    changed: Condvar,
    /// After the agent: dropped when it is gone.
    abandoned: Abandoned,
}

/// Operations whose requests were released although NIXL had not ended them. They are safe when the
/// agent is no more.
#[derive(Debug, Default)]
struct Abandoned(Mutex<Vec<(Arc<Flight>, Arc<Counters>)>>);

impl Drop for Abandoned {
    fn drop(&mut self) {
        let flights = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (flight, counters) in flights.drain(..) {
            let mut state = flight.lock();
            state.abandoned = false;
            state.release_if_settled(&counters);
        }
    }
}

#[derive(Debug, Default)]
struct UnderWay {
    flights: Vec<Arc<Flight>>,
    closing: bool,
}

/// Which prepared list.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Key {
    /// Whose memory; `None` for our own.
    peer: Option<Instance>,
    grid: Grid,
}

/// A peer of a [`Nixl`] transport.
#[derive(Clone)]
pub struct NixlPeer(Arc<Inner>);

struct Inner {
    instance: Instance,
    name: CString,
    spans: Mutex<Arc<Spans>>,
    rate: Arc<RateWatch>,
    closed: AtomicBool,
}

impl NixlPeer {
    /// Who it is.
    pub fn instance(&self) -> Instance {
        self.0.instance
    }

    fn spans(&self) -> Arc<Spans> {
        self.0
            .spans
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl fmt::Debug for NixlPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NixlPeer").field(&self.0.instance).finish()
    }
}

/// A read or write under way in a [`Nixl`] transport.
#[derive(Debug)]
pub struct NixlTransfer {
    flight: Arc<Flight>,
    /// Gone when the transport is.
    shared: Weak<Shared>,
}

/// An operation, shared by its owner and the driver.
#[derive(Debug)]
struct Flight {
    peer: NixlPeer,
    notification: Option<Vec<u8>>,
    deadline: Instant,
    began: Instant,
    asked: u64,
    posted_copies: u64,
    bytes: u64,
    state: Mutex<FlightState>,
}

#[derive(Debug)]
struct FlightState {
    /// Requests that NIXL may still be carrying out.
    requests: Vec<Request>,
    /// Requests were released although NIXL may still be carrying them out.
    abandoned: bool,
    outcome: Option<Result<Report, Error>>,
    quarantined: bool,
    posted: Instant,
    /// The lists the requests were made from.
    lists: Vec<Arc<Prepared>>,
    holds: Vec<Hold>,
}

const DESCRIPTION: &[u8; 8] = b"kvfy-nxl";

impl Nixl {
    /// Loads NIXL and makes an agent.
    pub fn new(options: &NixlOptions) -> Result<Self, Error> {
        let library = find(options.library.as_deref())?;
        let nixl =
            capi::Nixl::load(&library).map_err(|error| find::does_not_load(&library, &error))?;
        let instance = Instance(random()?);
        let agent =
            Agent::new(&nixl, &name(instance), &options.settings()).map_err(
                |error| match error {
                    AgentError::Agent(code) => find::does_not_load(&library, &code),
                    AgentError::Plugin(code) => find::no_plugin(&library, &options.plugin, &code),
                    AgentError::Name => {
                        Error::Unsupported("a parameter for NIXL holds a zero byte".to_owned())
                    }
                },
            )?;
        let shared = Arc::new(Shared {
            agent: Arc::new(agent),
            instance,
            regions: Regions::default(),
            counters: Arc::default(),
            peers: Mutex::default(),
            prepared: Mutex::default(),
            under_way: Mutex::default(),
            changed: Condvar::new(),
            abandoned: Abandoned::default(),
        });
        let driver = std::thread::Builder::new()
            .name("kvferry-nixl".to_owned())
            .spawn({
                let shared = shared.clone();
                move || shared.drive()
            })
            .map_err(|error| Error::system("starting a thread", &error))?;
        Ok(Self {
            shared,
            driver: Some(driver),
        })
    }

    /// Who this is.
    pub fn instance(&self) -> Instance {
        self.shared.instance
    }

    fn post(
        &self,
        direction: Direction,
        peer: &NixlPeer,
        copies: &[Copy],
        notification: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<NixlTransfer, Error> {
        let began = Instant::now();
        check_notification(notification)?;
        if peer.0.closed.load(Ordering::SeqCst) {
            return Err(Error::Disconnected);
        }
        let spans = peer.spans();
        let admitted = self.shared.regions.admit(copies, direction, &spans)?;
        if admitted.on_gpu {
            peer.0.rate.gpu();
        }
        let ours = self.shared.regions.spans();
        let mut lists = Vec::new();
        let mut requests = Vec::new();
        if let Some(request) = self.on_grids(
            direction,
            peer,
            copies,
            &admitted.copies,
            (&ours, &spans),
            &mut lists,
        )? {
            requests.push(request);
        } else {
            self.one_by_one(
                direction,
                peer,
                &admitted.copies,
                (&ours, &spans),
                &mut requests,
            )?;
        }
        self.shared.counters.start();
        let flight = Arc::new(Flight {
            peer: peer.clone(),
            notification: notification.map(<[u8]>::to_vec),
            deadline,
            began,
            asked: copies.len() as u64,
            posted_copies: admitted.copies.len() as u64,
            bytes: admitted.copies.iter().map(|copy| copy.bytes).sum(),
            state: Mutex::new(FlightState {
                requests: Vec::new(),
                abandoned: false,
                outcome: None,
                quarantined: false,
                posted: began,
                lists,
                holds: admitted.holds,
            }),
        });
        {
            let mut state = flight.lock();
            for mut request in requests {
                match request.post() {
                    Ok(true) => {}
                    Ok(false) => state.requests.push(request),
                    Err(code) => {
                        self.shared.fail(&mut state, lost(code));
                        break;
                    }
                }
            }
            state.posted = Instant::now();
        }
        self.shared.look_at(&flight);
        if !flight.lock().is_settled() {
            self.shared.under_way().flights.push(flight.clone());
            self.shared.changed.notify_one();
        }
        Ok(NixlTransfer {
            flight,
            shared: Arc::downgrade(&self.shared),
        })
    }

    /// One request over prepared lists, where the copies allow it and are many.
    fn on_grids(
        &self,
        direction: Direction,
        peer: &NixlPeer,
        copies: &[Copy],
        merged: &[Copy],
        (ours, theirs): (&Spans, &Spans),
        lists: &mut Vec<Arc<Prepared>>,
    ) -> Result<Option<Request>, Error> {
        if merged.len() <= FEW {
            return Ok(None);
        }
        let local = |copy: &Copy| match direction {
            Direction::Read => copy.destination,
            Direction::Write => copy.source,
        };
        let remote = |copy: &Copy| match direction {
            Direction::Read => copy.source,
            Direction::Write => copy.destination,
        };
        let Some((our_grid, our_entries)) = Grid::of(copies, local, ours) else {
            return Ok(None);
        };
        let Some((their_grid, their_entries)) = Grid::of(copies, remote, theirs) else {
            return Ok(None);
        };
        let our_list = self.shared.prepared(None, our_grid)?;
        let their_list = self.shared.prepared(Some(peer), their_grid)?;
        let request = self
            .shared
            .agent
            .request_prepared(
                direction == Direction::Write,
                &our_list,
                &our_entries,
                &their_list,
                &their_entries,
            )
            .map_err(lost)?;
        lists.extend([our_list, their_list]);
        Ok(Some(request))
    }

    /// Requests over single descriptors: one for each pair of kinds of memory.
    fn one_by_one(
        &self,
        direction: Direction,
        peer: &NixlPeer,
        merged: &[Copy],
        (ours, theirs): (&Spans, &Spans),
        requests: &mut Vec<Request>,
    ) -> Result<(), Error> {
        let place = |spans: &Spans, address, bytes, hint: &mut usize| {
            *hint = spans.find(address, bytes, *hint).unwrap_or(usize::MAX);
            spans
                .0
                .get(*hint)
                .map_or(Place::Host, |region| region.place)
        };
        let (mut our_hint, mut their_hint) = (usize::MAX, usize::MAX);
        // Whether each side is host memory, and the copies of which that is so.
        type Group = ((bool, bool), Vec<(Span, Span)>);
        let mut groups: Vec<Group> = Vec::new();
        for copy in merged {
            let (here, there) = match direction {
                Direction::Read => (copy.destination, copy.source),
                Direction::Write => (copy.source, copy.destination),
            };
            let here = (
                here,
                copy.bytes,
                place(ours, here, copy.bytes, &mut our_hint),
            );
            let there = (
                there,
                copy.bytes,
                place(theirs, there, copy.bytes, &mut their_hint),
            );
            let kinds = (here.2 == Place::Host, there.2 == Place::Host);
            match groups.iter_mut().find(|(known, _)| *known == kinds) {
                Some((_, group)) => group.push((here, there)),
                None => groups.push((kinds, vec![(here, there)])),
            }
        }
        for (kinds, group) in groups {
            if !kinds.0 || !kinds.1 {
                peer.0.rate.gpu();
            }
            let request = self
                .shared
                .agent
                .request(
                    direction == Direction::Write,
                    &peer.0.name,
                    group.iter().map(|pair| pair.0),
                    group.iter().map(|pair| pair.1),
                )
                .map_err(lost)?;
            requests.push(request);
        }
        Ok(())
    }
}

impl Transport for Nixl {
    type Peer = NixlPeer;
    type Operation = NixlTransfer;

    fn name(&self) -> &'static str {
        "nixl"
    }

    unsafe fn register(&self, region: Region) -> Result<RegionId, Error> {
        let id = self.shared.regions.insert(region)?;
        let span = (region.base, region.bytes, region.place);
        if let Err(code) = self.shared.agent.register(span) {
            let _ = self.shared.regions.remove(id, Instant::now(), || (), || ());
            return Err(Error::Unsupported(format!(
                "NIXL does not take {} bytes at {:#x} ({:?}): {code}",
                region.bytes, region.base, region.place
            )));
        }
        Ok(id)
    }

    fn deregister(&self, region: RegionId, deadline: Instant) -> Result<(), Error> {
        let region = self.shared.regions.remove(region, deadline, || (), || ())?;
        self.shared
            .lock_prepared()
            .retain(|(key, _)| key.peer.is_some() || key.grid.region.base != region.base);
        self.shared
            .agent
            .deregister((region.base, region.bytes, region.place))
            .map_err(|code| Error::Unsupported(format!("NIXL does not let go of memory: {code}")))
    }

    fn describe(&self) -> Result<Vec<u8>, Error> {
        let mut out = DESCRIPTION.to_vec();
        out.extend(self.shared.instance.0);
        let regions = self.shared.regions.spans().0;
        out.extend((regions.len() as u32).to_le_bytes());
        for region in regions {
            out.extend(region.base.to_le_bytes());
            out.extend(region.bytes.to_le_bytes());
            let place = match region.place {
                Place::Host => u32::MAX,
                Place::Gpu(n) => n,
            };
            out.extend(place.to_le_bytes());
        }
        let metadata = self
            .shared
            .agent
            .metadata()
            .map_err(|code| Error::Unsupported(format!("NIXL gives no metadata: {code}")))?;
        put_block(&mut out, &metadata);
        Ok(out)
    }

    fn connect(&self, description: &[u8], _deadline: Instant) -> Result<NixlPeer, Error> {
        let (instance, spans, metadata) = parse(description)?;
        // Held throughout, so that two calls do not load the same peer at once.
        let mut peers = self.shared.lock_peers();
        let known = peers.iter().find(|peer| peer.0.instance == instance);
        if let Some(peer) = known.cloned() {
            if *peer.spans() != spans {
                // NIXL does not add to what it knows of a peer.
                self.shared.forget_prepared(instance);
                let _ = self.shared.agent.forget(&peer.0.name);
                self.load(metadata)?;
                *peer.0.spans.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(spans);
            }
            return Ok(peer);
        }
        let loaded = self.load(metadata)?;
        if loaded.to_bytes() != name(instance).as_bytes() {
            let _ = self.shared.agent.forget(&loaded);
            return Err(Error::BadDescription(
                "it names one process and holds the metadata of another".to_owned(),
            ));
        }
        let peer = NixlPeer(Arc::new(Inner {
            instance,
            name: loaded,
            spans: Mutex::new(Arc::new(spans)),
            rate: Arc::new(RateWatch::new(Link::Nixl(Link::fastest_rdma()))),
            closed: AtomicBool::new(false),
        }));
        peers.push(peer.clone());
        Ok(peer)
    }

    fn disconnect(&self, peer: &NixlPeer) {
        if peer.0.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        let flights: Vec<_> = {
            let under_way = self.shared.under_way();
            let of_peer = |flight: &&Arc<Flight>| Arc::ptr_eq(&flight.peer.0, &peer.0);
            under_way.flights.iter().filter(of_peer).cloned().collect()
        };
        for flight in flights {
            self.shared.stop(&flight, Error::Disconnected);
        }
        self.shared.forget_prepared(peer.0.instance);
        let mut peers = self.shared.lock_peers();
        peers.retain(|other| !Arc::ptr_eq(&other.0, &peer.0));
        let _ = self.shared.agent.forget(&peer.0.name);
    }

    fn read(
        &self,
        peer: &NixlPeer,
        copies: &[Copy],
        notification: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<NixlTransfer, Error> {
        self.post(Direction::Read, peer, copies, notification, deadline)
    }

    fn write(
        &self,
        peer: &NixlPeer,
        copies: &[Copy],
        notification: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<NixlTransfer, Error> {
        self.post(Direction::Write, peer, copies, notification, deadline)
    }

    fn notifications(&self, until: Instant) -> Result<Vec<Notification>, Error> {
        let mut pause = Pause::default();
        loop {
            let arrived =
                self.shared.agent.notifications().map_err(|code| {
                    Error::Unsupported(format!("NIXL gives no messages: {code}"))
                })?;
            let arrived: Vec<Notification> = arrived
                .into_iter()
                .filter_map(|(from, message)| {
                    let from = instance_of(&from)?;
                    Some(Notification { from, message })
                })
                .collect();
            let left = until.saturating_duration_since(Instant::now());
            if !arrived.is_empty() || left.is_zero() {
                return Ok(arrived);
            }
            pause.sleep(left);
        }
    }

    fn statistics(&self) -> Statistics {
        self.shared.counters.read()
    }
}

impl Nixl {
    fn load(&self, metadata: &[u8]) -> Result<CString, Error> {
        self.shared.agent.load(metadata).map_err(|code| {
            Error::BadDescription(format!("NIXL cannot load the peer's metadata: {code}"))
        })
    }
}

impl Drop for Nixl {
    fn drop(&mut self) {
        let flights = {
            let mut under_way = self.shared.under_way();
            under_way.closing = true;
            under_way.flights.clone()
        };
        self.shared.changed.notify_all();
        if let Some(driver) = self.driver.take() {
            let _ = driver.join();
        }
        for flight in &flights {
            self.shared.stop(flight, Error::Disconnected);
        }
        let until = Instant::now() + LAST_PATIENCE;
        let mut pause = Pause::default();
        while flights.iter().any(|flight| !flight.lock().is_settled()) && Instant::now() < until {
            for flight in &flights {
                self.shared.look_at(flight);
            }
            pause.sleep(LAST_PATIENCE);
        }
        for peer in std::mem::take(&mut *self.shared.lock_peers()) {
            let _ = self.shared.agent.forget(&peer.0.name);
        }
        self.shared.lock_prepared().clear();
        for flight in flights {
            self.shared.give_up(&flight);
        }
        // Another thread may be in the middle of a poll, which ends at once. Then the agent goes
        // with this transport, and not later.
        while Arc::strong_count(&self.shared) > 1 {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

impl Operation for NixlTransfer {
    fn poll(&self) -> Status {
        if let Some(shared) = self.shared.upgrade() {
            shared.look_at(&self.flight);
        }
        self.flight.status()
    }

    fn wait(&self, until: Instant) -> Status {
        let mut pause = Pause::default();
        loop {
            let status = self.poll();
            let left = until.saturating_duration_since(Instant::now());
            if status.is_safe() || left.is_zero() {
                return status;
            }
            pause.sleep(left);
        }
    }

    fn cancel(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.stop(&self.flight, Error::Cancelled);
        }
    }
}

impl Drop for NixlTransfer {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl Flight {
    fn lock(&self) -> MutexGuard<'_, FlightState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn status(&self) -> Status {
        let state = self.lock();
        match &state.outcome {
            None => Status::InProgress,
            Some(Ok(report)) => Status::Done(*report),
            Some(Err(error)) if state.is_settled() => Status::Failed(error.clone()),
            Some(Err(error)) => Status::Quarantined(error.clone()),
        }
    }
}

impl FlightState {
    /// Whether nothing is left to look after.
    fn is_settled(&self) -> bool {
        self.outcome.is_some() && self.requests.is_empty() && !self.abandoned
    }

    fn release_if_settled(&mut self, counters: &Counters) {
        if self.is_settled() {
            if std::mem::take(&mut self.quarantined) {
                counters.settle();
            }
            self.holds = Vec::new();
            self.lists = Vec::new();
        }
    }
}

impl Shared {
    fn lock_peers(&self) -> MutexGuard<'_, Vec<NixlPeer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_prepared(&self) -> MutexGuard<'_, VecDeque<(Key, Arc<Prepared>)>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn under_way(&self) -> MutexGuard<'_, UnderWay> {
        self.under_way
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn forget_prepared(&self, peer: Instance) {
        self.lock_prepared()
            .retain(|(key, _)| key.peer != Some(peer));
    }

    /// The prepared list of a grid, made where it is not there yet.
    fn prepared(&self, peer: Option<&NixlPeer>, grid: Grid) -> Result<Arc<Prepared>, Error> {
        let key = Key {
            peer: peer.map(NixlPeer::instance),
            grid,
        };
        let mut prepared = self.lock_prepared();
        if let Some(at) = prepared.iter().position(|(known, _)| *known == key)
            && let Some(entry) = prepared.remove(at)
        {
            let list = entry.1.clone();
            prepared.push_back(entry);
            return Ok(list);
        }
        let name: Option<&CStr> = peer.map(|peer| &*peer.0.name);
        let list = self
            .agent
            .prepare(name, grid.region.place, grid.spans())
            .map_err(lost)?;
        let list = Arc::new(list);
        if prepared.len() >= MAX_PREPARED {
            prepared.pop_front();
        }
        prepared.push_back((key, list.clone()));
        Ok(list)
    }

    /// Asks NIXL how an operation stands, and does what follows from it.
    fn look_at(&self, flight: &Flight) {
        let mut state = flight.lock();
        if state.is_settled() {
            return;
        }
        let mut error = None;
        state.requests.retain_mut(|request| match request.ended() {
            Ok(ended) => !ended,
            Err(code) => {
                error = Some(lost(code));
                false
            }
        });
        if state.outcome.is_none() {
            if let Some(error) = error {
                self.fail(&mut state, error);
            } else if state.requests.is_empty() {
                self.finish(flight, &mut state);
            } else if Instant::now() >= flight.deadline {
                self.fail(&mut state, Error::DeadlinePassed);
            }
        }
        state.release_if_settled(&self.counters);
    }

    /// All bytes are in place.
    fn finish(&self, flight: &Flight, state: &mut FlightState) {
        if let Some(message) = &flight.notification
            && let Err(code) = self.agent.notify(&flight.peer.0.name, message)
        {
            self.fail(state, lost(code));
            return;
        }
        let report = Report {
            bytes: flight.bytes,
            copies: flight.asked,
            copies_posted: flight.posted_copies,
            time_to_post: state.posted.saturating_duration_since(flight.began),
            time_on_wire: state.posted.elapsed(),
        };
        state.outcome = Some(Ok(report));
        self.counters.done(&report);
        flight.peer.0.rate.observe(&report);
    }

    fn fail(&self, state: &mut FlightState, error: Error) {
        state.outcome = Some(Err(error));
        state.quarantined = !state.requests.is_empty();
        self.counters.fail(state.quarantined);
    }

    fn stop(&self, flight: &Flight, error: Error) {
        let mut state = flight.lock();
        if state.outcome.is_none() {
            self.fail(&mut state, error);
            state.release_if_settled(&self.counters);
        }
    }

    /// Lets go of requests that NIXL is still carrying out: only for when the agent goes too.
    fn give_up(&self, flight: &Arc<Flight>) {
        let requests = {
            let mut state = flight.lock();
            if state.is_settled() {
                return;
            }
            state.abandoned = true;
            state.lists = Vec::new();
            std::mem::take(&mut state.requests)
        };
        let mut abandoned = self
            .abandoned
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        abandoned.push((flight.clone(), self.counters.clone()));
        drop(requests);
    }

    /// The driver's life: looks after operations, so that they end, notify and settle whether their
    /// owners poll them or not.
    fn drive(&self) {
        let mut under_way = self.under_way();
        let mut pause = Pause::default();
        while !under_way.closing {
            if under_way.flights.is_empty() {
                under_way = self
                    .changed
                    .wait(under_way)
                    .unwrap_or_else(PoisonError::into_inner);
                pause = Pause::default();
                continue;
            }
            let flights = under_way.flights.clone();
            drop(under_way);
            for flight in &flights {
                self.look_at(flight);
            }
            drop(flights);
            pause.sleep(Duration::from_millis(10));
            under_way = self.under_way();
            let before = under_way.flights.len();
            under_way
                .flights
                .retain(|flight| !flight.lock().is_settled());
            if under_way.flights.len() < before {
                pause = Pause::default();
            }
        }
    }
}

/// Longer and longer pauses between two looks.
#[derive(Debug, Default)]
struct Pause(u32);

impl Pause {
    fn sleep(&mut self, longest: Duration) {
        self.0 += 1;
        let micros = match self.0 {
            0..=8 => 20,
            9..=64 => 100,
            65..=512 => 500,
            _ => 2000,
        };
        std::thread::sleep(Duration::from_micros(micros).min(longest));
    }
}

fn lost(code: Code) -> Error {
    Error::PeerLost(code.to_string())
}

fn name(instance: Instance) -> String {
    format!("kvferry-{instance}")
}

fn instance_of(name: &CStr) -> Option<Instance> {
    let digits = name.to_str().ok()?.strip_prefix("kvferry-")?;
    let mut out = [0; 16];
    if digits.len() != 32 || !digits.is_ascii() {
        return None;
    }
    for (i, byte) in out.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * i..2 * i + 2)?, 16).ok()?;
    }
    Some(Instance(out))
}

fn parse(description: &[u8]) -> Result<(Instance, Spans, &[u8]), Error> {
    let mut fields = Fields(description);
    let mut parse = || {
        if &fields.array::<8>()? != DESCRIPTION {
            return None;
        }
        let instance = Instance(fields.array()?);
        let count = fields.u32()?;
        let mut regions = Vec::new();
        for _ in 0..count {
            regions.push(Region {
                base: fields.u64()?,
                bytes: fields.u64()?,
                place: match fields.u32()? {
                    u32::MAX => Place::Host,
                    n => Place::Gpu(n),
                },
            });
        }
        let metadata = fields.block()?;
        fields.0.is_empty().then_some((instance, regions, metadata))
    };
    let (instance, regions, metadata) = parse()
        .ok_or_else(|| Error::BadDescription("it is not one of the nixl transport".to_owned()))?;
    Ok((instance, Spans::from_peer(regions)?, metadata))
}

/// Whether NIXL is to be had at all: for callers that choose a back end.
pub fn is_available(option: Option<&Path>) -> bool {
    find(option).is_ok()
}
