//! Where things are packed: memory to pack into, and who moves bytes in and out of it. There is one for the
//! host's memory, and one for that of a card.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use kvferry_layout::{Loops, Place};
use parking_lot::Mutex;

use super::digests::CardDigest;
use super::staging::Staging;
use super::walk;
use crate::contract::{Error, StagingStatistics};

/// What carries loops out within a card's own memory.
pub trait CopyEngine: fmt::Debug + Send + Sync {
    /// Starts to carry loops out. After an error nothing of them runs.
    ///
    /// # Safety
    ///
    /// Every byte within the extents of the loops must be memory that this card reaches, and stay so until the answer
    /// has ended.
    unsafe fn start(&self, loops: &Loops) -> Result<Box<dyn Launched>, Error>;
}

/// Loops that a card carries out.
pub trait Launched: fmt::Debug + Send + Sync {
    /// How it ended; `None` while it may still touch memory.
    fn outcome(&self) -> Option<Result<(), Error>>;

    /// Waits for its end, until `until` at most.
    fn wait(&self, until: Instant) -> Option<Result<(), Error>>;
}

/// What opens cards, for a transport that knows none by itself.
pub trait Cards: fmt::Debug + Send + Sync {
    /// Slots, `bytes` in all, of which the host and the card each have memory, and who moves bytes between the host's
    /// part and other memory of the card.
    fn open(&self, gpu: u32, bytes: u64, slot_bytes: u64) -> Result<PackingArea, Error>;

    /// What looks at the memory of cards.
    fn digests(&self) -> &dyn CardDigest;
}

/// The packing areas of one transport.
#[derive(Debug)]
pub struct PackingAreas {
    host: PackingArea,
    /// That of the first card whose memory was registered; `None` inside where it does not pack.
    card: OnceLock<Option<(u32, PackingArea)>>,
}

impl PackingAreas {
    /// With a pool of host memory.
    pub fn new(staging: Arc<Staging>) -> Arc<Self> {
        Arc::new(Self { host: PackingArea::new(staging, None), card: OnceLock::new() })
    }

    /// Makes the packing area of a card, unless that was tried before.
    pub fn open(&self, make: impl FnOnce() -> Option<(u32, PackingArea)>) {
        self.card.get_or_init(make);
    }

    /// The packing area for memory of a place.
    pub fn of(&self, place: Place) -> Option<&PackingArea> {
        match place {
            Place::Host => Some(&self.host),
            Place::Gpu(gpu) => self.card().filter(|card| card.0 == gpu).map(|card| card.1),
        }
    }

    /// The card that packs, and its packing area.
    pub fn card(&self) -> Option<(u32, &PackingArea)> {
        self.card.get()?.as_ref().map(|(gpu, area)| (*gpu, area))
    }

    /// Bytes of the longest slot.
    pub fn most(&self) -> u64 {
        let card = self.card().map_or(0, |(_, area)| area.staging.slot_bytes());
        card.max(self.host.staging.slot_bytes())
    }

    /// Of all of them together.
    pub fn statistics(&self) -> StagingStatistics {
        let mut sum = self.host.staging.statistics();
        if let Some((_, area)) = self.card() {
            let card = area.staging.statistics();
            sum.bytes += card.bytes;
            sum.in_use += card.in_use;
            sum.most_in_use += card.most_in_use;
            sum.packed += card.packed;
            sum.waits += card.waits;
            sum.refused += card.refused;
        }
        sum
    }
}

/// Memory to pack into, and who moves bytes.
#[derive(Debug)]
pub struct PackingArea {
    pub staging: Arc<Staging>,
    /// The CPU, where there is none.
    engine: Option<Arc<dyn CopyEngine>>,
    /// What launches that do not end may still touch.
    stuck: Mutex<Vec<(Moving, Box<dyn Any + Send>)>>,
    /// It was said that the card refuses.
    said: AtomicBool,
}

impl PackingArea {
    /// One whose bytes are moved by the engine, or without one by the CPU.
    pub fn new(staging: Arc<Staging>, engine: Option<Arc<dyn CopyEngine>>) -> Self {
        Self { staging, engine, stuck: Mutex::default(), said: AtomicBool::new(false) }
    }

    /// Starts to carry loops out: host memory is moved when this returns, a card's when the answer says
    /// so. After an error nothing runs; it is said aloud once.
    ///
    /// # Safety
    ///
    /// As of [`walk::carry_out`], for memory of the packing area's kind, until the answer has ended.
    pub unsafe fn start(&self, loops: &Loops) -> Result<Moving, Error> {
        let Some(engine) = &self.engine else {
            // SAFETY: the caller's promise.
            unsafe { walk::carry_out(loops) };
            return Ok(Moving(None));
        };
        self.settle();
        // SAFETY: the caller's promise.
        let started = unsafe { engine.start(loops) };
        started.map(|launched| Moving(Some(launched))).inspect_err(|error| {
            if !self.said.swap(true, Ordering::Relaxed) {
                tracing::warn!("the memory of a GPU is not packed: {engine:?} refuses: {error}");
            }
        })
    }

    /// Keeps something until a launch has ended that took too long.
    pub fn keep(&self, moving: Moving, touched: Box<dyn Any + Send>) {
        self.settle();
        self.stuck.lock().push((moving, touched));
    }

    /// Gives back what launches touched that have ended since.
    fn settle(&self) {
        self.stuck.lock().retain(|(moving, _)| moving.outcome().is_none());
    }
}

impl Drop for PackingArea {
    fn drop(&mut self) {
        // Waits for what still runs, before the memory goes.
        self.engine = None;
    }
}

/// Bytes on their way in or out of a packing area.
#[derive(Debug)]
#[must_use = "what it touches must be kept until it has ended"]
pub struct Moving(Option<Box<dyn Launched>>);

impl Moving {
    /// None are.
    pub fn nothing() -> Self {
        Self(None)
    }

    /// How it ended; `None` while it may still touch memory.
    pub fn outcome(&self) -> Option<Result<(), Error>> {
        self.0.as_ref().map_or(Some(Ok(())), |launched| launched.outcome())
    }

    /// Waits for its end, until `until` at most.
    pub fn wait(&self, until: Instant) -> Option<Result<(), Error>> {
        self.0.as_ref().map_or(Some(Ok(())), |launched| launched.wait(until))
    }
}
