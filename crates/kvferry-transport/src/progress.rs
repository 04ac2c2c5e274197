//! One operation of a back end that carries copies out in chunks on its own threads.
//!
//! The threads take chunks, and settle each of them: as done, as given back for another try, or as
//! given up. An operation is safe when no thread holds a chunk of it and none can be taken any more.

use std::fmt;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::counters::Counters;
use crate::error::Error;
use crate::merge::Direction;
use crate::rate::RateWatch;
use crate::region::Hold;
use crate::transport::{Operation, Report, Status};
use kvferry_layout::ByteCopy;

/// What a caller holds of an operation.
#[derive(Debug)]
pub struct Transfer(pub(crate) Arc<Progress>);

impl Operation for Transfer {
    fn poll(&self) -> Status {
        self.0.enforce_deadline();
        self.0.status()
    }

    fn wait(&self, until: Instant) -> Status {
        self.0.wait(until)
    }

    fn cancel(&self) {
        self.0.stop(Error::Cancelled);
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.0.stop(Error::Cancelled);
    }
}

/// Makes the threads of a back end let go of an operation that was stopped.
pub(crate) trait Interrupt: Send + Sync {
    /// `id` was stopped: wake whatever waits on a peer for its sake.
    fn interrupt(&self, id: u64);
}

/// A part of an operation, in the hands of one thread.
#[derive(Debug, Default)]
pub(crate) struct Chunk {
    pub(crate) copies: Vec<ByteCopy>,
    pub(crate) bytes: u64,
}

/// What is left to do once the last chunk is done.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Other chunks are under way or waiting.
    Chunks,
    /// All bytes are in place: the notification may leave.
    Notify,
    /// Nothing.
    Nothing,
}

/// How many chunks of one operation may be lost to broken connections before it is given up.
const MAX_RETRIES: u32 = 32;

pub(crate) struct Progress {
    pub(crate) id: u64,
    pub(crate) direction: Direction,
    pub(crate) deadline: Instant,
    pub(crate) notification: Option<Vec<u8>>,
    copies: Vec<ByteCopy>,
    asked: u64,
    bytes: u64,
    began: Instant,
    /// The outcome is an error: threads look here between chunks.
    stopped: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
    interrupt: Weak<dyn Interrupt>,
    counters: Arc<Counters>,
    rate: Arc<RateWatch>,
}

struct State {
    /// Next copy to hand out, and how much of it is handed out already.
    next: usize,
    offset: u64,
    returned: Vec<Chunk>,
    retries: u32,
    /// Chunks in the hands of threads.
    held: u32,
    /// Bytes not yet in place.
    left: u64,
    outcome: Option<Result<Report, Error>>,
    quarantined: bool,
    posted: Option<Instant>,
    holds: Vec<Hold>,
}

/// What a new operation is made of.
pub(crate) struct Order<'a> {
    pub(crate) id: u64,
    pub(crate) direction: Direction,
    pub(crate) asked: usize,
    pub(crate) copies: Vec<ByteCopy>,
    pub(crate) holds: Vec<Hold>,
    pub(crate) notification: Option<&'a [u8]>,
    pub(crate) deadline: Instant,
    pub(crate) began: Instant,
    pub(crate) interrupt: Weak<dyn Interrupt>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) rate: Arc<RateWatch>,
}

