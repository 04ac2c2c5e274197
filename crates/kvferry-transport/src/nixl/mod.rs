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

use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvferry_digest::{Digest, Program};
use kvferry_layout::{ByteCopy, Place, Price, Region};
use parking_lot::{Condvar, Mutex};

use crate::contract::{Error, Instance, RegionId, Statistics, Transport};
use crate::shared::Transfer;
use crate::shared::desk::Desk;
use crate::shared::look;
use crate::shared::random::random;
use crate::shared::rate::{Medium, RateWatch};
use crate::shared::spans::Spans;

pub mod capi;
mod context;
mod driver;
mod find;
mod grid;
mod install;
mod job;
mod options;
mod peer;
mod prepared;
mod price;
mod state;

use capi::{Agent, AgentError};
use driver::Driver;
pub(crate) use find::guessed_site_packages;
pub use find::{VARIABLE, VERSION, cache_directory, find};
pub use install::install;
use job::Job;
pub use options::NixlOptions;
use peer::Description;
pub use peer::NixlPeer;
use prepared::PreparedLists;
use state::{Abandoned, Posted, State};

/// The `nixl` back end.
#[derive(Debug)]
pub struct Nixl {
    state: Arc<State>,
    driver: Option<JoinHandle<()>>,
}

impl Nixl {
    /// Loads NIXL and makes an agent.
    pub fn new(options: &NixlOptions) -> Result<Self, Error> {
        crate::cuda::digest::remember(&options.site_packages);
        let library = find::find_in(options.library.as_deref(), &options.site_packages)?;
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
        let state = Arc::new(State {
            agent: Arc::new(agent),
            instance,
            desk: Desk::new()?,
            peers: Mutex::default(),
            prepared: PreparedLists::default(),
            queue: Mutex::default(),
            changed: Condvar::new(),
            abandoned: Abandoned::default(),
        });
        let driver = std::thread::Builder::new()
            .name("kvferry-nixl".to_owned())
            .spawn({
                let driver = Driver::new(state.clone());
                move || driver.run()
            })
            .map_err(|error| Error::system("starting a thread", &error))?;
        Ok(Self { state, driver: Some(driver) })
    }

    /// Who this is.
    pub fn instance(&self) -> Instance {
        self.state.instance
    }

    fn load(&self, metadata: &[u8]) -> Result<CString, Error> {
        self.state.agent.load(metadata).map_err(|code| {
            Error::BadDescription(format!("NIXL cannot load the peer's metadata: {code}"))
        })
    }

    /// Waits until nothing of a peer's is under way; then NIXL may be told new things about it.
    fn quiesce(&self, peer: &NixlPeer, deadline: Instant) -> Result<(), Error> {
        while *peer.0.under_way.lock() > 0 {
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
            let _queue = self.state.queue.lock();
            peer.0.paused.store(true, Ordering::SeqCst);
        }
        let loaded = self.quiesce(peer, deadline).and_then(|()| {
            self.state.prepared.forget_peer(peer.instance());
            // NIXL does not add to what it knows of a peer.
            let _ = self.state.agent.forget(&peer.0.name);
            self.load(metadata)
        });
        if loaded.is_ok() {
            *peer.0.spans.lock() = Arc::new(spans);
        }
        peer.0.paused.store(false, Ordering::SeqCst);
        self.state.changed.notify_all();
        loaded.map(|_| ())
    }
}

impl Transport for Nixl {
    type Peer = NixlPeer;
    type Operation = Transfer;

