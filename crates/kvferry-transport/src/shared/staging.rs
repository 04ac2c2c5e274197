//! Memory to pack into: a bounded pool of equal slots. Who finds none waits a moment, and then does
//! without.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_layout::{Place, Region};
use parking_lot::{Condvar, Mutex};

use crate::contract::{Error, StagingStatistics};
use crate::memory::HostMemory;

/// A pool of slots of one block of memory, of which the system only gives what is used.
#[derive(Debug)]
pub(crate) struct Staging {
    slot_bytes: u64,
    base: u64,
    place: Place,
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Slots by number; the one that was used last is the next, because it may still be in a cache.
    idle: Vec<u32>,
    statistics: StagingStatistics,
    /// Kept for as long as the pool.
    _memory: Option<Box<dyn Any + Send>>,
}

/// A slot in use; dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Slot {
    pool: Arc<Staging>,
    number: u32,
}

impl Staging {
    /// A pool of at most `bytes` bytes in slots of `slot_bytes`. With fewer bytes than a slot there
    /// is nothing to be had.
    pub(crate) fn new(bytes: u64, slot_bytes: u64) -> Result<Arc<Self>, Error> {
        let slots = u32::try_from(bytes / slot_bytes.max(1)).unwrap_or(u32::MAX);
        let bytes = u64::from(slots) * slot_bytes;
        if slots == 0 {
            return Ok(Self::over(Region::host(0, 0), slot_bytes, None));
        }
        let memory = HostMemory::new(bytes as usize).map_err(|error| {
            Error::system(format!("mapping {bytes} bytes to pack into"), &error)
        })?;
        Ok(Self::over(memory.region(), slot_bytes, Some(Box::new(memory))))
    }

    /// A pool of slots in memory of any kind, which is kept for as long as the pool.
    pub(crate) fn over(
        region: Region,
        slot_bytes: u64,
        memory: Option<Box<dyn Any + Send>>,
    ) -> Arc<Self> {
        let slots = u32::try_from(region.bytes / slot_bytes.max(1)).unwrap_or(u32::MAX);
        let bytes = u64::from(slots) * slot_bytes;
        let statistics = StagingStatistics { bytes, ..StagingStatistics::default() };
        let idle = (0..slots).rev().collect();
        Arc::new(Self {
            slot_bytes,
            base: region.base,
            place: region.place,
            state: Mutex::new(State { idle, statistics, _memory: memory }),
            returned: Condvar::new(),
        })
    }

    /// Bytes of a slot.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// A slot, once one is free; `None` when none is before `patience` has passed.
    pub(crate) fn take(self: &Arc<Self>, patience: Duration) -> Option<Slot> {
        let until = Instant::now() + patience;
        let mut state = self.state.lock();
        let mut waited = false;
        let number = loop {
            if let Some(number) = state.idle.pop() {
                break number;
            }
            let none = state.statistics.bytes == 0;
            if !waited && !none {
                state.statistics.waits += 1;
                waited = true;
            }
            if none || self.returned.wait_until(&mut state, until).timed_out() {
                state.statistics.refused += 1;
                return None;
            }
        };
        let statistics = &mut state.statistics;
        statistics.packed += 1;
        statistics.in_use += self.slot_bytes;
        statistics.most_in_use = statistics.most_in_use.max(statistics.in_use);
        drop(state);
        Some(Slot { pool: self.clone(), number })
    }

    /// All of it, to be registered where others are to read it.
    pub(crate) fn region(&self) -> Option<Region> {
        let bytes = self.state.lock().statistics.bytes;
        (bytes > 0).then_some(Region { base: self.base, bytes, place: self.place })
    }

    pub(crate) fn statistics(&self) -> StagingStatistics {
        self.state.lock().statistics
    }
}

impl Slot {
    /// Address of its first byte. Nobody else uses the slot, and no reference to it exists.
    pub(crate) fn address(&self) -> u64 {
        self.pool.base + u64::from(self.number) * self.pool.slot_bytes
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.pool.slot_bytes
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock();
        state.statistics.in_use -= self.pool.slot_bytes;
        state.idle.push(self.number);
        drop(state);
        self.pool.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_handed_out_than_there_is_and_all_of_it_comes_back() {
        let pool = Staging::new(3 * 1024, 1024).unwrap();
        let slots: Vec<Slot> =
            (0..3).map(|_| pool.take(Duration::ZERO).expect("a slot is free")).collect();
        let mut addresses: Vec<u64> = slots.iter().map(Slot::address).collect();
        addresses.sort_unstable();
        assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] == 1024), "{addresses:?}");
        assert!(pool.take(Duration::from_millis(1)).is_none());
        let StagingStatistics { bytes, in_use, most_in_use, packed, waits, refused } =
            pool.statistics();
        assert_eq!((bytes, in_use, most_in_use), (3072, 3072, 3072));
        assert_eq!((packed, waits, refused), (3, 1, 1));
        drop(slots);
        assert_eq!(pool.statistics().in_use, 0);
        assert!(pool.take(Duration::ZERO).is_some());
    }

    #[test]
    fn who_waits_gets_what_comes_back() {
        let pool = Staging::new(1024, 1024).unwrap();
        let slot = pool.take(Duration::ZERO);
        let waiting = std::thread::spawn({
            let pool = pool.clone();
            move || pool.take(Duration::from_secs(30)).is_some()
        });
        while pool.statistics().waits == 0 {
            std::thread::yield_now();
        }
        drop(slot);
        assert!(waiting.join().expect("the thread ends"));
    }

    #[test]
    fn a_pool_of_nothing_refuses_at_once() {
        let began = Instant::now();
        assert!(Staging::new(10, 1024).unwrap().take(Duration::from_secs(30)).is_none());
        assert!(began.elapsed() < Duration::from_secs(10));
    }
}
