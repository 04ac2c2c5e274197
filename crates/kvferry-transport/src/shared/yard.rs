//! Where things are packed: memory to pack into, and who moves bytes in and out of it. There is one for the
//! host's memory, and one for that of a card.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use kvferry_layout::{Loops, Place};
use parking_lot::Mutex;

use super::staging::Staging;
use super::walk;
use crate::contract::{Error, StagingStatistics};
use crate::cuda::errand::Errand;
use crate::cuda::porter::Porter;

/// The yards of one transport.
#[derive(Debug)]
pub(crate) struct Yards {
    host: Yard,
    /// That of the first card whose memory was registered; `None` inside where it does not pack.
    card: OnceLock<Option<(u32, Yard)>>,
}

impl Yards {
    /// With a pool of host memory.
    pub(crate) fn new(staging: Arc<Staging>) -> Arc<Self> {
        Arc::new(Self { host: Yard::new(staging, None), card: OnceLock::new() })
    }

    /// Makes the yard of a card, unless that was tried before.
    pub(crate) fn open(&self, make: impl FnOnce() -> Option<(u32, Yard)>) {
        self.card.get_or_init(make);
    }

    /// The yard for memory of a place.
    pub(crate) fn of(&self, place: Place) -> Option<&Yard> {
        match place {
            Place::Host => Some(&self.host),
            Place::Gpu(gpu) => self.card().filter(|card| card.0 == gpu).map(|card| card.1),
        }
    }

    /// The card that packs, and its yard.
    pub(crate) fn card(&self) -> Option<(u32, &Yard)> {
        self.card.get()?.as_ref().map(|(gpu, yard)| (*gpu, yard))
    }

    /// Bytes of the longest slot.
    pub(crate) fn most(&self) -> u64 {
        let card = self.card().map_or(0, |(_, yard)| yard.staging.slot_bytes());
        card.max(self.host.staging.slot_bytes())
    }

    /// Of all of them together.
    pub(crate) fn statistics(&self) -> StagingStatistics {
        let mut sum = self.host.staging.statistics();
        if let Some((_, yard)) = self.card() {
            let card = yard.staging.statistics();
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
pub(crate) struct Yard {
    pub(crate) staging: Arc<Staging>,
    /// The CPU, where there is none.
    porter: Option<Arc<Porter>>,
    /// What errands that do not end may still touch.
    stuck: Mutex<Vec<(Moving, Box<dyn Any + Send>)>>,
    /// It was said that the card refuses.
    said: AtomicBool,
}

impl Yard {
    /// One whose bytes are moved by the porter, or without one by the CPU.
    pub(crate) fn new(staging: Arc<Staging>, porter: Option<Arc<Porter>>) -> Self {
        Self { staging, porter, stuck: Mutex::default(), said: AtomicBool::new(false) }
    }

    /// Starts to carry loops out: host memory is moved when this returns, a card's when the answer says
    /// so. After an error nothing runs; it is said aloud once.
    ///
    /// # Safety
    ///
    /// As of [`walk::carry_out`], for memory of the yard's kind, until the answer has ended.
    pub(crate) unsafe fn start(&self, loops: &Loops) -> Result<Moving, Error> {
        let Some(porter) = &self.porter else {
            // SAFETY: the caller's promise.
            unsafe { walk::carry_out(loops) };
            return Ok(Moving(None));
        };
        self.settle();
        // SAFETY: the caller's promise.
        let started = unsafe { porter.start(loops) };
        started.map(|errand| Moving(Some(errand))).inspect_err(|error| {
            if !self.said.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    "short runs are read one by one, because {porter:?} refuses: {error}"
                );
            }
        })
    }

    /// Keeps something until an errand has ended that took too long.
    pub(crate) fn keep(&self, moving: Moving, touched: Box<dyn Any + Send>) {
        self.settle();
        self.stuck.lock().push((moving, touched));
    }

    /// Gives back what errands touched that have ended since.
    fn settle(&self) {
        self.stuck.lock().retain(|(moving, _)| moving.outcome().is_none());
    }
}

impl Drop for Yard {
    fn drop(&mut self) {
        // Waits for what still runs, before the memory goes.
        self.porter = None;
    }
}

/// Bytes on their way in or out of a yard.
#[derive(Debug)]
#[must_use = "what it touches must be kept until it has ended"]
pub(crate) struct Moving(Option<Errand>);

impl Moving {
    /// None are.
    pub(crate) fn nothing() -> Self {
        Self(None)
    }

    /// How it ended; `None` while it may still touch memory.
    pub(crate) fn outcome(&self) -> Option<Result<(), Error>> {
        self.0.as_ref().map_or(Some(Ok(())), Errand::outcome)
    }

    /// Waits for its end, until `until` at most.
    pub(crate) fn wait(&self, until: Instant) -> Option<Result<(), Error>> {
        self.0.as_ref().map_or(Some(Ok(())), |errand| errand.wait(until))
    }
}
