//! How programs get to the card and are started there, one at a time.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::driver::{Card, Event, Grid, Kernel, Module, Stream};
use super::kernel::{KERNEL, KERNEL_HEADER};
use super::landing::Landing;
use super::nvrtc;
use super::options::CudaOptions;
use super::program::{FORM, Program, TILE_BYTES};
use super::signal::{Signal, Signals};
use super::staging::Staging;
use kvferry_transport::Error;

/// Threads of a CTA, as in copy.cu: of a launch that has most of the card's multiprocessors, and of one that
/// has fewer. There is one CTA to a multiprocessor.
pub(super) const WIDE: u32 = 384;
pub(super) const DENSE: u32 = 640;
/// What a warp takes at a time has at least so many bytes: enough to be worth looking up where they are, and to
/// be worth asking which are next. (All warps ask one counter, which answers every 2.5 ns.)
const LEAST_BATCH_BYTES: u64 = 4 << 10;
/// And at most so many: with less at a time warps end closer together, but ask the counter more often. On an H200
/// 8 KiB made long requests about 1 % longer, and 16 KiB perhaps short ones. Where there are few warps, each takes so
/// long that more at a time does no harm: 16 multiprocessors move 3 % more so.
const MOST_BATCH_BYTES_WIDE: u64 = 12 << 10;
const MOST_BATCH_BYTES_DENSE: u64 = 64 << 10;
/// Programs up to the last of these sizes travel with the launch; as in copy.cu.
pub(super) const INLINE: [usize; 4] = [1008, 2944, 5008, 8000];
/// CUDA's number for a kernel that a module does not have.
const NOT_FOUND: i32 = 500;
/// The oldest architecture on which a launch may overlap the one before it.
const OVERLAPS_FROM: u32 = 90;

/// Which part of the card a launch takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// Multiprocessors.
    sms: u32,
    /// Whether they are a bound. Where they are not, a launch may begin before the one before it has ended.
    bound: bool,
    /// Whether they are most of the card's.
    wide: bool,
}

impl Extent {
    /// At most `asked` of `all` multiprocessors; five sixths where nothing is asked for.
    pub(super) fn new(asked: Option<u32>, all: u32) -> Self {
        let sms = asked.unwrap_or(all * 5 / 6).clamp(1, all);
        Self { sms, bound: asked.is_some(), wide: sms * 3 >= all * 2 }
    }

    /// On each of them.
    fn threads(self) -> u32 {
        if self.wide { WIDE } else { DENSE }
    }

    fn warps(self) -> u64 {
        u64::from(self.sms) * u64::from(self.threads() / 32)
    }

    /// How much of a request of so many bytes a warp takes at a time.
    pub(super) fn batch_bytes(self, bytes: u64) -> u64 {
        let (turns, most) =
            if self.wide { (4, MOST_BATCH_BYTES_WIDE) } else { (8, MOST_BATCH_BYTES_DENSE) };
        (bytes / (self.warps() * turns)).clamp(LEAST_BATCH_BYTES, most)
    }
}

/// One kernel, for programs of any length.
struct Kernels {
    /// Takes the address of a program.
    uploaded: Kernel,
    /// Take a program of at most as many bytes as [`INLINE`] has in the same place.
    inline: Vec<Kernel>,
}

impl Kernels {
    fn load(module: &Module, threads: u32) -> Result<Self, Error> {
        let kernel = |name: &str| module.kernel(name, tiles(threads));
        let inline = |bytes: &usize| kernel(&format!("kvferry_copy_{FORM}_{threads}_{bytes}"));
        Ok(Self {
            uploaded: kernel(&format!("kvferry_copy_{FORM}_{threads}"))?,
            inline: INLINE.iter().map(inline).collect::<Result<_, _>>()?,
        })
    }
}

/// What launches need.
pub(super) struct LaunchQueue {
    stream: Arc<Stream>,
    /// Where programs are uploaded while a launch is under way, and what marks their end.
    uploads: (Stream, Event),
    /// The last launch.
    last: Option<Arc<dyn Landing>>,
    /// Whether a launch may overlap the one before it on this card.
    overlaps: bool,
    /// Whether the stream fills something that the next launch needs, and that it must wait for.
    filled: bool,
    wide: Kernels,
    dense: Kernels,
    /// A program that travels with a launch, as many times 16 bytes as the longest may have.
    inline: Box<[u128]>,
    staging: Staging,
    signals: Signals,
    /// Keeps the kernels loaded.
    _module: Module,
}

