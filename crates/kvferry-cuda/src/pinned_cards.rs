//! Pinned memory of the host between a card and a transport that moves host memory. What leaves the card is gathered by
//! its kernel into a slot on the card, and copied from there to the host by a copy engine; what comes takes the same way
//! back. So the kernel never waits for PCIe, and a model that runs meanwhile keeps its multiprocessors.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_layout::{Loops, Place, Region};
use kvferry_transport::Error;
use kvferry_transport::shared::digests::CardDigest;
use kvferry_transport::shared::packing_area::{Cards, CopyEngine, Launched, PackingArea};
use kvferry_transport::shared::staging::Staging;

use super::card_packer::CardPacker;
use super::digest::{self, DigestLaunchers};
use super::driver::{Event, Stream};
use super::options::CudaOptions;
use super::pack_launch::PackLaunch;

/// Multiprocessors that gather and scatter: few are faster than PCIe by far.
const SMS: u32 = 16;
/// The least number of slots that are worth having.
const LEAST_SLOTS: u64 = 4;
/// Between two looks whether a copy has ended, which takes longer than that.
const GLANCE: Duration = Duration::from_micros(50);

/// Opens cards for another transport, which moves host memory.
pub struct PinnedCards {
    /// Whose number is that of the card that is opened.
    options: CudaOptions,
    digests: DigestLaunchers,
}

impl PinnedCards {
    /// With the kernel and the libraries of these options; any card.
    pub fn new(options: CudaOptions) -> Arc<Self> {
        digest::remember(&options.site_packages);
        Arc::new(Self { options, digests: DigestLaunchers::default() })
    }
}

impl Cards for PinnedCards {
    fn open(&self, gpu: u32, bytes: u64, slot_bytes: u64) -> Result<PackingArea, Error> {
        let sms = self.options.sms.or(Some(SMS));
        let packer = CardPacker::new(&CudaOptions { gpu, sms, ..self.options.clone() })?.patient();
        let free = packer.free_memory()?;
        let slots = bytes.min(free / 8) / slot_bytes.max(1);
        if slots < LEAST_SLOTS {
            return Err(Error::Unsupported(format!(
                "an eighth of the {free} bytes that are free on GPU {gpu}, of which {bytes} may be taken, is too little to \
                 move its memory over tcp: that takes {} or more",
                LEAST_SLOTS * slot_bytes
            )));
        }
        let bytes = slots * slot_bytes;
        let (base, on_card) = packer.allocate(bytes)?;
        let (host, pinned) = packer.pin(bytes)?;
        let region = Region { base, bytes, place: Place::Gpu(gpu) };
        let staging = Staging::beside(region, host, slot_bytes, Some(Box::new((on_card, pinned))));
        tracing::info!(
            bytes,
            slots,
            "memory of GPU {gpu}, and as much of the host, is taken to move its memory over tcp"
        );
        let (up, down) = (packer.copies()?, packer.copies()?);
        let engine = Engine { packer, up, down, card: base, host, bytes };
        Ok(PackingArea::new(staging, Some(Arc::new(engine))))
    }

    fn digests(&self) -> &dyn CardDigest {
        &self.digests
    }
}

impl fmt::Debug for PinnedCards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PinnedCards").field(&self.options).finish()
    }
}

/// A card with slots, and the host's part of them.
#[derive(Debug)]
struct Engine {
    packer: CardPacker,
    /// Copies to the card, and to the host: beside the kernels, and beside each other.
    up: Stream,
    down: Stream,
    card: u64,
    host: u64,
    bytes: u64,
}

impl Engine {
    /// What spans take of a slot: from where on the card, to where of the host, and how many bytes. `None` where they are
    /// elsewhere.
    fn in_slot(&self, spans: impl Iterator<Item = (u64, u64)>) -> Option<(u64, u64, usize)> {
        let (first, end) = spans.reduce(|all, one| (all.0.min(one.0), all.1.max(one.1)))?;
        let inside = self.card <= first && end <= self.card + self.bytes;
        inside.then(|| (first, self.host + (first - self.card), (end - first) as usize))
    }
}

impl CopyEngine for Engine {
    unsafe fn start(&self, loops: &Loops) -> Result<Box<dyn Launched>, Error> {
        let extents = || loops.nests().filter_map(|nest| nest.extents());
        let kernels = self.packer.stream();
        let read = extents().map(|(read, _)| (read.start, read.end));
        if let Some((card, host, bytes)) = self.in_slot(read) {
            let uploaded = self.packer.event()?;
            // SAFETY: the slot has both, and its owner leaves it alone until the kernel behind this has ended.
            unsafe { self.up.upload(card, host as *const u8, bytes)? };
            self.up.record(&uploaded)?;
            kernels.wait_for(&uploaded)?;
            // SAFETY: the caller's promise.
            let kernel = unsafe { self.packer.launch(loops)? };
            return Ok(Box::new(Moved { kernel, before: Some(uploaded), behind: Ok(None) }));
        }
        // SAFETY: the caller's promise.
        let kernel = unsafe { self.packer.launch(loops)? };
        let written = extents().map(|(_, written)| (written.start, written.end));
        let download = |(card, host, bytes)| {
            let (gathered, downloaded) = (self.packer.event()?, self.packer.event()?);
            kernels.record(&gathered)?;
            self.down.wait_for(&gathered)?;
            // SAFETY: as above; until the event has passed.
            unsafe { self.down.download(host as *mut u8, card, bytes)? };
            // Without a mark, nobody would know when it has ended.
            self.down.record(&downloaded).inspect_err(|_| _ = self.down.synchronize())?;
            Ok((gathered, downloaded))
        };
        let behind = self.in_slot(written).map(download).transpose();
        Ok(Box::new(Moved { kernel, before: None, behind }))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // What it touches may go after this; the kernels are waited for by whoever launches them.
        for stream in [&self.up, &self.down] {
            if let Err(error) = stream.synchronize() {
                tracing::warn!("the GPU does not say whether copies have ended: {error}");
            }
        }
    }
}

/// A kernel, and the copy before or behind it, in streams of their own; or why there is none behind it.
#[derive(Debug)]
struct Moved {
    kernel: PackLaunch,
    /// Kept until the kernel has ended, which waits for it.
    #[expect(dead_code, reason = "kept")]
    before: Option<Event>,
    /// What the copy waits for, and what comes behind it.
    behind: Result<Option<(Event, Event)>, Error>,
}

impl Launched for Moved {
    fn outcome(&self) -> Option<Result<(), Error>> {
        let kernel = self.kernel.outcome()?;
        match (kernel, &self.behind) {
            (Err(error), _) => Some(Err(error)),
            (Ok(()), Err(error)) => Some(Err(error.clone())),
            (Ok(()), Ok(None)) => Some(Ok(())),
            (Ok(()), Ok(Some((_, copied)))) => match copied.passed() {
                Ok(false) => None,
                Ok(true) => Some(Ok(())),
                // The context is broken: nothing of it runs any more.
                Err(error) => Some(Err(error)),
            },
        }
    }

    fn wait(&self, until: Instant) -> Option<Result<(), Error>> {
        loop {
            match self.outcome() {
                None if Instant::now() < until => std::thread::sleep(GLANCE),
                outcome => return outcome,
            }
        }
    }
}
