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
//! cancelled or late operation is [`Status::Quarantined`](kvferry_transport::Status::Quarantined).
//!
//! Short runs are packed, on the host and on a card: see `packing.rs`.
//!
//! Copies that touch are merged before they are posted. Many equal copies on one grid on each side
//! (the blocks of a pool) are posted as entries of prepared lists, one per region and size, which
//! NIXL stores in next to no memory.

use std::ffi::CString;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvferry_cuda::digest::DigestLaunchers;
use kvferry_digest::{Digest, Program};
use kvferry_layout::{Loops, Place, Region};
use parking_lot::{Condvar, Mutex};

use kvferry_transport::shared::Transfer;
use kvferry_transport::shared::admission::{Admission, Whole};
use kvferry_transport::shared::chunks::Chunked;
use kvferry_transport::shared::custody::Interrupt;
use kvferry_transport::shared::digests;
use kvferry_transport::shared::packing_area::PackingAreas;
use kvferry_transport::shared::random::random;
use kvferry_transport::shared::rate::{Medium, RateWatch};
use kvferry_transport::shared::spans::Spans;
use kvferry_transport::shared::staging::Staging;
use kvferry_transport::tcp::gather;
use kvferry_transport::{Error, Instance, RegionId, StagingStatistics, Statistics, Transport};

#[doc(hidden)]
pub mod capi;
mod context;
mod driver;
mod find;
mod foreign;
mod grid;
mod install;
mod job;
mod options;
mod packer;
mod packing;
mod peer;
mod prepared;
mod state;
#[cfg(test)]
mod tests;
mod wheel;

use capi::{Agent, AgentError};
use driver::Driver;
pub use find::{VARIABLE, VERSION, cache_directory, find};
pub use foreign::{Bell, describe_foreign};
pub use install::install;
use options::Segments;
pub use options::{CardPacking, NixlOptions};
pub use packer::PACKS_BELOW;
use packer::PackerAddress;
use packing::Control;
use peer::Description;
pub use peer::NixlPeer;
use prepared::PreparedLists;
use state::{Abandoned, State};

/// The `nixl` back end.
#[derive(Debug)]
pub struct Nixl {
    /// First: it serves memory that the others keep.
    control: Option<Control>,
    state: Arc<State>,
    driver: Option<JoinHandle<()>>,
}

impl Nixl {
    /// Loads NIXL and makes an agent.
    pub fn new(options: &NixlOptions) -> Result<Self, Error> {
        kvferry_cuda::digest::remember(&options.site_packages);
        let library = find::find_in(options.library.as_deref(), &options.site_packages)?;
        // SAFETY: who set this up chose the library, by an option, the environment or an installed package, as one
        // chooses any dependency.
        let nixl = unsafe { capi::Nixl::load(&library) }
            .map_err(|error| find::does_not_load(&library, &error))?;
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
        let staging = Staging::new(options.staging, gather::SLOT_BYTES)?;
        let state = Arc::new(State {
            agent: Arc::new(agent),
            instance,
            admission: Admission::new()?,
            lookers: DigestLaunchers::default(),
            peers: Mutex::default(),
            prepared: PreparedLists::default(),
            queue: Mutex::default(),
            changed: Condvar::new(),
            abandoned: Abandoned::default(),
            orphans: Mutex::default(),
            areas: PackingAreas::new(staging.clone()),
            options: options.clone(),
        });
        if let Some(region) = staging.region() {
            // SAFETY: the memory is kept by the state for longer than the agent, and only touched
            // through its address.
            unsafe { state.register(region)? };
        }
        let control = Control::start(&state, options)?;
        let driver = std::thread::Builder::new()
            .name("kvferry-nixl".to_owned())
            .spawn({
                let driver = Driver::new(state.clone());
                move || driver.run()
            })
            .map_err(|error| Error::system("starting a thread", &error))?;
        Ok(Self { control, state, driver: Some(driver) })
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
            peer.0.metadata.lock().clear();
            let _ = self.state.agent.forget(&peer.0.name);
            self.load(metadata)
        });
        if loaded.is_ok() {
            *peer.0.spans.lock() = Arc::new(spans);
            *peer.0.metadata.lock() = metadata.to_vec();
        }
        peer.0.paused.store(false, Ordering::SeqCst);
        self.state.changed.notify_all();
        loaded.map(|_| ())
    }

    /// Tells NIXL what is new of a peer. Answers whether something is.
    fn refresh(
        &self,
        peer: &NixlPeer,
        spans: Spans,
        metadata: &[u8],
        deadline: Instant,
    ) -> Result<bool, Error> {
        // One at a time.
        let Some(_turn) = peer.0.refreshed.try_lock_until(deadline) else {
            return Err(Error::DeadlinePassed);
        };
        // Memory that was registered anew has other keys, also where it lies at the same addresses.
        let is_new = *peer.spans() != spans || *peer.0.metadata.lock() != metadata;
        if is_new {
            self.reload(peer, spans, metadata, deadline)?;
        }
        Ok(is_new)
    }

    /// Asks a peer whether it packs, where that is not known: what it says of itself is new, or there is memory
    /// of another kind than when it was asked.
    fn meet(&self, peer: &NixlPeer, told: Option<PackerAddress>, is_new: bool, deadline: Instant) {
        // Held throughout, so that nobody else asks the same.
        let (Some(told), Some(mut met)) = (told, peer.0.met.try_lock_until(deadline)) else {
            return;
        };
        let ours = self.state.has_gpu();
        let on_cards = Some((ours, peer.is_on_gpu()));
        if (*met == on_cards && !is_new) || peer.packer(ours).is_some() {
            return;
        }
        *met = on_cards;
        if let Some(packer) = packing::meet(&self.state, peer, &told, deadline) {
            peer.adopt(packer);
        }
    }
}