impl LaunchQueue {
    pub(super) fn new(card: &Card, options: &CudaOptions) -> Result<Self, Error> {
        let capability = card.capability()?;
        let image = match &options.kernel {
            None => compiled(capability, &options.site_packages)?,
            Some(path) => Arc::new(std::fs::read(path).map_err(|error| {
                Error::system(format!("reading the kernel {}", path.display()), &error)
            })?),
        };
        let module = card.module(&image)?;
        let load = |threads| {
            Kernels::load(&module, threads).map_err(|error| match &options.kernel {
                Some(path) if matches!(error, Error::Cuda { code: NOT_FOUND, .. }) => {
                    of_another_version(path)
                }
                _ => error,
            })
        };
        Ok(Self {
            stream: Arc::new(card.stream(true)?),
            uploads: (card.stream(true)?, card.event(false)?),
            last: None,
            overlaps: capability >= OVERLAPS_FROM,
            filled: false,
            wide: load(WIDE)?,
            dense: load(DENSE)?,
            inline: vec![0; INLINE[INLINE.len() - 1] / 16].into(),
            staging: Staging::new(card)?,
            signals: Signals::new(card),
            _module: module,
        })
    }

    /// What launches are in, one behind the other, unless they may overlap.
    pub(super) fn stream(&self) -> Arc<Stream> {
        self.stream.clone()
    }

    /// What tells of the end of a launch: its signal, and the stream that it is in.
    pub(super) fn tidings(&mut self) -> Result<(Signal, Arc<Stream>), Error> {
        let (signal, filled) = self.signals.take(&self.stream)?;
        self.filled |= filled;
        Ok((signal, self.stream.clone()))
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
        match launched {
            Ok(()) => {
                self.last = Some(launch.clone());
                self.filled = false;
            }
            Err(error) => {
                // An upload may be under way, and no kernel behind it that tells of its end.
                let _ = (self.uploads.0.synchronize(), self.stream.synchronize());
                launch.refused(error);
            }
        }
    }

    /// # Safety
    ///
    /// As for [`start`](Self::start).
    unsafe fn launch(
        &mut self,
        program: &Program<'_>,
        extent: Extent,
        launch: &Arc<dyn Landing>,
    ) -> Result<(), Error> {
        let threads = extent.threads();
        let grid = Grid {
            ctas: u64::from(extent.sms).min(program.batches()) as u32,
            threads,
            shared: if program.uses_tiles() { tiles(threads) } else { 0 },
            overlaps: self.overlaps && !extent.bound && !self.filled,
        };
        let kernels = if extent.wide { &self.wide } else { &self.dense };
        let fits = |fit: &(usize, &Kernel)| program.bytes() <= fit.0;
        if let Some((_, kernel)) = std::iter::zip(INLINE, &kernels.inline).find(fits) {
            let inline = self.inline.as_mut_ptr();
            let mut arguments = [inline.cast::<c_void>()];
            // SAFETY: there is room; the kernel takes one argument, not longer than that, which CUDA
            // copies during the call; the caller vouches for the addresses. Launches of this stream have
            // nothing to do with each other.
            return unsafe {
                program.write(inline.cast(), launch.ends());
                self.stream.launch_grid(kernel, grid, &mut arguments)
            };
        }
        let (uploads, uploaded) = &self.uploads;
        let busy = self.last.as_ref().is_some_and(|last| !last.landed());
        let by = if busy { uploads } else { &*self.stream };
        let mut address = self.staging.put(program, launch.ends(), by, launch)?;
        if busy {
            uploads.record(uploaded)?;
            self.stream.wait_for(uploaded)?;
        }
        let mut arguments = [(&raw mut address).cast::<c_void>()];
        let grid = Grid { overlaps: false, ..grid };
        // SAFETY: the kernel takes one address, of a program that is uploaded by then: the stream has done so,
        // or waits for it. The caller vouches for the addresses in it.
        unsafe { self.stream.launch_grid(&kernels.uploaded, grid, &mut arguments) }
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

fn of_another_version(path: &Path) -> Error {
    Error::Library(format!(
        "the kernel {} was compiled from another version of kvferry: it takes no programs of form {FORM}. Compile \
         this version's copy.cu, or name no kernel where NVRTC is installed",
        path.display()
    ))
}

/// Bytes of shared memory that the tiles of a CTA take.
fn tiles(threads: u32) -> u32 {
    TILE_BYTES as u32 * (threads / 32)
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
