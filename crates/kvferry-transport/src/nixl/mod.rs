//! NVIDIA's transfer library, for RDMA, NVLink and GPU memory.
//!
//! The library comes from NIXL's Python wheel and is loaded at run time; [`find()`] says where it is
//! looked for and [`install()`] fetches it. No C++ compiler is involved.
//!
//! A thread of its own, the driver, makes all calls that move bytes: on one host NIXL copies inside
//! such calls, and the caller should not wait for that. The driver sleeps while there is nothing to
//! do.
//!
//! NIXL cannot take a transfer back: a request that is released while its peer is silent may still
//! land later. So the driver releases a request only when NIXL says that it has ended. Until then a
//! cancelled or late operation is [`Status::Quarantined`](crate::Status::Quarantined).
//!
//! Copies that touch are merged before they are posted. Many equal copies on one grid on each side
//! (the blocks of a pool) are posted as entries of prepared lists, one per region and size, which
//! NIXL stores in next to no memory.

use std::collections::VecDeque;
use std::ffi::{CStr, CString};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::bytes::{Fields, put_block};
use crate::counters::Counters;
use crate::error::Error;
use crate::merge::Direction;
use crate::random::random;
use crate::rate::{Link, RateWatch};
use crate::region::{RegionId, Regions, Spans};
use crate::tcp::check_notification;
use crate::transport::{Instance, Notification, Statistics, Transport};

use kvferry_layout::{ByteCopy, Place, Price, Region};

pub mod capi;
mod cuda;
mod driver;
mod find;
mod flight;
mod grid;

use capi::{Agent, AgentError, AgentSettings, Code, Prepared, Span};
use driver::Driver;
pub(crate) use find::site_packages;
pub use find::{VARIABLE, VERSION, cache_directory, find, install};
pub use flight::NixlTransfer;
use flight::{Flight, Job, Order};
use grid::Grid;

/// Below this many copies, single descriptors cost next to nothing.
const FEW: usize = 64;
/// Prepared lists kept at once.
const MAX_PREPARED: usize = 64;

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
            // Without this UCX reads another process's GPU memory in software where it sees no
            // NVLink, one card included: 0.5 GB/s instead of 1,800 on an H200.
            ("engine_config", "CUDA_IPC_ENABLE_GET_ZCOPY=on"),
        ];
        Self {
            library: None,
            plugin: "UCX".to_owned(),
            parameters: parameters.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec(),
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
    queue: Mutex<Queue>,
    /// There is something for the driver, or it has done something others may wait for.
    changed: Condvar,
    /// After the agent: dropped when it is gone.
    abandoned: Abandoned,
}

/// What the driver is to do.
#[derive(Debug, Default)]
struct Queue {
    flights: VecDeque<Arc<Flight>>,
    /// Peers to forget as soon as nothing of theirs is under way.
    leaving: Vec<NixlPeer>,
    /// The GPU whose memory was registered last.
    gpu: Option<u32>,
    closing: bool,
}

/// Operations whose requests were released although NIXL had not ended them. They are safe when the
/// agent is no more.
#[derive(Debug, Default)]
struct Abandoned(Mutex<Vec<Arc<Flight>>>);

impl Drop for Abandoned {
    fn drop(&mut self) {
        let flights = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        for flight in flights.drain(..) {
            flight.let_go(None);
        }
    }
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
    /// Nothing new is posted while its metadata is being replaced.
    paused: AtomicBool,
    /// Operations that the driver has taken and that have not ended.
    under_way: Mutex<usize>,
}

impl NixlPeer {
    /// Who it is.
    pub fn instance(&self) -> Instance {
        self.0.instance
    }

