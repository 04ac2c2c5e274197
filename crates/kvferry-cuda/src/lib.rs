//! Two processes on one host whose memory is on GPUs: one kernel launch carries out a request.
//!
//! Regions are opened in the reading process (`share.rs`), so a kernel there reads the peer's memory
//! like its own, on the same card or over NVLink or PCIe. A request comes as loops
//! ([`Transport::read`]): strides and tables of blocks, a few KB, which the kernel walks by
//! itself; no list of copies exists anywhere. `program.rs` writes what the kernel reads, `loops.h` is
//! the kernel's body, which the tests run on the CPU too.
//!
//! Launches go to a stream of their own, of the lowest priority, and occupy at most
//! [`CudaOptions::sms`] multiprocessors where that is given. A kernel that runs cannot be called back:
//! an operation whose deadline passes, that is cancelled or whose peer is disconnected is quarantined
//! until the kernel has ended, which is soon. A peer that dies does no harm: its memory stays valid as long as it is
//! open here, until [`Transport::disconnect`].
//!
//! Nothing here needs CUDA to build. The driver is loaded when a [`Cuda`] is made, and NVRTC with it:
//! the kernel is compiled for the card at hand, once per process and architecture. Where NVRTC is not
//! wanted, [`CudaOptions::kernel`] names what `nvcc` made of `copy.cu` beforehand: PTX (`nvcc -ptx
//! -arch=compute_80`, for sm_80 and newer) or machine code (`nvcc -cubin -arch=sm_90`).

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use kvferry_layout::{Loops, Region};
use parking_lot::Mutex;

use kvferry_transport::shared::admission::{Admission, Whole};
use kvferry_transport::shared::digests;
use kvferry_transport::shared::random::random;
use kvferry_transport::{Error, Instance, RegionId, Side, Statistics, Transport};

mod card_packer;
#[doc(hidden)]
pub mod digest;
#[doc(hidden)]
pub mod driver;
mod kernel;
mod landing;
mod launch_queue;
#[doc(hidden)]
pub mod nvrtc;
mod options;
mod pack_launch;
mod peer;
mod pinned_cards;
mod program;
mod read_launch;
mod share;
mod signal;
mod staging;
mod twin;
mod watch;

use digest::DigestLaunchers;
use driver::Card;
use landing::Landing;
use launch_queue::{Extent, LaunchQueue};
use program::Program;
use read_launch::ReadLaunch;
use share::{Description, Export, Exports};
use watch::Watch;

pub use card_packer::CardPacker;
#[doc(hidden)]
pub use kernel::ON_THE_CPU;
pub use kernel::{KERNEL, KERNEL_HEADER};
pub use options::CudaOptions;
pub use peer::CudaPeer;
pub use pinned_cards::PinnedCards;
pub use read_launch::CudaTransfer;
pub use share::mappings;
pub use twin::carry_out;

/// The `cuda` back end.
pub struct Cuda {
    card: Card,
    instance: [u8; 16],
    admission: Admission,
    lookers: DigestLaunchers,
    exports: Arc<Exports>,
    peers: Mutex<Vec<CudaPeer>>,
    /// Multiprocessors of the card, and which part of them transfers take.
    all_sms: u32,
    extent: Mutex<Extent>,
    /// Ends with the last launch, before what launches need does.
    watch: Watch,
    line: Mutex<LaunchQueue>,
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("gpu", &self.card.ordinal()).finish_non_exhaustive()
    }
}

impl Cuda {
    /// Opens the card and loads the kernel.
    pub fn new(options: &CudaOptions) -> Result<Self, Error> {
        digest::remember(&options.site_packages);
        let card = Card::open(options.gpu)?;
        let all_sms = card.multiprocessors()?;
        let line = LaunchQueue::new(&card, options)?;
        let instance = random()?;
        let this = Self {
            card,
            instance,
            admission: Admission::new()?,
            lookers: DigestLaunchers::default(),
            exports: Arc::default(),
            peers: Mutex::default(),
            all_sms,
            extent: Mutex::new(Extent::new(options.sms, all_sms)),
            line: Mutex::new(line),
            watch: Watch::start()?,
        };
        peer::OWN.lock().insert(instance, this.exports.clone());
        Ok(this)
    }

    /// Who this is.
    pub fn instance(&self) -> Instance {
        Instance(self.instance)
    }

    /// How many multiprocessors transfers may occupy from now on, as in [`CudaOptions::sms`].
    pub fn set_sms(&self, sms: Option<u32>) {
        *self.extent.lock() = Extent::new(sms, self.all_sms);
    }

    /// Where this process sees an address of a peer's region, for measurements.
    pub fn address_here(&self, peer: &CudaPeer, address: u64) -> Option<u64> {
        let table = peer.table()?;
        let at = table.spans.find(address, 1, 0)?;
        Some(address.wrapping_add(table.shifts[at]))
    }

