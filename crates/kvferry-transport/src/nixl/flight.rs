//! One operation, as its owner and the driver see it.

use std::ffi::c_int;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::NixlPeer;
use super::capi::Span;
use super::grid::Grid;
use crate::counters::Counters;
use crate::error::Error;
use crate::region::Hold;
use crate::transport::{Operation, Report, Status};

/// A read or write under way in a [`Nixl`](super::Nixl) transport.
#[derive(Debug)]
pub struct NixlTransfer(pub(super) Arc<Flight>);

impl Operation for NixlTransfer {
    fn poll(&self) -> Status {
        self.0.enforce_deadline();
        Flight::status(&self.0.lock())
    }

    fn wait(&self, until: Instant) -> Status {
        self.0.wait(until)
    }

    fn cancel(&self) {
        self.0.stop(Error::Cancelled);
    }
}

impl Drop for NixlTransfer {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// What there is to do.
#[derive(Debug)]
pub(super) enum Job {
    /// Entries of two grids.
    OnGrids { write: bool, ours: (Grid, Vec<c_int>), theirs: (Grid, Vec<c_int>) },
    /// Single copies (ours, theirs), in groups of the same kinds of memory.
    OneByOne { write: bool, groups: Vec<Vec<(Span, Span)>> },
}

#[derive(Debug)]
pub(super) struct Flight {
    pub(super) peer: NixlPeer,
    pub(super) notification: Option<Vec<u8>>,
    deadline: Instant,
    began: Instant,
    asked: u64,
    copies_posted: u64,
    bytes: u64,
    counters: Arc<Counters>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
pub(super) struct State {
    /// Until the driver takes it.
    job: Option<Job>,
    /// The driver has it: bytes may be moving.
    held: bool,
    outcome: Option<Result<Report, Error>>,
    quarantined: bool,
    posted: Option<Instant>,
    holds: Vec<Hold>,
}

/// What a new operation is made of.
pub(super) struct Order<'a> {
    pub(super) peer: NixlPeer,
    pub(super) notification: Option<&'a [u8]>,
    pub(super) deadline: Instant,
    pub(super) began: Instant,
    pub(super) asked: usize,
    pub(super) posted: usize,
    pub(super) bytes: u64,
    pub(super) job: Job,
    pub(super) holds: Vec<Hold>,
    pub(super) counters: Arc<Counters>,
}

impl Flight {
    pub(super) fn new(order: Order<'_>) -> Arc<Self> {
        order.counters.start();
        Arc::new(Self {
            peer: order.peer,
            notification: order.notification.map(<[u8]>::to_vec),
            deadline: order.deadline,
            began: order.began,
            asked: order.asked as u64,
            copies_posted: order.posted as u64,
            bytes: order.bytes,
            counters: order.counters,
            state: Mutex::new(State {
                job: Some(order.job),
                held: false,
                outcome: None,
                quarantined: false,
                posted: None,
                holds: order.holds,
            }),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The call that started the operation returns now.
    pub(super) fn posted(&self) {
        self.lock().posted.get_or_insert_with(Instant::now);
    }

    /// For the driver: takes the job, and holds the operation from now on. `None` when the
    /// operation has ended already.
    pub(super) fn take(&self) -> Option<Job> {
        let mut state = self.lock();
        if state.outcome.is_some() {
            return None;
        }
        state.held = true;
        state.job.take()
    }

    pub(super) fn has_outcome(&self) -> bool {
        self.lock().outcome.is_some()
    }

    /// For the driver: nothing can land any more. With an error, or with success, unless the
    /// outcome was decided before.
    pub(super) fn let_go(&self, outcome: Option<Result<(), Error>>) {
        let mut state = self.lock();
        state.held = false;
        if state.outcome.is_none() {
            match outcome {
                Some(Ok(())) => self.succeed(&mut state),
                Some(Err(error)) => self.fail(&mut state, error),
                None => {}
            }
        }
        self.release_if_safe(&mut state);
    }

    /// Ends the operation with an error, unless it has ended already.
    pub(super) fn stop(&self, error: Error) {
        let mut state = self.lock();
        if state.outcome.is_none() {
            self.fail(&mut state, error);
            self.release_if_safe(&mut state);
        }
    }

    pub(super) fn enforce_deadline(&self) {
        if Instant::now() >= self.deadline {
            self.stop(Error::DeadlinePassed);
        }
    }

    fn succeed(&self, state: &mut State) {
        let now = Instant::now();
        let posted = *state.posted.get_or_insert(now);
        let report = Report {
            bytes: self.bytes,
            copies: self.asked,
            copies_posted: self.copies_posted,
            time_to_post: posted.saturating_duration_since(self.began),
            time_on_wire: now.saturating_duration_since(posted),
        };
        state.outcome = Some(Ok(report));
        self.counters.done(&report);
        self.peer.0.rate.observe(&report);
    }

    fn fail(&self, state: &mut State, error: Error) {
        state.outcome = Some(Err(error));
        state.job = None;
        state.quarantined = state.held;
        self.counters.fail(state.held);
    }

    fn release_if_safe(&self, state: &mut State) {
        if state.outcome.is_some() && !state.held {
            if std::mem::take(&mut state.quarantined) {
                self.counters.settle();
            }
            state.holds = Vec::new();
        }
        self.changed.notify_all();
    }

    fn status(state: &State) -> Status {
        match &state.outcome {
            None => Status::InProgress,
            Some(Ok(report)) => Status::Done(*report),
            Some(Err(error)) if state.held => Status::Quarantined(error.clone()),
            Some(Err(error)) => Status::Failed(error.clone()),
        }
    }

    fn wait(&self, until: Instant) -> Status {
        loop {
            self.enforce_deadline();
            let state = self.lock();
            let status = Self::status(&state);
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
