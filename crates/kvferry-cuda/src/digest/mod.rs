//! Digests of memory on a card: one launch of a kernel of its own, on a stream of the lowest priority.
//!
//! `encode.rs` writes what the kernel reads, `sum.h` is the kernel's body, which the tests run on the CPU
//! too. Nothing goes through the streams that the engine uses: the program is uploaded in the kernel's own
//! stream, and the sums are written to pinned memory by the kernel itself.

mod encode;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvferry_digest::{Digest, Program};
use parking_lot::Mutex;

use self::encode::Encoded;
use super::driver::{Card, Kernel, Module, Pinned, Stream};
use super::nvrtc::Nvrtc;
use kvferry_transport::Error;
use kvferry_transport::shared::digests::CardDigest;

/// The kernel, in CUDA C.
pub const KERNEL: &str = include_str!("sum.cu");
/// What it includes.
pub const KERNEL_HEADER: (&str, &str) = ("sum.h", include_str!("sum.h"));

/// Threads of a CTA, and CTAs of a multiprocessor, as in sum.cu.
const THREADS: u32 = 256;
const CTAS: u32 = 2;

/// Folders in which NVRTC may be, told by whoever knows.
static SITE_PACKAGES: Mutex<Vec<PathBuf>> = Mutex::new(vec![]);

/// What it takes to look at each card, for as long as somebody has it.
static LOOKERS: Mutex<BTreeMap<u32, Weak<DigestLauncher>>> = Mutex::new(BTreeMap::new());

/// What a transport has made to look at its cards: it goes with the transport, the last that has it.
#[derive(Debug, Default)]
pub struct DigestLaunchers(Mutex<BTreeMap<u32, Arc<DigestLauncher>>>);

impl DigestLaunchers {
    /// That of a card, made when it is first asked for.
    fn of(&self, card: u32) -> Result<Arc<DigestLauncher>, Error> {
        let mut known = self.0.lock();
        if let Some(looker) = known.get(&card) {
            return Ok(looker.clone());
        }
        let looker = DigestLauncher::of(card)?;
        known.insert(card, looker.clone());
        Ok(looker)
    }
}

impl CardDigest for DigestLaunchers {
    unsafe fn digest(
        &self,
        card: u32,
        program: &Program,
        deadline: Instant,
    ) -> Result<Vec<Digest>, Error> {
        let unable = |error| Error::Unsupported(format!("looking at GPU {card}: {error}"));
        let looker = self.of(card).map_err(unable)?;
        // SAFETY: the caller's promise.
        unsafe { looker.digest(program, deadline) }
    }
}

/// Where to look for NVRTC first.
pub fn remember(site_packages: &[PathBuf]) {
    let mut known = SITE_PACKAGES.lock();
    for path in site_packages {
        if !known.contains(path) {
            known.push(path.clone());
        }
    }
}

/// What it takes to look at a card's memory.
pub struct DigestLauncher {
    card: Card,
    stream: Stream,
    kernel: Kernel,
    sms: u32,
    /// One at a time.
    room: Mutex<Room>,
    _module: Module,
}

/// Memory for a program and its sums: it grows, and stays.
#[derive(Default)]
struct Room {
    pinned: Option<(Pinned, usize)>,
    on_card: Option<(u64, usize)>,
}

impl DigestLauncher {
    /// That of a card: the one that somebody has, or a new one.
    pub fn of(card: u32) -> Result<Arc<Self>, Error> {
        let mut lookers = LOOKERS.lock();
        if let Some(looker) = lookers.get(&card).and_then(Weak::upgrade) {
            return Ok(looker);
        }
        let looker = Arc::new(Self::new(card)?);
        lookers.insert(card, Arc::downgrade(&looker));
        Ok(looker)
    }

    fn new(ordinal: u32) -> Result<Self, Error> {
        let card = Card::open(ordinal)?;
        let nvrtc = Nvrtc::find(&SITE_PACKAGES.lock())?;
        let image = nvrtc.compile_for("sum.cu", KERNEL, &[KERNEL_HEADER], card.capability()?)?;
        let module = card.module(&image)?;
        let kernel = module.kernel("kvferry_digest", 0)?;
        let (stream, sms) = (card.stream(true)?, card.multiprocessors()?);
        Ok(Self { card, stream, kernel, sms, room: Mutex::default(), _module: module })
    }

