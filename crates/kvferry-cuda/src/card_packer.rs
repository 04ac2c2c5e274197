//! A card that moves bytes within its own memory, for another transport: it gathers runs into a buffer that
//! is moved in one piece, and scatters what came in one. The same kernel, on a stream of its own.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvferry_layout::Loops;
use parking_lot::Mutex;

use super::driver::{Card, Event, OnCard, Stream};
use super::launch_queue::{Extent, LaunchQueue};
use super::options::CudaOptions;
use super::pack_launch::PackLaunch;
use super::program::Program;
use kvferry_transport::Error;
use kvferry_transport::shared::packing_area::{CopyEngine, Launched};

/// Carries loops out on one card.
pub struct CardPacker {
    card: Card,
    extent: Extent,
    /// How long who waits for a launch does not sleep.
    awake: Duration,
    line: Mutex<LaunchQueue>,
}

impl CardPacker {
    /// Opens the card and loads the kernel.
    pub fn new(options: &CudaOptions) -> Result<Self, Error> {
        let card = Card::open(options.gpu)?;
        let all = card.multiprocessors()?;
        let line = Mutex::new(LaunchQueue::new(&card, options)?);
        // Most launches within a card take less than this.
        let awake = Duration::from_millis(1);
        Ok(Self { extent: Extent::new(options.sms, all), awake, card, line })
    }

    /// For launches that others go on beside: who waits sleeps soon.
    pub(super) fn patient(mut self) -> Self {
        self.awake = Duration::from_micros(20);
        self
    }

    /// Bytes of the card's memory that nobody has.
    pub fn free_memory(&self) -> Result<u64, Error> {
        self.card.free_memory()
    }

    /// Memory of the card, and its address; it is freed with what is returned.
    pub fn allocate(&self, bytes: u64) -> Result<(u64, Box<dyn Any + Send>), Error> {
        let memory = OnCard::new(&self.card, bytes as usize)?;
        Ok((memory.address(), Box::new(memory)))
    }

    /// Memory of the host that the card reads and writes, and its address; it is freed with what is returned.
    pub(super) fn pin(&self, bytes: u64) -> Result<(u64, Box<dyn Any + Send>), Error> {
        let pinned = self.card.pinned(bytes as usize)?;
        Ok((pinned.memory as u64, Box::new(pinned)))
    }

    /// The stream that launches are in, one behind the other.
    pub(super) fn stream(&self) -> Arc<Stream> {
        self.line.lock().stream()
    }

    /// A stream for copies beside the launches.
    pub(super) fn copies(&self) -> Result<Stream, Error> {
        self.card.stream(true)
    }

    /// Something to mark a point of the stream with.
    pub(super) fn event(&self) -> Result<Event, Error> {
        self.card.event(false)
    }

    /// # Safety
    ///
    /// As of [`CopyEngine::start`].
    pub(super) unsafe fn launch(&self, loops: &Loops) -> Result<PackLaunch, Error> {
        let program = Program::new(loops, self.extent.batch_bytes(loops.bytes()), |_| 0);
        // SAFETY: the caller's promise.
        unsafe { PackLaunch::start(&self.line, &program, self.extent, self.awake) }
    }
}

impl CopyEngine for CardPacker {
    unsafe fn start(&self, loops: &Loops) -> Result<Box<dyn Launched>, Error> {
        // SAFETY: the caller's promise.
        Ok(Box::new(unsafe { self.launch(loops)? }))
    }
}

impl Drop for CardPacker {
    fn drop(&mut self) {
        // Kernels end by themselves; what they touch may go after this.
        if let Err(error) = self.line.lock().finish() {
            tracing::warn!("the GPU does not say whether packing has ended: {error}");
        }
    }
}

impl fmt::Debug for CardPacker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CardPacker").field("gpu", &self.card.ordinal()).finish_non_exhaustive()
    }
}
