//! A card that moves bytes within its own memory, for another transport: it gathers runs into a buffer that
//! is moved in one piece, and scatters what came in one. The same kernel, on a stream of its own.

use std::any::Any;
use std::fmt;

use kvferry_layout::Loops;
use parking_lot::Mutex;

use super::driver::{Card, OnCard};
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
    line: Mutex<LaunchQueue>,
}

impl CardPacker {
    /// Opens the card and loads the kernel.
    pub fn new(options: &CudaOptions) -> Result<Self, Error> {
        let card = Card::open(options.gpu)?;
        let all = card.multiprocessors()?;
        let line = Mutex::new(LaunchQueue::new(&card, options)?);
        Ok(Self { extent: Extent::new(options.sms, all), card, line })
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
}

impl CopyEngine for CardPacker {
    unsafe fn start(&self, loops: &Loops) -> Result<Box<dyn Launched>, Error> {
        let program = Program::new(loops, self.extent.batch_bytes(loops.bytes()), |_| 0);
        // SAFETY: the caller's promise.
        let launch = unsafe { PackLaunch::start(&self.line, &program, self.extent)? };
        Ok(Box::new(launch))
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
