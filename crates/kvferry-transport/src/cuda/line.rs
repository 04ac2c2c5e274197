//! How programs get to the card and are started there, one at a time.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use super::driver::{Card, Event, Kernel, Module, Stream};
use super::landing::Landing;
use super::program::{COUNTS, Ends, Program, TILE_BYTES};
use super::signal::{Signal, Signals};
use super::staging::{OnCard, Staging};
use super::{CudaOptions, KERNEL, KERNEL_HEADER, nvrtc};
use crate::contract::Error;

/// Threads of a CTA at most, as in copy.cu. There is one CTA to a multiprocessor.
const MOST_THREADS: u32 = 768;
/// Programs up to the last of these sizes travel with the launch; as in copy.cu.
pub(super) const INLINE: [usize; 3] = [1000, 4000, 8000];

/// Which part of the card a launch takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// Multiprocessors.
    sms: u32,
    /// Threads on each.
    threads: u32,
}

impl Extent {
    /// `sms` of `all` multiprocessors. The card's memory is served best by few threads on each of all of
    /// them; where they are few, each has to keep more loads under way.
    pub(super) fn new(sms: u32, all: u32) -> Self {
        Self { sms, threads: if sms > all / 2 { 512 } else { MOST_THREADS } }
    }

    pub(super) fn warps(self) -> u64 {
        u64::from(self.sms) * u64::from(self.threads / 32)
    }
}

/// What launches need.
pub(super) struct Line {
    stream: Arc<Stream>,
    copy: Kernel,
    /// For each of [`INLINE`].
    copy_inline: Vec<Kernel>,
    /// A program that travels with a launch, as many times 16 bytes as the longest may have.
    inline: Box<[u128]>,
    staging: Staging,
    /// What launches count in, one after the other.
    counts: OnCard,
    signals: Signals,
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
        let tiles = TILE_BYTES as u32 * (MOST_THREADS / 32);
        Ok(Self {
            stream: Arc::new(card.stream(true)?),
            copy: module.kernel("kvferry_copy", tiles)?,
            copy_inline: INLINE
                .iter()
                .map(|bytes| module.kernel(&format!("kvferry_copy_{bytes}"), tiles))
                .collect::<Result<_, _>>()?,
            inline: vec![0; INLINE[INLINE.len() - 1] / 16].into(),
            staging: Staging::new(card)?,
            counts: OnCard::zeroed(card, COUNTS as usize)?,
            signals: Signals::new(card),
            _module: module,
        })
    }

    /// What tells of the end of a launch: its signal, and the stream that it is in.
    pub(super) fn tidings(&self) -> Result<(Signal, Arc<Stream>), Error> {
        Ok((self.signals.take()?, self.stream.clone()))
    }

    /// Launches the kernel for a program. Where the card refuses, nothing runs when this returns.
    ///
    /// # Safety
    ///
    /// All addresses in the program must stay valid until the launch has landed.
    pub(super) unsafe fn start(
        &mut self,
        program: &Program<'_>,
        extent: Extent,
        launch: &Arc<dyn Landing>,
    ) {
        // SAFETY: the caller's promise.
        let launched = unsafe { self.launch(program, extent, launch) };
        if let Err(error) = launched {
            // An upload may be in the stream, and no kernel behind it that tells of its end.
            let _ = self.stream.synchronize();
            launch.refused(error);
        }
    }

    /// # Safety
    ///
    /// As for [`start`](Self::start).
    unsafe fn launch(
        &mut self,
        program: &Program<'_>,
        Extent { sms, threads }: Extent,
        launch: &Arc<dyn Landing>,
    ) -> Result<(), Error> {
        let ctas = u64::from(sms).min(program.batches()) as u32;
        let shared = if program.uses_tiles() { TILE_BYTES as u32 * (threads / 32) } else { 0 };
        let ends = Ends { counts: self.counts.address(), signal: launch.signal() };
        let fits = std::iter::zip(INLINE, &self.copy_inline).find(|fit| program.bytes() <= fit.0);
        if let Some((_, kernel)) = fits {
            let inline = self.inline.as_mut_ptr();
            let mut arguments = [inline.cast::<c_void>()];
            // SAFETY: there is room; the kernel takes one argument, not longer than that, which CUDA
            // copies during the call; the caller vouches for the addresses.
            return unsafe {
                program.write(inline.cast(), ends);
                self.stream.launch(kernel, (ctas, threads), shared, &mut arguments)
            };
        }
        let mut address = self.staging.put(program, ends, &self.stream, launch)?;
        let mut arguments = [(&raw mut address).cast::<c_void>()];
        // SAFETY: the kernel takes one address, of the program that the stream has uploaded by then;
        // the caller vouches for the addresses in it.
        unsafe { self.stream.launch(&self.copy, (ctas, threads), shared, &mut arguments) }
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
