//! Memory to pack into: a bounded pool of equal slots. Who finds none waits for as long as others give theirs
//! back, and then does without.
//!
//! Both ends of a packed read need a slot, each of its own pool, and two processes may read from each other. That
//! nobody waits in a circle is kept up by three rules: who reads takes the own slot first, and waits for it with
//! no other slot in hand; who is asked to pack answers soon, whether there is a slot or not; and of a pool that
//! peers have asked for slots, one slot is left to them.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_layout::{Place, Region};
use parking_lot::Mutex;

use crate::contract::{Error, StagingStatistics};
use crate::memory::HostMemory;

/// How long no slot may have come back before it is taken that none will. Eight parts of 64 MiB that share a wire
/// of 100 MB/s come back within that time.
const STALLED: Duration = Duration::from_secs(6);
/// How long who waits does so, even then.
const LEAST_WAIT: Duration = Duration::from_millis(50);
/// What a slot is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// To pack for a peer.
    Peer,
    /// To fetch what a peer has packed.
    Own,
}

/// Why there is no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// All are in use, and come back: another time there will be one.
    Moving,
    /// There are none at all, or none has come back for long.
    Stalled,
}

/// Who waits for a slot, and how long.
#[derive(Debug)]
pub struct Waiting {
    began: Instant,
    patience: Duration,
    is_counted: bool,
}

impl Waiting {
    /// From now on.
    pub fn new(patience: Duration) -> Self {
        Self { began: Instant::now(), patience, is_counted: false }
    }
}

/// A pool of slots of one block of memory, of which the system only gives what is used.
#[derive(Debug)]
pub struct Staging {
    slot_bytes: u64,
    base: u64,
    /// Where the host has the same bytes.
    host: u64,
    place: Place,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Slots by number; the one that was used last is the next, because it may still be in a cache.
    idle: Vec<u32>,
    statistics: StagingStatistics,
    /// A peer has asked for a slot.
    has_served: bool,
    /// When a slot was taken or came back last.
    moved: Instant,
    /// Kept for as long as the pool.
    _memory: Option<Box<dyn Any + Send>>,
}

/// A slot in use; dropping it gives it back.
#[derive(Debug)]
pub struct Slot {
    pool: Arc<Staging>,
    number: u32,
}