impl Transport for Nixl {
    type Peer = NixlPeer;
    type Operation = Transfer;

    fn name(&self) -> &'static str {
        "nixl"
    }

    unsafe fn register(&self, region: Region) -> Result<RegionId, Error> {
        // SAFETY: the caller's promise is the same.
        let id = unsafe { self.state.register(region)? };
        if let Place::Gpu(gpu) = region.place {
            self.state.queue.lock().gpu = Some(gpu);
            if self.control.is_some() {
                self.state.pack_on(gpu);
            }
        }
        Ok(id)
    }

    fn deregister(&self, region: RegionId, deadline: Instant) -> Result<(), Error> {
        let region = self.state.admission.regions.remove(region, deadline, || (), || ())?;
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
        let mut metadata = metadata;
        if let Some(control) = &self.control {
            metadata.extend(control.describe(&self.state.areas)?);
        }
        let (instance, spans) = (self.state.instance, self.state.admission.regions.spans());
        let segments = Some(Segments::of_this_process());
        let (foreign, metadata, told) = (false, &metadata[..], None);
        Ok(Description { instance, foreign, segments, spans, metadata, told }.encode())
    }

    fn connect(&self, description: &[u8], deadline: Instant) -> Result<NixlPeer, Error> {
        let Description { instance, foreign, segments, spans, metadata, told } =
            Description::parse(description)?;
        segments.map_or(Ok(()), |theirs| Segments::of_this_process().check(theirs))?;
        loop {
            // Held while it is loaded, so that two calls do not load the same peer at once; never while something is
            // waited for, since others connect and disconnect meanwhile.
            let mut peers = self.state.peers.lock();
            let known = peers.iter().find(|peer| peer.instance() == instance).cloned();
            if let Some(peer) = known {
                drop(peers);
                let is_new = self.refresh(&peer, spans, metadata, deadline)?;
                self.meet(&peer, told, is_new, deadline);
                return Ok(peer);
            }
            // It may have been disconnected a moment ago: NIXL must have forgotten it first.
            let leaves = |peer: &NixlPeer| peer.instance() == instance;
            if !self.state.queue.lock().leaving.iter().any(leaves) {
                let loaded = self.load(metadata)?;
                if !foreign && loaded.to_bytes() != name(instance).as_bytes() {
                    let _ = self.state.agent.forget(&loaded);
                    return Err(Error::BadDescription(
                        "it names one process and holds the metadata of another".to_owned(),
                    ));
                }
                let rate = RateWatch::new(Medium::Nixl(Medium::fastest_rdma()));
                let peer = NixlPeer::new(instance, loaded, (spans, metadata), rate);
                peers.push(peer.clone());
                drop(peers);
                self.meet(&peer, told, true, deadline);
                return Ok(peer);
            }
            drop(peers);
            if Instant::now() >= deadline {
                return Err(Error::DeadlinePassed);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn endpoints(&self, description: &[u8]) -> Vec<SocketAddr> {
        let told = Description::parse(description).ok().and_then(|described| described.told);
        told.map(|told| told.endpoint()).into_iter().collect()
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
        peer.dismiss_packers();
    }

    fn read(&self, peer: &NixlPeer, loops: &Loops, deadline: Instant) -> Result<Transfer, Error> {
        if peer.0.closed.load(Ordering::SeqCst) {
            return Err(Error::Disconnected);
        }
        let theirs = peer.spans();
        let opened = self.state.admission.open(loops, &theirs, deadline, None, &peer.0.rate)?;
        self.state.post(peer, loops.copies(), opened, &theirs)
    }

    fn packs_below(&self, peer: &NixlPeer) -> u64 {
        peer.packer(self.state.has_gpu()).map_or(0, |packer| packer.packs_below(peer.medium()))
    }

    fn read_packed(
        &self,
        peer: &NixlPeer,
        loops: &Loops,
        deadline: Instant,
    ) -> Result<Transfer, Error> {
        let (whole, written) = Whole::of(loops)?;
        let way = peer.packer(self.state.has_gpu()).and_then(|packer| {
            let (ours, theirs) = (self.state.admission.regions.spans(), peer.spans());
            let spans = (&ours, &*theirs);
            Some((packer.limits(spans, &self.state.areas, loops, &written)?, packer))
        });
        let Some((limits, packer)) = way else {
            return self.read(peer, loops, deadline);
        };
        if peer.0.closed.load(Ordering::SeqCst) {
            return Err(Error::Disconnected);
        }
        let client = &packer.client;
        let interrupt: Weak<dyn Interrupt> = Arc::downgrade(client) as _;
        let rate = &peer.0.rate;
        let admission = &self.state.admission;
        let custody = admission.open_whole(&whole, &written, deadline, Some(interrupt), rate)?;
        if !custody.is_empty() {
            client.post(Chunked::packed(custody.clone(), loops.clone(), limits));
        }
        Ok(Transfer::posted(custody))
    }

    fn staging(&self) -> StagingStatistics {
        self.state.settle_orphans();
        self.state.areas.statistics()
    }

    fn digest(&self, program: &Program, deadline: Instant) -> Result<Vec<Digest>, Error> {
        digests::digest(&self.state.admission, Some(&self.state.lookers), program, deadline)
    }

    fn statistics(&self) -> Statistics {
        let turned_away = self.control.as_ref().map_or(0, Control::turned_away);
        Statistics { turned_away, ..self.state.admission.statistics() }
    }
}

impl Drop for Nixl {
    fn drop(&mut self) {
        let peers = self.state.peers.lock().clone();
        peers.iter().for_each(NixlPeer::dismiss_packers);
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