    fn name(&self) -> &'static str {
        "nixl"
    }

    unsafe fn register(&self, region: Region) -> Result<RegionId, Error> {
        let regions = &self.state.desk.regions;
        let id = regions.insert(region)?;
        let span = (region.base, region.bytes, region.place);
        // SAFETY: the caller's promise is the same.
        if let Err(code) = unsafe { self.state.agent.register(span) } {
            let _ = regions.remove(id, Instant::now(), || (), || ());
            return Err(Error::Unsupported(format!(
                "NIXL does not take {} bytes at {:#x} ({:?}): {code}",
                region.bytes, region.base, region.place
            )));
        }
        if let Place::Gpu(gpu) = region.place {
            self.state.queue.lock().gpu = Some(gpu);
        }
        Ok(id)
    }

    fn deregister(&self, region: RegionId, deadline: Instant) -> Result<(), Error> {
        let region = self.state.desk.regions.remove(region, deadline, || (), || ())?;
        self.state.prepared.forget_region(region);
        self.state
            .agent
            .deregister((region.base, region.bytes, region.place))
            .map_err(|code| Error::Unsupported(format!("NIXL does not let go of memory: {code}")))
    }

    fn describe(&self) -> Result<Vec<u8>, Error> {
        let metadata = self
            .state
            .agent
            .metadata()
            .map_err(|code| Error::Unsupported(format!("NIXL gives no metadata: {code}")))?;
        let (instance, spans) = (self.state.instance, self.state.desk.regions.spans());
        Ok(Description { instance, spans, metadata: &metadata }.encode())
    }

    fn connect(&self, description: &[u8], deadline: Instant) -> Result<NixlPeer, Error> {
        let Description { instance, spans, metadata } = Description::parse(description)?;
        // Held throughout, so that two calls do not load the same peer at once.
        let mut peers = self.state.peers.lock();
        let known = peers.iter().find(|peer| peer.instance() == instance);
        if let Some(peer) = known.cloned() {
            if *peer.spans() != spans {
                self.reload(&peer, spans, metadata, deadline)?;
            }
            return Ok(peer);
        }
        // It may have been disconnected a moment ago: NIXL must have forgotten it first.
        while (self.state.queue.lock().leaving.iter()).any(|peer| peer.instance() == instance) {
            if Instant::now() >= deadline {
                return Err(Error::DeadlinePassed);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let loaded = self.load(metadata)?;
        if loaded.to_bytes() != name(instance).as_bytes() {
            let _ = self.state.agent.forget(&loaded);
            return Err(Error::BadDescription(
                "it names one process and holds the metadata of another".to_owned(),
            ));
        }
        let rate = RateWatch::new(Medium::Nixl(Medium::fastest_rdma()));
        let peer = NixlPeer::new(instance, loaded, spans, rate);
        peers.push(peer.clone());
        Ok(peer)
    }

    fn disconnect(&self, peer: &NixlPeer) {
        if peer.0.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        // Before it leaves the list of peers, so that whoever connects to it again finds it in one
        // of the two.
        self.state.queue.lock().leaving.push(peer.clone());
        self.state.peers.lock().retain(|other| !other.is(peer));
        self.state.changed.notify_all();
    }

    fn price(&self, peer: &NixlPeer) -> Price {
        let gpu = peer.is_on_gpu() || self.state.queue.lock().gpu.is_some();
        price::price(gpu, peer.0.rate.medium())
    }

    fn read(
        &self,
        peer: &NixlPeer,
        copies: &[ByteCopy],
        deadline: Instant,
    ) -> Result<Transfer, Error> {
        if peer.0.closed.load(Ordering::SeqCst) {
            return Err(Error::Disconnected);
        }
        let theirs = peer.spans();
        let desk = &self.state.desk;
        let opened = desk.open(copies, &theirs, deadline, None, &peer.0.rate)?;
        if opened.on_gpu {
            peer.0.rate.gpu();
        }
        if !opened.custody.is_empty() {
            let posted = Posted {
                custody: opened.custody.clone(),
                peer: peer.clone(),
                bytes: opened.copies.iter().map(|copy| copy.bytes).sum(),
                job: Job::new(copies, &opened.copies, &desk.regions.spans(), &theirs),
            };
            self.state.queue.lock().posted.push_back(posted);
            self.state.changed.notify_all();
        }
        Ok(Transfer::posted(opened.custody))
    }

    fn digest(&self, program: &Program, deadline: Instant) -> Result<Vec<Digest>, Error> {
        look::digest(&self.state.desk.regions, program, deadline)
    }

    fn statistics(&self) -> Statistics {
        self.state.desk.statistics()
    }
}

impl Drop for Nixl {
    fn drop(&mut self) {
        self.state.queue.lock().closing = true;
        self.state.changed.notify_all();
        // The driver ends everything; what it could not end is safe once the agent, of which this
        // transport now has the last hold, is gone.
        if let Some(driver) = self.driver.take() {
            let _ = driver.join();
        }
    }
}

/// What NIXL is to call a process.
fn name(instance: Instance) -> String {
    format!("kvferry-{instance}")
}
