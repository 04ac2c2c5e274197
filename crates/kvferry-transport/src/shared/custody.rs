//! The one state machine of an operation: who may still touch its memory, and how it ended.
//!
//! Whoever moves bytes for an operation first takes custody of a part of it ([`Custody::take`]), and
//! settles that part when nothing of it can land any more: with its bytes in place, to be tried
//! again, or failed. What a part is, is the back end's own affair: a chunk on a connection, a request
//! in the hands of a library, a launch on a GPU whose event has not fired.
//!
//! The outcome and the custody are two things. An operation that was stopped (cancelled, late, its
//! peer lost) has its outcome at once and hands out no further part; while parts are out, it is in
//! quarantine; when the last one is settled, it is safe, and lets go of its regions. A part that is
//! never settled keeps its regions for good: better a region lost than a byte in somebody else's
//! block.

use std::fmt;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::counters::Counters;
use super::rate::RateWatch;
use super::region::Hold;
use crate::contract::{Error, Operation, Report, Status};

/// What a caller holds of an operation.
#[derive(Debug)]
pub struct Transfer(Arc<Custody>);

impl Transfer {
    /// The call that started the operation returns now.
    pub fn posted(custody: Arc<Custody>) -> Self {
        custody.state.lock().posted.get_or_insert_with(Instant::now);
        Self(custody)
    }
}

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
        self.cancel();
    }
}

/// Makes the threads of a back end let go of an operation that was stopped.
pub trait Interrupt: Send + Sync {
    /// `id` was stopped: wake whatever waits on a peer for its sake.
    fn interrupt(&self, id: u64);
}

/// What a new operation is made of.
pub struct Order {
    /// Copies asked for.
    pub asked: u64,
    /// Copies that are left after merging, and their bytes.
    pub copies: u64,
    pub bytes: u64,
    pub holds: Vec<Hold>,
    pub deadline: Instant,
    pub began: Instant,
    /// Without one, stopped operations simply wait until their parts are settled.
    pub interrupt: Option<Weak<dyn Interrupt>>,
    pub(crate) counters: Arc<Counters>,
    pub rate: Arc<RateWatch>,
}

pub struct Custody {
    id: u64,
    order: Order,
    /// The outcome is an error: threads look here between parts.
    stopped: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Parts that are out.
    held: u32,
    /// Bytes not yet in place.
    left: u64,
    /// Of those in place, bytes that the peer packed.
    packed: u64,
    /// Copies that were posted beside those of the order.
    more_copies: u64,
    outcome: Option<Result<Report, Error>>,
    /// Counted as quarantined.
    quarantined: bool,
    posted: Option<Instant>,
    holds: Vec<Hold>,
}

/// Custody of a part of an operation: its holder may move bytes.
#[must_use = "a part that is not settled keeps its regions for good"]
pub struct Part(Arc<Custody>);

impl Custody {
    /// Opens an operation. One without bytes is done at once.
    pub fn open(mut order: Order) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        order.counters.start();
        let state = State {
            held: 0,
            left: order.bytes,
            packed: 0,
            more_copies: 0,
            outcome: None,
            quarantined: false,
            posted: None,
            holds: mem::take(&mut order.holds),
        };
        let custody = Arc::new(Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            order,
            stopped: AtomicBool::new(false),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        if custody.is_empty() {
            let mut state = custody.state.lock();
            custody.succeed(&mut state);
            custody.release_if_safe(&mut state);
        }
        custody
    }

    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn deadline(&self) -> Instant {
        self.order.deadline
    }

    /// Whether there are no bytes to move at all.
    pub fn is_empty(&self) -> bool {
        self.order.bytes == 0
    }

    /// Whether it has ended with an error.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Custody of a part. `None` when the operation has ended: nothing may be started for it.
    pub fn take(self: &Arc<Self>) -> Option<Part> {
        let mut state = self.state.lock();
        if state.outcome.is_some() {
            return None;
        }
        state.held += 1;
        Some(Part(self.clone()))
    }

    /// Something that was to be moved in one piece is read in so many copies instead.
    pub fn count_copies(&self, copies: u64) {
        self.state.lock().more_copies += copies;
    }

    /// Ends the operation with an error, unless it has ended already.
    pub fn stop(&self, error: Error) {
        {
            let mut state = self.state.lock();
            if state.outcome.is_some() {
                return;
            }
            self.fail(&mut state, error);
            self.release_if_safe(&mut state);
        }
        self.interrupt();
    }

    pub fn status(&self) -> Status {
        self.state.lock().status()
    }