    /// Marks this point of the stream that kernels run in, for measurements.
    pub fn mark(&self, event: &driver::Event) -> Result<(), Error> {
        self.line.lock().mark(event)
    }
}

impl Transport for Cuda {
    type Peer = CudaPeer;
    type Operation = CudaTransfer;

    fn name(&self) -> &'static str {
        "cuda"
    }

    unsafe fn register(&self, region: Region) -> Result<RegionId, Error> {
        let export = Export::new(&self.card, region)?;
        let id = self.admission.regions.insert(region)?;
        self.exports.insert(id, export);
        Ok(id)
    }

    fn deregister(&self, region: RegionId, deadline: Instant) -> Result<(), Error> {
        let gone = || self.exports.remove(region);
        self.admission.regions.remove(region, deadline, gone, || ()).map(|_| ())
    }

    fn describe(&self) -> Result<Vec<u8>, Error> {
        Ok(Description::write(self.instance, &self.exports.all()))
    }

    fn connect(&self, description: &[u8], _: Instant) -> Result<CudaPeer, Error> {
        let description = Description::read(description)?;
        if !description.is_here() {
            return Err(Error::Unsupported(
                "the peer's GPU memory is on another host: the cuda transport works inside of one; \
                 use nixl"
                    .to_owned(),
            ));
        }
        let mut peers = self.peers.lock();
        if let Some(peer) = peers.iter().find(|peer| peer.instance().0 == description.instance) {
            peer.refresh(&self.card, &description)?;
            return Ok(peer.clone());
        }
        let peer = CudaPeer::open(&self.card, &description)?;
        peers.push(peer.clone());
        Ok(peer)
    }

    fn disconnect(&self, peer: &CudaPeer) {
        self.peers.lock().retain(|other| !other.is(peer));
        let launches = self.watch.launches();
        for launch in launches.iter().filter(|launch| launch.is_of(peer)) {
            launch.stop(Error::Disconnected);
        }
        peer.close();
    }

    /// Checks loops against the regions of both sides, by their extents, and starts them.
    fn read(
        &self,
        peer: &CudaPeer,
        loops: &Loops,
        deadline: Instant,
    ) -> Result<CudaTransfer, Error> {
        let began = Instant::now();
        let table = peer.table().ok_or(Error::Disconnected)?;
        let mut shifts = Vec::with_capacity(loops.nests().len());
        let mut written = Vec::with_capacity(shifts.capacity());
        let mut hint = 0;
        for nest in loops.nests() {
            let (read, write) = nest.extents().ok_or(Error::OutsideRegion {
                side: Side::Peer,
                address: nest.source,
                bytes: u64::MAX,
            })?;
            let bytes = read.end - read.start;
            let outside = Error::OutsideRegion { side: Side::Peer, address: read.start, bytes };
            hint = table.spans.find(read.start, bytes, hint).ok_or(outside)?;
            shifts.push(table.shifts[hint]);
            written.push((write.start, write.end - write.start));
        }
        let whole = Whole { asked: loops.runs(), bytes: loops.bytes(), began };
        let custody = self.admission.open_whole(&whole, &written, deadline, None, peer.rate())?;
        let extent = *self.extent.lock();
        let program = Program::new(loops, extent.batch_bytes(loops.bytes()), |nest| shifts[nest]);
        let mut line = self.line.lock();
        // Nothing to move is done already.
        let Some(part) = custody.take() else { return Ok(CudaTransfer::posted(custody, None)) };
        let tidings = match line.tidings() {
            Ok(tidings) => tidings,
            Err(error) => {
                part.fail(error);
                return Ok(CudaTransfer::posted(custody, None));
            }
        };
        let launch = ReadLaunch::new(peer.clone(), table, part, loops.bytes(), tidings);
        let landing: Arc<dyn Landing> = launch.clone();
        // SAFETY: every address lies in regions of this process, which the part keeps registered, or in
        // memory of the peer, which the table keeps open; the launch has both until it has landed.
        unsafe { line.start(&program, extent, &landing) };
        drop(line);
        self.watch.add(launch.clone());
        Ok(CudaTransfer::posted(custody, Some(launch)))
    }

    fn digest(
        &self,
        program: &kvferry_digest::Program,
        deadline: Instant,
    ) -> Result<Vec<kvferry_digest::Digest>, Error> {
        digests::digest(&self.admission, Some(&self.lookers), program, deadline)
    }

    fn statistics(&self) -> Statistics {
        self.admission.statistics()
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        for launch in self.watch.launches() {
            launch.stop(Error::Disconnected);
        }
        // Kernels end by themselves; nothing lands after this.
        if let Err(error) = self.line.lock().finish() {
            tracing::warn!("the GPU does not say whether copies have ended: {error}");
        }
        peer::OWN.lock().remove(&self.instance);
        for peer in std::mem::take(&mut *self.peers.lock()) {
            peer.close();
        }
    }
}

#[cfg(test)]
mod tests;