    fn spans(&self) -> Arc<Spans> {
        self.0.spans.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn under_way(&self) -> MutexGuard<'_, usize> {
        self.0.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for NixlPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NixlPeer").field(&self.0.instance).finish()
    }
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
            queue: Mutex::default(),
            changed: Condvar::new(),
            abandoned: Abandoned::default(),
        });
        let driver = std::thread::Builder::new()
            .name("kvferry-nixl".to_owned())
            .spawn({
                let driver = Driver::new(shared.clone());
                move || driver.run()
            })
            .map_err(|error| Error::system("starting a thread", &error))?;
        Ok(Self { shared, driver: Some(driver) })
    }

    /// Who this is.
    pub fn instance(&self) -> Instance {
        self.shared.instance
    }

    fn post(
        &self,
        direction: Direction,
        peer: &NixlPeer,
        copies: &[ByteCopy],
        notification: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<NixlTransfer, Error> {
        let began = Instant::now();
        check_notification(notification)?;
        if peer.0.closed.load(Ordering::SeqCst) {
            return Err(Error::Disconnected);
        }
        let theirs = peer.spans();
        let admitted = self.shared.regions.admit(copies, direction, &theirs)?;
        if admitted.on_gpu {
            peer.0.rate.gpu();
        }
        let ours = self.shared.regions.spans();
        let bytes = admitted.copies.iter().map(|copy| copy.bytes).sum();
        let posted = admitted.copies.len();
        let flight = Flight::new(Order {
            peer: peer.clone(),
            notification,
            deadline,
            began,
            asked: copies.len(),
            posted,
            bytes,
            job: job(direction, copies, admitted.copies, &ours, &theirs),
            holds: admitted.holds,
            counters: self.shared.counters.clone(),
        });
        self.shared.lock().flights.push_back(flight.clone());
        self.shared.changed.notify_all();
        flight.posted();
        Ok(NixlTransfer(flight))
    }

    fn load(&self, metadata: &[u8]) -> Result<CString, Error> {
        self.shared.agent.load(metadata).map_err(|code| {
            Error::BadDescription(format!("NIXL cannot load the peer's metadata: {code}"))
        })
    }

    /// Waits until nothing of a peer's is under way; then NIXL may be told new things about it.
    fn quiesce(&self, peer: &NixlPeer, deadline: Instant) -> Result<(), Error> {
        while *peer.under_way() > 0 {
            if Instant::now() >= deadline {
                return Err(Error::DeadlinePassed);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Replaces what NIXL knows of a peer.
    fn reload(
        &self,
        peer: &NixlPeer,
        spans: Spans,
        metadata: &[u8],
        deadline: Instant,
    ) -> Result<(), Error> {
        {
            let _queue = self.shared.lock();
            peer.0.paused.store(true, Ordering::SeqCst);
        }
        let loaded = self.quiesce(peer, deadline).and_then(|()| {
            self.shared.forget_prepared(peer.0.instance);
            // NIXL does not add to what it knows of a peer.
            let _ = self.shared.agent.forget(&peer.0.name);
            self.load(metadata)
        });
        if loaded.is_ok() {
            *peer.0.spans.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(spans);
        }
        peer.0.paused.store(false, Ordering::SeqCst);
        self.shared.changed.notify_all();
        loaded.map(|_| ())
    }
}

/// How to carry copies out: on prepared lists, where they allow it and are many, or one by one.
fn job(
    direction: Direction,
    copies: &[ByteCopy],
    merged: Vec<ByteCopy>,
    ours: &Spans,
    theirs: &Spans,
) -> Job {
    let write = direction == Direction::Write;
    let here = |copy: &ByteCopy| if write { copy.source } else { copy.destination };
    let there = |copy: &ByteCopy| if write { copy.destination } else { copy.source };
    if merged.len() > FEW
        && let Some(our_grid) = Grid::of(copies, here, ours)
        && let Some(their_grid) = Grid::of(copies, there, theirs)
    {
        return Job::OnGrids { write, ours: our_grid, theirs: their_grid };
    }
    let place = |spans: &Spans, address, bytes, hint: &mut usize| {
        *hint = spans.find(address, bytes, *hint).unwrap_or(usize::MAX);
        let region = spans.0.get(*hint);
        region.map_or(Place::Host, |region| region.place)
    };
    let (mut our_hint, mut their_hint) = (usize::MAX, usize::MAX);
    // A request's descriptors are of one kind of memory on each side.
    type Group = ((bool, bool), Vec<(Span, Span)>);
    let mut groups: Vec<Group> = Vec::new();
    for copy in &merged {
        let (here, there) = (here(copy), there(copy));
        let here = (here, copy.bytes, place(ours, here, copy.bytes, &mut our_hint));
        let there = (there, copy.bytes, place(theirs, there, copy.bytes, &mut their_hint));
        let kinds = (here.2 == Place::Host, there.2 == Place::Host);
        match groups.iter_mut().find(|(known, _)| *known == kinds) {
            Some((_, group)) => group.push((here, there)),
            None => groups.push((kinds, vec![(here, there)])),
        }
    }
    Job::OneByOne { write, groups: groups.into_iter().map(|(_, group)| group).collect() }
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
        if let Place::Gpu(gpu) = region.place {
            self.shared.lock().gpu = Some(gpu);
        }
        Ok(id)
    }

    fn deregister(&self, region: RegionId, deadline: Instant) -> Result<(), Error> {
        let region = self.shared.regions.remove(region, deadline, || (), || ())?;
        self.shared
            .lock_prepared()
            .retain(|(key, _)| key.peer.is_some() || key.grid.region != region);
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

    fn connect(&self, description: &[u8], deadline: Instant) -> Result<NixlPeer, Error> {
        let (instance, spans, metadata) = parse(description)?;
        // Held throughout, so that two calls do not load the same peer at once.
        let mut peers = self.shared.lock_peers();
        let known = peers.iter().find(|peer| peer.0.instance == instance);
        if let Some(peer) = known.cloned() {
            if *peer.spans() != spans {
                self.reload(&peer, spans, metadata, deadline)?;
            }
            return Ok(peer);
        }
        // It may have been disconnected a moment ago: NIXL must have forgotten it first.
        while (self.shared.lock().leaving.iter()).any(|peer| peer.0.instance == instance) {
            if Instant::now() >= deadline {
                return Err(Error::DeadlinePassed);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let loaded = self.load(metadata)?;
        if loaded.to_bytes() != name(instance).as_bytes() {
            let _ = self.shared.agent.forget(&loaded);
            return Err(Error::BadDescription(
                "it names one process and holds the metadata of another".to_owned(),
            ));
        }
        let gpu = spans.0.iter().any(|region| region.place != Place::Host);
        let rate = RateWatch::new(Link::Nixl(Link::fastest_rdma()));
        if gpu {
            rate.gpu();
        }
        let peer = NixlPeer(Arc::new(Inner {
            instance,
            name: loaded,
            spans: Mutex::new(Arc::new(spans)),
            rate: Arc::new(rate),
            closed: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            under_way: Mutex::new(0),
        }));
        peers.push(peer.clone());
        Ok(peer)
    }

    fn disconnect(&self, peer: &NixlPeer) {
        if peer.0.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        // Before it leaves the list of peers, so that whoever connects to it again finds it in one
        // of the two.
        self.shared.lock().leaving.push(peer.clone());
        self.shared.lock_peers().retain(|other| !Arc::ptr_eq(&other.0, &peer.0));
        self.shared.changed.notify_all();
    }

    fn price(&self, _: &NixlPeer) -> Price {
        // Half a microsecond a copy, 8 GB/s.
        Price { launch: 0.0, copy: 512.0, byte: 0.125 }
    }

    fn read(
        &self,
        peer: &NixlPeer,
        copies: &[ByteCopy],
        notification: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<NixlTransfer, Error> {
        self.post(Direction::Read, peer, copies, notification, deadline)
    }

    fn write(
        &self,
        peer: &NixlPeer,
        copies: &[ByteCopy],
        notification: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<NixlTransfer, Error> {
        self.post(Direction::Write, peer, copies, notification, deadline)
    }

    fn notifications(&self, until: Instant) -> Result<Vec<Notification>, Error> {
        let mut pause = driver::Pause::default();
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
            std::thread::sleep(pause.next().min(left));
        }
    }

    fn statistics(&self) -> Statistics {
        self.shared.counters.read()
    }
}

impl Drop for Nixl {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.changed.notify_all();
        // The driver ends everything; what it could not end is safe once the agent, of which this
        // transport now has the last hold, is gone.
        if let Some(driver) = self.driver.take() {
            let _ = driver.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_peers(&self) -> MutexGuard<'_, Vec<NixlPeer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_prepared(&self) -> MutexGuard<'_, VecDeque<(Key, Arc<Prepared>)>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget_prepared(&self, peer: Instance) {
        self.lock_prepared().retain(|(key, _)| key.peer != Some(peer));
    }

    /// The prepared list of a grid, made where it is not there yet.
    fn prepared(&self, peer: Option<&NixlPeer>, grid: Grid) -> Result<Arc<Prepared>, Error> {
        let key = Key { peer: peer.map(NixlPeer::instance), grid };
        let mut prepared = self.lock_prepared();
        if let Some(at) = prepared.iter().position(|(known, _)| *known == key)
            && let Some(entry) = prepared.remove(at)
        {
            let list = entry.1.clone();
            prepared.push_back(entry);
            return Ok(list);
        }
        let name: Option<&CStr> = peer.map(|peer| &*peer.0.name);
        let list = self.agent.prepare(name, grid.region.place, grid.spans()).map_err(lost)?;
        let list = Arc::new(list);
        if prepared.len() >= MAX_PREPARED {
            prepared.pop_front();
        }
        prepared.push_back((key, list.clone()));
        Ok(list)
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