    fn enforce_deadline(&self) {
        if Instant::now() >= self.order.deadline {
            self.stop(Error::DeadlinePassed);
        }
    }

    fn wait(&self, until: Instant) -> Status {
        loop {
            self.enforce_deadline();
            let mut state = self.state.lock();
            let status = state.status();
            if status.is_safe() || Instant::now() >= until {
                return status;
            }
            let wake = match status {
                Status::InProgress => until.min(self.order.deadline),
                _ => until,
            };
            // A little longer than needed, so that the deadline has passed after the wake-up.
            self.changed.wait_until(&mut state, wake + Duration::from_micros(50));
        }
    }

    fn interrupt(&self) {
        if let Some(interrupt) = self.order.interrupt.as_ref().and_then(Weak::upgrade) {
            interrupt.interrupt(self.id);
        }
    }

    fn fail(&self, state: &mut State, error: Error) {
        state.outcome = Some(Err(error));
        state.quarantined = state.held > 0;
        self.stopped.store(true, Ordering::SeqCst);
        self.order.counters.fail(state.quarantined);
    }

    fn succeed(&self, state: &mut State) {
        let now = Instant::now();
        let posted = *state.posted.get_or_insert(now);
        let report = Report {
            bytes: self.order.bytes,
            copies: self.order.asked,
            copies_posted: self.order.copies + state.more_copies,
            packed: state.packed,
            time_to_post: posted.saturating_duration_since(self.order.began),
            time_on_wire: now.saturating_duration_since(posted),
        };
        state.outcome = Some(Ok(report));
        self.order.counters.done(&report);
        self.order.rate.observe(&report);
    }

    /// Lets go of the regions, and wakes who waits, once nobody can touch them for this operation.
    fn release_if_safe(&self, state: &mut State) {
        if state.outcome.is_some() && state.held == 0 {
            if mem::take(&mut state.quarantined) {
                self.order.counters.settle();
            }
            state.holds = Vec::new();
        }
        self.changed.notify_all();
    }
}

impl State {
    fn status(&self) -> Status {
        match &self.outcome {
            None => Status::InProgress,
            Some(Ok(report)) => Status::Done(*report),
            Some(Err(error)) if self.held > 0 => Status::Quarantined(error.clone()),
            Some(Err(error)) => Status::Failed(error.clone()),
        }
    }
}

impl Part {
    /// So many bytes are in place, and nothing more of this part lands. With the last of an
    /// operation's bytes the operation is done.
    pub fn in_place(self, bytes: u64) {
        self.landed(bytes, 0);
    }

    /// The same for bytes that the peer packed.
    pub fn packed_in_place(self, bytes: u64) {
        self.landed(bytes, bytes);
    }

    fn landed(self, bytes: u64, packed: u64) {
        let custody = &self.0;
        let mut state = custody.state.lock();
        state.held -= 1;
        state.left -= bytes;
        state.packed += packed;
        if state.outcome.is_none() && state.left == 0 {
            custody.succeed(&mut state);
        }
        custody.release_if_safe(&mut state);
    }

    /// Nothing of this part was put in place, or what was is of no account, and nothing more of it
    /// lands. It may be taken again.
    pub fn give_back(self) {
        let custody = &self.0;
        let mut state = custody.state.lock();
        state.held -= 1;
        custody.release_if_safe(&mut state);
    }

    /// This part has failed for good, and with it the operation. Nothing more of this part lands.
    pub fn fail(self, error: Error) {
        let custody = &self.0;
        let first = {
            let mut state = custody.state.lock();
            state.held -= 1;
            let first = state.outcome.is_none();
            if first {
                custody.fail(&mut state, error);
            }
            custody.release_if_safe(&mut state);
            first
        };
        if first {
            custody.interrupt();
        }
    }

    /// The operation that this is a part of.
    pub fn custody(&self) -> &Arc<Custody> {
        &self.0
    }
}