impl Progress {
    pub(crate) fn new(order: Order<'_>) -> Arc<Self> {
        order.counters.start();
        let bytes = order.copies.iter().map(|copy| copy.bytes).sum();
        Arc::new(Self {
            id: order.id,
            direction: order.direction,
            deadline: order.deadline,
            notification: order.notification.map(<[u8]>::to_vec),
            copies: order.copies,
            asked: order.asked as u64,
            bytes,
            began: order.began,
            stopped: AtomicBool::new(false),
            state: Mutex::new(State {
                next: 0,
                offset: 0,
                returned: Vec::new(),
                retries: 0,
                held: 0,
                left: bytes,
                outcome: None,
                quarantined: false,
                posted: None,
                holds: order.holds,
            }),
            changed: Condvar::new(),
            interrupt: order.interrupt,
            counters: order.counters,
            rate: order.rate,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The call that started the operation returns now.
    pub(crate) fn posted(&self) {
        self.lock().posted.get_or_insert_with(Instant::now);
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Whether there are no bytes to move at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Hands out the next part, of at most `max_copies` copies and `max_bytes` bytes, and whether
    /// more is left. `None` when nothing is left to hand out.
    pub(crate) fn take(&self, max_copies: usize, max_bytes: u64) -> Option<(Chunk, bool)> {
        let mut state = self.lock();
        if state.outcome.is_some() {
            return None;
        }
        let chunk = match state.returned.pop() {
            Some(chunk) => chunk,
            None => self.cut(&mut state, max_copies, max_bytes)?,
        };
        state.held += 1;
        let more = state.next < self.copies.len() || !state.returned.is_empty();
        Some((chunk, more))
    }

    fn cut(&self, state: &mut State, max_copies: usize, max_bytes: u64) -> Option<Chunk> {
        let rest = self.copies.get(state.next..)?;
        let mut chunk = Chunk { copies: Vec::with_capacity(rest.len().min(max_copies)), bytes: 0 };
        for copy in rest.iter().take(max_copies) {
            if chunk.bytes == max_bytes {
                break;
            }
            let bytes = (copy.bytes - state.offset).min(max_bytes - chunk.bytes);
            chunk.copies.push(ByteCopy {
                source: copy.source + state.offset,
                destination: copy.destination + state.offset,
                bytes,
            });
            chunk.bytes += bytes;
            state.offset += bytes;
            if state.offset < copy.bytes {
                break;
            }
            state.next += 1;
            state.offset = 0;
        }
        (!chunk.copies.is_empty()).then_some(chunk)
    }

    /// A chunk is in place.
    pub(crate) fn settle_done(&self, bytes: u64) -> Next {
        let mut state = self.lock();
        state.held -= 1;
        state.left -= bytes;
        if state.outcome.is_some() {
            self.release_if_safe(&mut state);
            Next::Nothing
        } else if state.left > 0 {
            Next::Chunks
        } else if self.notification.is_some() {
            Next::Notify
        } else {
            self.succeed(&mut state);
            Next::Nothing
        }
    }

    /// A chunk was not carried out, and nothing of it can land any more: it may be tried again.
    /// Whether it will be; otherwise the operation has failed, with `error` if not before. Without
    /// an error it was our own doing, and is tried again however often it happens.
    pub(crate) fn settle_retry(&self, chunk: Chunk, error: Option<&Error>) -> bool {
        let mut state = self.lock();
        state.held -= 1;
        if state.outcome.is_none() {
            state.retries += u32::from(error.is_some());
            match error {
                Some(error) if state.retries > MAX_RETRIES => self.fail(&mut state, error.clone()),
                _ => {
                    state.returned.push(chunk);
                    return true;
                }
            }
        }
        self.release_if_safe(&mut state);
        false
    }

    /// A chunk failed for good, and nothing of it can land any more.
    pub(crate) fn settle_failed(&self, error: Error) {
        let interrupt = {
            let mut state = self.lock();
            state.held -= 1;
            let first = state.outcome.is_none();
            if first {
                self.fail(&mut state, error);
            }
            self.release_if_safe(&mut state);
            first && state.held > 0
        };
        if interrupt {
            self.interrupt();
        }
    }

    /// The notification has arrived, or there was nothing to move and nothing to say.
    pub(crate) fn notified(&self) {
        let mut state = self.lock();
        if state.outcome.is_none() && state.left == 0 {
            self.succeed(&mut state);
        }
    }

    /// Ends the operation with an error, unless it has ended already.
    pub(crate) fn stop(&self, error: Error) {
        {
            let mut state = self.lock();
            if state.outcome.is_some() {
                return;
            }
            self.fail(&mut state, error);
            self.release_if_safe(&mut state);
        }
        self.interrupt();
    }

    fn interrupt(&self) {
        if let Some(interrupt) = self.interrupt.upgrade() {
            interrupt.interrupt(self.id);
        }
    }

    fn fail(&self, state: &mut State, error: Error) {
        state.outcome = Some(Err(error));
        state.returned = Vec::new();
        state.quarantined = state.held > 0;
        self.stopped.store(true, Ordering::SeqCst);
        self.counters.fail(state.quarantined);
    }

    fn succeed(&self, state: &mut State) {
        let now = Instant::now();
        let posted = *state.posted.get_or_insert(now);
        let report = Report {
            bytes: self.bytes,
            copies: self.asked,
            copies_posted: self.copies.len() as u64,
            time_to_post: posted.saturating_duration_since(self.began),
            time_on_wire: now.saturating_duration_since(posted),
        };
        state.outcome = Some(Ok(report));
        self.counters.done(&report);
        self.rate.observe(&report);
        self.release_if_safe(state);
    }

    /// Lets go of the regions, and wakes who waits, once no thread can touch them for this
    /// operation.
    fn release_if_safe(&self, state: &mut State) {
        if state.outcome.is_some() && state.held == 0 {
            if mem::take(&mut state.quarantined) {
                self.counters.settle();
            }
            state.holds = Vec::new();
        }
        self.changed.notify_all();
    }

    fn enforce_deadline(&self) {
        if Instant::now() >= self.deadline {
            self.stop(Error::DeadlinePassed);
        }
    }

    pub(crate) fn status(&self) -> Status {
        Self::status_of(&self.lock())
    }

    fn status_of(state: &State) -> Status {
        match &state.outcome {
            None => Status::InProgress,
            Some(Ok(report)) => Status::Done(*report),
            Some(Err(error)) if state.held > 0 => Status::Quarantined(error.clone()),
            Some(Err(error)) => Status::Failed(error.clone()),
        }
    }

    fn wait(&self, until: Instant) -> Status {
        loop {
            self.enforce_deadline();
            let state = self.lock();
            let status = Self::status_of(&state);
            let now = Instant::now();
            if status.is_safe() || now >= until {
                return status;
            }
            let wake = match status {
                Status::InProgress => until.min(self.deadline),
                _ => until,
            };
            // A little longer than needed, so that the deadline has passed after the wake-up.
            let pause = wake.saturating_duration_since(now) + Duration::from_micros(50);
            drop(self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner));
        }
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress")
            .field("id", &self.id)
            .field("direction", &self.direction)
            .field("copies", &self.copies.len())
            .field("bytes", &self.bytes)
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Quiet;

    impl Interrupt for Quiet {
        fn interrupt(&self, _: u64) {}
    }

    fn progress(copies: Vec<ByteCopy>, notification: Option<&[u8]>) -> Arc<Progress> {
        let now = Instant::now();
        Progress::new(Order {
            id: 1,
            direction: Direction::Read,
            asked: copies.len(),
            copies,
            holds: vec![Hold::default()],
            notification,
            deadline: now + Duration::from_secs(60),
            began: now,
            interrupt: Weak::<Quiet>::new(),
            counters: Arc::default(),
            rate: Arc::default(),
        })
    }

    fn one(bytes: u64) -> Vec<ByteCopy> {
        vec![ByteCopy { source: 1000, destination: 5000, bytes }]
    }

    #[test]
    fn a_stopped_operation_is_quarantined_until_its_last_chunk_settles() {
        let progress = progress(one(100), None);
        let first = progress.take(10, 40).unwrap().0;
        let second = progress.take(10, 40).unwrap().0;
        progress.stop(Error::Cancelled);
        assert_eq!(progress.status(), Status::Quarantined(Error::Cancelled));
        assert!(progress.take(10, 40).is_none());
        progress.settle_done(first.bytes);
        assert_eq!(progress.status(), Status::Quarantined(Error::Cancelled));
        assert_eq!(progress.lock().holds.len(), 1);
        assert!(!progress.settle_retry(second, Some(&Error::Disconnected)));
        assert_eq!(progress.status(), Status::Failed(Error::Cancelled));
        assert!(progress.lock().holds.is_empty());
        assert_eq!(progress.counters.read().quarantined, 0);
        assert_eq!(progress.counters.read().failed, 1);
    }

    #[test]
    fn the_notification_waits_for_the_last_chunk() {
        let progress = progress(one(100), Some(b"hello"));
        let (first, more) = progress.take(10, 60).unwrap();
        assert!(more);
        let (second, more) = progress.take(10, 60).unwrap();
        assert!(!more);
        assert_eq!(progress.settle_done(second.bytes), Next::Chunks);
        progress.notified();
        assert_eq!(progress.status(), Status::InProgress);
        assert_eq!(progress.settle_done(first.bytes), Next::Notify);
        assert_eq!(progress.status(), Status::InProgress);
        progress.notified();
        assert!(matches!(progress.status(), Status::Done(_)));
        progress.stop(Error::Cancelled);
        assert!(matches!(progress.status(), Status::Done(_)));
    }

    #[test]
    fn a_chunk_is_not_retried_for_ever() {
        let progress = progress(one(100), None);
        let mut tries = 0;
        while let Some((chunk, _)) = progress.take(10, 1000) {
            tries += 1;
            progress.settle_retry(chunk, Some(&Error::Disconnected));
        }
        assert_eq!(tries, MAX_RETRIES + 1);
        assert_eq!(progress.status(), Status::Failed(Error::Disconnected));
    }

    #[test]
    fn our_own_doing_does_not_count() {
        let progress = progress(one(100), None);
        for _ in 0..10 * MAX_RETRIES {
            let (chunk, _) = progress.take(10, 1000).unwrap();
            assert!(progress.settle_retry(chunk, None));
        }
        let (chunk, _) = progress.take(10, 1000).unwrap();
        assert_eq!(progress.settle_done(chunk.bytes), Next::Nothing);
        assert!(matches!(progress.status(), Status::Done(_)));
    }

    proptest! {
        /// Whatever the limits and however chunks are given back, the chunks that end up done
        /// cover every byte of every copy exactly once.
        #[test]
        fn chunks_cover_every_byte_once(
            lengths in prop::collection::vec(1u64..40, 1..20),
            limits in prop::collection::vec((1usize..6, 1u64..50, any::<bool>()), 1..40),
        ) {
            let mut at = 0;
            let copies: Vec<ByteCopy> = lengths
                .iter()
                .map(|&bytes| {
                    at += bytes + 3;
                    ByteCopy { source: at, destination: at + 7, bytes }
                })
                .collect();
            let progress = progress(copies.clone(), None);
            let mut seen = Vec::new();
            let mut retries = 0;
            for (max_copies, max_bytes, retry) in limits.into_iter().cycle() {
                let Some((chunk, _)) = progress.take(max_copies, max_bytes) else { break };
                prop_assert_eq!(chunk.bytes, chunk.copies.iter().map(|c| c.bytes).sum::<u64>());
                if retry && retries < MAX_RETRIES {
                    retries += 1;
                    progress.settle_retry(chunk, None);
                    continue;
                }
                for c in &chunk.copies {
                    seen.extend((0..c.bytes).map(|i| (c.source + i, c.destination + i)));
                }
                progress.settle_done(chunk.bytes);
            }
            let mut all: Vec<_> = copies
                .iter()
                .flat_map(|c| (0..c.bytes).map(|i| (c.source + i, c.destination + i)))
                .collect();
            seen.sort_unstable();
            all.sort_unstable();
            prop_assert_eq!(seen, all);
            prop_assert!(matches!(progress.status(), Status::Done(_)));
        }
    }
}
