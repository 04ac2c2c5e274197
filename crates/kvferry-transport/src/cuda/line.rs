//! How programs get to the card and are started there, one at a time.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use super::driver::{Card, Event, Kernel, Module, Stream};
use super::flight::{Events, Flight};
use super::program::{Program, TILE_BYTES};
use super::staging::Staging;
use super::{CudaOptions, KERNEL, KERNEL_HEADER, nvrtc};
use crate::contract::Error;

/// Threads of a CTA, as in copy.cu: one CTA fills a multiprocessor.
const THREADS: u32 = 1024;
pub(super) const WARPS: u64 = THREADS as u64 / 32;
/// Programs up to the last of these sizes travel with the launch; as in copy.cu.
pub(super) const INLINE: [usize; 4] = [4000, 8000, 16_000, 32_000];

/// What launches need.
pub(super) struct Line {
    card: Card,
    stream: Stream,
    copy: Kernel,
    /// For each of [`INLINE`].
    copy_inline: Vec<Kernel>,
    /// A program that travels with a launch, as many times 16 bytes as the longest may have.
    inline: Box<[u128]>,
    staging: Staging,
    events: Events,
    /// Keeps the kernels loaded.
    _module: Module,
}

impl Line {
    pub(super) fn new(card: &Card, options: &CudaOptions) -> Result<Self, Error> {
        let image = match &options.kernel {
            None => compiled(card.capability()?, &options.site_packages)?,
            Some(path) => Arc::new(std::fs::read(path).map_err(|error| {
                Error::system(format!("reading the kernel {}", path.display()), &error)
            })?),
        };
        let module = card.module(&image)?;
        let tiles = TILE_BYTES as u32 * WARPS as u32;
        Ok(Self {
            card: card.clone(),
            stream: card.stream(true)?,
            copy: module.kernel("kvferry_copy", tiles)?,
            copy_inline: INLINE
                .iter()
                .map(|bytes| module.kernel(&format!("kvferry_copy_{bytes}"), tiles))
                .collect::<Result<_, _>>()?,
            inline: vec![0; INLINE[INLINE.len() - 1] / 16].into(),
            staging: Staging::new(card)?,
            events: Arc::default(),
            _module: module,
        })
    }

    /// An event, and where it goes back to.
    pub(super) fn event(&self) -> Result<(Event, Events), Error> {
        let known = self.events.lock().pop();
        let event = known.map_or_else(|| self.card.event(false), Ok)?;
        Ok((event, self.events.clone()))
    }

    /// Launches the kernel for a program. Where the card refuses, nothing runs when this returns.
    ///
    /// # Safety
    ///
    /// All addresses in the program must stay valid until the flight has landed.
    pub(super) unsafe fn start(&mut self, program: &Program<'_>, sms: u32, flight: &Arc<Flight>) {
        // SAFETY: the caller's promise.
        let launched = unsafe { self.launch(program, sms, flight) };
        if let Err(error) = launched.and_then(|()| flight.record(&self.stream)) {
            // Part of it may be in the stream, without an event that tells of its end.
            let _ = self.stream.synchronize();
            flight.refused(error);
        }
    }

    /// # Safety
    ///
    /// As for [`start`](Self::start).
    unsafe fn launch(
        &mut self,
        program: &Program<'_>,
        sms: u32,
        flight: &Arc<Flight>,
    ) -> Result<(), Error> {
        let ctas = u64::from(sms).min(program.batches()) as u32;
        let shared = if program.uses_tiles() { TILE_BYTES as u32 * WARPS as u32 } else { 0 };
        let fits = std::iter::zip(INLINE, &self.copy_inline).find(|fit| program.bytes() <= fit.0);
        if let Some((_, kernel)) = fits {
            let inline = self.inline.as_mut_ptr();
            let mut arguments = [inline.cast::<c_void>()];
            // SAFETY: there is room; the kernel takes one argument, not longer than that, which CUDA
            // copies during the call; the caller vouches for the addresses.
            return unsafe {
                program.write(inline.cast());
                self.stream.launch(kernel, (ctas, THREADS), shared, &mut arguments)
            };
        }
        let mut address = self.staging.put(program, &self.stream, flight)?;
        let mut arguments = [(&raw mut address).cast::<c_void>()];
        // SAFETY: the kernel takes one address, of the program that the stream has uploaded by then;
        // the caller vouches for the addresses in it.
        unsafe { self.stream.launch(&self.copy, (ctas, THREADS), shared, &mut arguments) }
    }

    /// Marks this point of the stream, for measurements.
    pub(super) fn mark(&self, event: &Event) -> Result<(), Error> {
        self.stream.record(event)
    }

    /// Waits until everything has ended.
    pub(super) fn finish(&self) -> Result<(), Error> {
        self.stream.synchronize()
    }
}

/// The kernel for an architecture, compiled once per process.
fn compiled(capability: u32, site_packages: &[PathBuf]) -> Result<Arc<Vec<u8>>, Error> {
    static KNOWN: Mutex<BTreeMap<u32, Arc<Vec<u8>>>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock();
    if let Some(image) = known.get(&capability) {
        return Ok(image.clone());
    }
    let library = nvrtc::Nvrtc::find(site_packages)?;
    let image = Arc::new(library.compile_for("copy.cu", KERNEL, &[KERNEL_HEADER], capability)?);
    known.insert(capability, image.clone());
    Ok(image)
}