impl fmt::Debug for Custody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Custody")
            .field("id", &self.id)
            .field("copies", &self.order.copies)
            .field("bytes", &self.order.bytes)
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Part").field(&self.0.id).finish()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An operation of so many bytes that holds one region.
    pub(crate) fn open(bytes: u64, counters: &Arc<Counters>) -> Arc<Custody> {
        let now = Instant::now();
        Custody::open(Order {
            asked: 1,
            copies: 1,
            bytes,
            holds: vec![Hold::default()],
            deadline: now + Duration::from_secs(60),
            began: now,
            interrupt: None,
            counters: counters.clone(),
            rate: Arc::default(),
        })
    }

    #[test]
    fn a_stopped_operation_is_quarantined_until_its_last_part_is_settled() {
        let counters = Arc::default();
        let custody = open(100, &counters);
        let (first, second) = (custody.take().unwrap(), custody.take().unwrap());
        custody.stop(Error::Cancelled);
        assert_eq!(custody.status(), Status::Quarantined(Error::Cancelled));
        assert!(custody.take().is_none());
        first.in_place(40);
        assert_eq!(custody.status(), Status::Quarantined(Error::Cancelled));
        assert_eq!(custody.state.lock().holds.len(), 1);
        second.give_back();
        assert_eq!(custody.status(), Status::Failed(Error::Cancelled));
        assert!(custody.state.lock().holds.is_empty());
        assert_eq!(counters.read().quarantined, 0);
        assert_eq!(counters.read().failed, 1);
    }

    #[test]
    fn nothing_to_move_is_done_at_once() {
        let custody = open(0, &Arc::default());
        assert!(matches!(custody.status(), Status::Done(_)));
        assert!(custody.take().is_none());
        assert!(custody.state.lock().holds.is_empty());
    }

    #[test]
    fn a_part_that_is_lost_keeps_its_region() {
        let custody = open(10, &Arc::default());
        drop(custody.take());
        custody.stop(Error::Disconnected);
        assert_eq!(custody.status(), Status::Quarantined(Error::Disconnected));
        assert_eq!(custody.state.lock().holds.len(), 1);
    }

    /// What can happen to an operation.
    #[derive(Clone, Copy, Debug)]
    enum Event {
        Take,
        InPlace(prop::sample::Index),
        GiveBack(prop::sample::Index),
        Fail(prop::sample::Index),
        Stop,
    }

    fn events() -> impl Strategy<Value = Event> {
        let index = any::<prop::sample::Index>;
        prop_oneof![
            4 => Just(Event::Take),
            4 => index().prop_map(Event::InPlace),
            2 => index().prop_map(Event::GiveBack),
            1 => index().prop_map(Event::Fail),
            1 => Just(Event::Stop),
        ]
    }

    proptest! {
        /// Whatever happens in whatever order: the first outcome stays; it is safe, and the regions
        /// are let go, exactly when an outcome is known and no part is out; the counters agree.
        #[test]
        fn safe_means_ended_and_nobody_holds_a_part(
            bytes in 1u64..5,
            events in prop::collection::vec(events(), 0..40),
        ) {
            let counters = Arc::default();
            let custody = open(bytes, &counters);
            let mut parts = Vec::new();
            let mut left = bytes;
            let mut outcome: Option<Result<(), Error>> = None;
            for event in events {
                match event {
                    Event::Take => {
                        // As a back end does: never more parts than there are bytes left to move.
                        if outcome.is_none() && parts.len() as u64 == left {
                            continue;
                        }
                        let part = custody.take();
                        prop_assert_eq!(part.is_some(), outcome.is_none());
                        parts.extend(part);
                    }
                    Event::InPlace(_) | Event::GiveBack(_) | Event::Fail(_) if parts.is_empty() => {}
                    Event::InPlace(at) => {
                        parts.swap_remove(at.index(parts.len())).in_place(1);
                        left -= 1;
                        if left == 0 {
                            outcome.get_or_insert(Ok(()));
                        }
                    }
                    Event::GiveBack(at) => parts.swap_remove(at.index(parts.len())).give_back(),
                    Event::Fail(at) => {
                        parts.swap_remove(at.index(parts.len())).fail(Error::RegionBusy);
                        outcome.get_or_insert(Err(Error::RegionBusy));
                    }
                    Event::Stop => {
                        custody.stop(Error::Cancelled);
                        outcome.get_or_insert(Err(Error::Cancelled));
                    }
                }
                let status = custody.status();
                let known = status.outcome().map(|known| known.map(|_| ()).map_err(Clone::clone));
                prop_assert_eq!(&known, &outcome);
                let safe = outcome.is_some() && parts.is_empty();
                prop_assert_eq!(status.is_safe(), safe);
                prop_assert_eq!(custody.state.lock().holds.is_empty(), safe);
                let sums = counters.read();
                prop_assert_eq!(sums.quarantined, u64::from(outcome.is_some() && !safe));
                prop_assert_eq!(sums.failed, u64::from(matches!(outcome, Some(Err(_)))));
                prop_assert_eq!(sums.done, u64::from(matches!(outcome, Some(Ok(())))));
            }
        }
    }
}