impl Staging {
    /// A pool of at most `bytes` bytes in slots of `slot_bytes`. With fewer bytes than a slot there
    /// is nothing to be had.
    pub fn new(bytes: u64, slot_bytes: u64) -> Result<Arc<Self>, Error> {
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
    pub fn over(region: Region, slot_bytes: u64, memory: Option<Box<dyn Any + Send>>) -> Arc<Self> {
        Self::beside(region, region.base, slot_bytes, memory)
    }

    /// The same where the host has as many bytes of its own from `host` on, between which and those of the region
    /// whoever packs copies.
    pub fn beside(
        region: Region,
        host: u64,
        slot_bytes: u64,
        memory: Option<Box<dyn Any + Send>>,
    ) -> Arc<Self> {
        let slots = u32::try_from(region.bytes / slot_bytes.max(1)).unwrap_or(u32::MAX);
        let bytes = u64::from(slots) * slot_bytes;
        let statistics = StagingStatistics { bytes, ..StagingStatistics::default() };
        let state = State {
            idle: (0..slots).rev().collect(),
            statistics,
            has_served: false,
            moved: Instant::now(),
            _memory: memory,
        };
        Arc::new(Self {
            slot_bytes,
            base: region.base,
            host,
            place: region.place,
            state: Mutex::new(state),
        })
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// A slot, once one is free, or why there was none before `patience` had passed.
    #[cfg(test)]
    pub(crate) fn take(self: &Arc<Self>, what_for: Use, patience: Duration) -> Result<Slot, Full> {
        let mut waiting = Waiting::new(patience);
        loop {
            if let Some(slot) = self.take_now(what_for, &mut waiting)? {
                return Ok(slot);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A slot, if one is free now, for who looks again later; or why there is none to wait for.
    pub fn take_now(
        self: &Arc<Self>,
        what_for: Use,
        waiting: &mut Waiting,
    ) -> Result<Option<Slot>, Full> {
        let state = &mut *self.state.lock();
        state.has_served |= what_for == Use::Peer;
        if let Some(number) = self.free(state, what_for) {
            state.moved = Instant::now();
            let statistics = &mut state.statistics;
            statistics.packed += u64::from(what_for == Use::Peer);
            statistics.in_use += self.slot_bytes;
            statistics.most_in_use = statistics.most_in_use.max(statistics.in_use);
            return Ok(Some(Slot { pool: self.clone(), number }));
        }
        let Waiting { began, patience, .. } = *waiting;
        let (waited, none) = (began.elapsed(), state.statistics.bytes == 0);
        let stalled = state.moved.elapsed() >= STALLED && waited >= LEAST_WAIT.min(patience);
        if none || (stalled && !patience.is_zero()) {
            state.statistics.refused += 1;
            return Err(Full::Stalled);
        }
        if waited >= patience {
            return Err(Full::Moving);
        }
        state.statistics.waits += u64::from(!std::mem::replace(&mut waiting.is_counted, true));
        Ok(None)
    }

    /// The number of a slot that is free for this use: the last is left to peers, if there are any.
    fn free(&self, state: &mut State, what_for: Use) -> Option<u32> {
        let has_several = state.statistics.bytes > self.slot_bytes;
        let left = usize::from(what_for == Use::Own && state.has_served && has_several);
        if state.idle.len() > left { state.idle.pop() } else { None }
    }

    /// All of it, to be registered where others are to read it.
    pub fn region(&self) -> Option<Region> {
        let bytes = self.state.lock().statistics.bytes;
        (bytes > 0).then_some(Region { base: self.base, bytes, place: self.place })
    }

    pub fn statistics(&self) -> StagingStatistics {
        self.state.lock().statistics
    }
}

impl Slot {
    /// Address of its first byte. Nobody else uses the slot, and no reference to it exists.
    pub fn address(&self) -> u64 {
        self.pool.base + u64::from(self.number) * self.pool.slot_bytes
    }

    pub fn bytes(&self) -> u64 {
        self.pool.slot_bytes
    }

    /// So many of its bytes, where the host has them.
    ///
    /// # Panics
    ///
    /// Where the slot has fewer.
    ///
    /// # Safety
    ///
    /// The slot's bytes are in the host's memory, and no card is at them.
    pub unsafe fn host_bytes(&mut self, bytes: u64) -> &mut [u8] {
        assert!(bytes <= self.pool.slot_bytes, "{bytes} of {} bytes", self.pool.slot_bytes);
        let at = self.pool.host + u64::from(self.number) * self.pool.slot_bytes;
        // SAFETY: the pool's memory is mapped while it has slots, and nobody else uses this one.
        unsafe { std::slice::from_raw_parts_mut(at as *mut u8, bytes as usize) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock();
        state.statistics.in_use -= self.pool.slot_bytes;
        state.idle.push(self.number);
        state.moved = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_handed_out_than_there_is_and_all_of_it_comes_back() {
        let pool = Staging::new(3 * 1024, 1024).unwrap();
        let slots: Vec<Slot> =
            (0..3).map(|_| pool.take(Use::Peer, Duration::ZERO).expect("a slot is free")).collect();
        let mut addresses: Vec<u64> = slots.iter().map(Slot::address).collect();
        addresses.sort_unstable();
        assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] == 1024), "{addresses:?}");
        assert_eq!(pool.take(Use::Own, Duration::from_millis(1)).err(), Some(Full::Moving));
        let StagingStatistics { bytes, in_use, most_in_use, packed, waits, refused } =
            pool.statistics();
        assert_eq!((bytes, in_use, most_in_use), (3072, 3072, 3072));
        assert_eq!((packed, waits, refused), (3, 1, 0));
        drop(slots);
        assert_eq!(pool.statistics().in_use, 0);
        assert!(pool.take(Use::Own, Duration::ZERO).is_ok());
    }

    #[test]
    fn who_waits_gets_what_comes_back() {
        let pool = Staging::new(1024, 1024).unwrap();
        let slot = pool.take(Use::Own, Duration::ZERO);
        let waiting = std::thread::spawn({
            let pool = pool.clone();
            move || pool.take(Use::Own, Duration::from_secs(30)).is_ok()
        });
        while pool.statistics().waits == 0 {
            std::thread::yield_now();
        }
        drop(slot);
        assert!(waiting.join().expect("the thread ends"));
    }

    /// Who waits gives up when nothing comes back any more, long before its own time is over; who comes then,
    /// soon after.
    #[test]
    fn a_pool_that_stands_still_is_not_waited_for() {
        let pool = Staging::new(1024, 1024).unwrap();
        let _kept = pool.take(Use::Peer, Duration::ZERO);
        let began = Instant::now();
        let refused = pool.take(Use::Own, Duration::from_secs(3600)).err();
        assert_eq!(refused, Some(Full::Stalled));
        assert!(began.elapsed() >= STALLED);
        assert_eq!(pool.take(Use::Peer, LEAST_WAIT).err(), Some(Full::Stalled));
        assert_eq!(pool.statistics().refused, 2);
        // Who has other things to do is not refused for that.
        assert_eq!(pool.take(Use::Own, Duration::ZERO).err(), Some(Full::Moving));
    }

    #[test]
    fn the_last_slot_is_left_to_peers_that_have_asked() {
        let pool = Staging::new(3 * 1024, 1024).unwrap();
        let own = || pool.take(Use::Own, Duration::ZERO);
        // Without any, all are ours.
        let all: Vec<Slot> = (0..3).map(|_| own().expect("a slot is free")).collect();
        assert_eq!(pool.take(Use::Peer, Duration::ZERO).err(), Some(Full::Moving));
        drop(all);
        let some: Vec<Slot> = (0..2).map(|_| own().expect("a slot is free")).collect();
        assert_eq!(own().err(), Some(Full::Moving));
        let last = pool.take(Use::Peer, Duration::ZERO);
        assert!(last.is_ok());
        drop((some, last));
        // Peers may have all of them: those who have one wait for nobody.
        let all: Vec<_> = (0..3).map(|_| pool.take(Use::Peer, Duration::ZERO)).collect();
        assert!(all.iter().all(Result::is_ok));
    }

    #[test]
    fn a_pool_of_nothing_refuses_at_once() {
        let nothing = Staging::new(10, 1024).unwrap();
        let refused = nothing.take(Use::Peer, Duration::from_secs(30)).err();
        assert_eq!((refused, nothing.statistics().refused), (Some(Full::Stalled), 1));
    }
}