    /// The digests of a program's parts. Waits for them.
    ///
    /// # Safety
    ///
    /// Every extent of the program must be memory of this card that stays allocated meanwhile.
    pub unsafe fn digest(
        &self,
        program: &Program,
        deadline: Instant,
    ) -> Result<Vec<Digest>, Error> {
        let warps = u64::from(self.sms * CTAS * THREADS / 32);
        let encoded = Encoded::new(program, warps)
            .ok_or_else(|| Error::Unsupported("too much for one digest on a GPU".to_owned()))?;
        if encoded.units == 0 {
            return Ok(encoded.digests(program, &[]));
        }
        let (bytes, units) = (encoded.bytes.len(), encoded.units as usize);
        let mut room = self.room.lock();
        let start = bytes.next_multiple_of(256);
        let (pinned, on_card) = room.at_least(&self.card, start + 16 * units)?;
        let event = self.card.event(false)?;
        let (mut program_at, mut sums_at) = (on_card, pinned as u64 + start as u64);
        let mut arguments: [*mut c_void; 2] =
            [(&raw mut program_at).cast(), (&raw mut sums_at).cast()];
        // SAFETY: the buffers are long enough and not used by anybody else while the room is locked. The
        // kernel reads the program and what it names, which the caller vouches for, and writes a sum for
        // each unit. Until the stream has passed it, nothing here is given up.
        unsafe {
            std::ptr::copy_nonoverlapping(encoded.bytes.as_ptr(), pinned, bytes);
            let launched = self.stream.upload(on_card, pinned, bytes).and_then(|()| {
                let grid = (self.sms * CTAS, THREADS);
                self.stream.launch(&self.kernel, grid, 0, &mut arguments)
            });
            if let Err(error) = launched.and_then(|()| self.stream.record(&event)) {
                let _ = self.stream.synchronize();
                return Err(error);
            }
        }
        // Most take less than this. A sleep is never shorter than some 60 µs.
        let awake = Instant::now() + Duration::from_micros(300);
        let mut pause = Duration::from_micros(50);
        while !event.passed()? {
            let now = Instant::now();
            if now >= deadline {
                // A kernel cannot be called back, and ends soon.
                self.stream.synchronize()?;
                return Err(Error::DeadlinePassed);
            }
            if now < awake {
                std::thread::yield_now();
            } else {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(1));
            }
        }
        let mut sums = vec![[0_u64; 2]; units];
        // SAFETY: so many sums were written there, and the stream has passed.
        unsafe {
            let from = pinned.add(start).cast::<[u64; 2]>();
            std::ptr::copy_nonoverlapping(from, sums.as_mut_ptr(), units);
        }
        Ok(encoded.digests(program, &sums))
    }
}

impl DigestLauncher {
    /// How long the kernel takes for a program, in milliseconds, the shortest of several launches.
    ///
    /// # Safety
    ///
    /// As for [`digest`](Self::digest).
    pub unsafe fn measure(&self, program: &Program, launches: u32) -> Result<f32, Error> {
        let warps = u64::from(self.sms * CTAS * THREADS / 32);
        let encoded = Encoded::new(program, warps)
            .ok_or_else(|| Error::Unsupported("too much for one digest on a GPU".to_owned()))?;
        let (bytes, units) = (encoded.bytes.len(), encoded.units as usize);
        let mut room = self.room.lock();
        let start = bytes.next_multiple_of(256);
        let (pinned, on_card) = room.at_least(&self.card, start + 16 * units)?;
        let (mut program_at, mut sums_at) = (on_card, pinned as u64 + start as u64);
        let mut arguments: [*mut c_void; 2] =
            [(&raw mut program_at).cast(), (&raw mut sums_at).cast()];
        let mut best = f32::INFINITY;
        let (began, ended) = (self.card.event(true)?, self.card.event(true)?);
        // SAFETY: as for `digest`; everything has ended before this returns.
        unsafe {
            std::ptr::copy_nonoverlapping(encoded.bytes.as_ptr(), pinned, bytes);
            self.stream.upload(on_card, pinned, bytes)?;
            for _ in 0..launches {
                self.stream.record(&began)?;
                let grid = (self.sms * CTAS, THREADS);
                let launched = self.stream.launch(&self.kernel, grid, 0, &mut arguments);
                let launched = launched.and_then(|()| self.stream.record(&ended));
                self.stream.synchronize()?;
                launched?;
                best = best.min(ended.since(&began)?);
            }
        }
        Ok(best)
    }
}

impl Drop for DigestLauncher {
    fn drop(&mut self) {
        // A digest that failed may have left its kernel running.
        let ended = self.stream.synchronize();
        if let (Ok(()), Some((address, _))) = (ended, self.room.get_mut().on_card) {
            // SAFETY: allocated here, and nothing runs any more.
            let _ = unsafe { self.card.free(address) };
        }
    }
}

impl fmt::Debug for DigestLauncher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DigestLauncher").field("gpu", &self.card.ordinal()).finish_non_exhaustive()
    }
}

impl Room {
    /// So much pinned memory, and as much on the card.
    fn at_least(&mut self, card: &Card, bytes: usize) -> Result<(*mut u8, u64), Error> {
        let more = bytes.next_power_of_two().max(1 << 20);
        let pinned = match &self.pinned {
            Some((pinned, room)) if *room >= bytes => pinned.memory,
            _ => {
                let pinned = card.pinned(more)?;
                self.pinned.insert((pinned, more)).0.memory
            }
        };
        let on_card = match self.on_card {
            Some((address, room)) if room >= bytes => address,
            before => {
                let address = card.allocate(more as u64)?;
                self.on_card = Some((address, more));
                if let Some((before, _)) = before {
                    // SAFETY: allocated here, and no kernel runs while the room is locked.
                    unsafe { card.free(before)? };
                }
                address
            }
        };
        Ok((pinned, on_card))
    }
}
