//! One operation of the cuda back end.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::driver::{Event, Pinned};
use super::staging::OnCard;
use super::{CudaPeer, Inner, Table};
use crate::counters::Counters;
use crate::error::Error;
use crate::region::Hold;
use crate::transport::{Operation, Report, Status};

/// What a caller holds of an operation.
#[derive(Debug)]
pub struct CudaTransfer(pub(super) Arc<Flight>);

impl Operation for CudaTransfer {
    fn poll(&self) -> Status {
        self.0.look()
    }

    fn wait(&self, until: Instant) -> Status {
        // Most requests take less than this: worth staying awake for. A sleep is never shorter than
        // some 60 µs. Short ones are not worth a call of the system either.
        let began = Instant::now();
        let busy = began + Duration::from_micros(50);
        let awake = began + Duration::from_millis(10);
        loop {
            let status = self.0.look();
            let now = Instant::now();
            if status.is_safe() || now >= until {
                return status;
            }
            if now < busy {
                std::hint::spin_loop();
            } else if now < awake {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(100).min(until - now));
            }
        }
    }

    fn cancel(&self) {
        self.0.stop(Error::Cancelled);
    }
}

impl Drop for CudaTransfer {
    fn drop(&mut self) {
        self.0.stop(Error::Cancelled);
    }
}

pub(super) struct Flight {
    peer: CudaPeer,
    event: Option<Event>,
    events: Arc<Mutex<Vec<Event>>>,
    deadline: Instant,
    began: Instant,
    asked: u64,
    bytes: u64,
    counters: Arc<Counters>,
    state: Mutex<State>,
}

struct State {
    /// The kernel has ended, or never began.
    landed: bool,
    outcome: Option<Result<Report, Error>>,
    quarantined: bool,
    posted: Option<Instant>,
    /// What the kernel touches; given back once it has ended.
    holds: Vec<Hold>,
    table: Option<Arc<Table>>,
    kept: Option<(Pinned, OnCard)>,
}

/// What a new operation is made of.
pub(super) struct Order {
    pub(super) peer: CudaPeer,
    pub(super) table: Arc<Table>,
    pub(super) event: Event,
    pub(super) events: Arc<Mutex<Vec<Event>>>,
    pub(super) deadline: Instant,
    pub(super) began: Instant,
    pub(super) asked: u64,
    pub(super) bytes: u64,
    pub(super) holds: Vec<Hold>,
    pub(super) counters: Arc<Counters>,
}

impl Flight {
    pub(super) fn new(order: Order) -> Arc<Self> {
        order.counters.start();
        Arc::new(Self {
            peer: order.peer,
            event: Some(order.event),
            events: order.events,
            deadline: order.deadline,
            began: order.began,
            asked: order.asked,
            bytes: order.bytes,
            counters: order.counters,
            state: Mutex::new(State {
                landed: false,
                outcome: None,
                quarantined: false,
                posted: None,
                holds: order.holds,
                table: Some(order.table),
                kept: None,
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn event(&self) -> &Event {
        self.event.as_ref().expect("only taken when dropped")
    }

    pub(super) fn is_of(&self, peer: &Arc<Inner>) -> bool {
        Arc::ptr_eq(&self.peer.0, peer)
    }

    /// Keeps memory until the kernel has ended.
    pub(super) fn keep(&self, kept: (Pinned, OnCard)) {
        self.lock().kept = Some(kept);
    }

    /// The kernel was launched and the event recorded, or not.
    pub(super) fn posted(&self, started: Result<(), Error>) {
        let mut state = self.lock();
        state.posted = Some(Instant::now());
        if let Err(error) = started {
            // The card refused: nothing runs.
            state.landed = true;
            self.fail(&mut state, error);
            self.release(&mut state);
        }
    }

    /// Where it stands, by asking the card.
    pub(super) fn look(&self) -> Status {
        let mut state = self.lock();
        if !state.landed && state.posted.is_some() {
            match self.event().passed() {
                Ok(false) => {}
                Ok(true) => {
                    state.landed = true;
                    if state.outcome.is_none() {
                        self.succeed(&mut state);
                    }
                }
                Err(error) => {
                    // The context is broken: nothing of it runs any more.
                    state.landed = true;
                    self.fail(&mut state, error);
                }
            }
            if !state.landed && Instant::now() >= self.deadline {
                self.fail(&mut state, Error::DeadlinePassed);
            }
            self.release(&mut state);
        }
        match &state.outcome {
            None => Status::InProgress,
            Some(Ok(report)) => Status::Done(*report),
            Some(Err(error)) if !state.landed => Status::Quarantined(error.clone()),
            Some(Err(error)) => Status::Failed(error.clone()),
        }
    }

    /// Ends the operation with an error, unless it has ended already.
    pub(super) fn stop(&self, error: Error) {
        let mut state = self.lock();
        self.fail(&mut state, error);
        self.release(&mut state);
    }

    fn succeed(&self, state: &mut State) {
        let now = Instant::now();
        let posted = *state.posted.get_or_insert(now);
        let report = Report {
            bytes: self.bytes,
            copies: self.asked,
            copies_posted: 1,
            time_to_post: posted.saturating_duration_since(self.began),
            time_on_wire: now.saturating_duration_since(posted),
        };
        state.outcome = Some(Ok(report));
        self.counters.done(&report);
    }

    fn fail(&self, state: &mut State, error: Error) {
        if state.outcome.is_none() {
            state.outcome = Some(Err(error));
            state.quarantined = !state.landed;
            self.counters.fail(state.quarantined);
        }
    }

    fn release(&self, state: &mut State) {
        if state.landed {
            if std::mem::take(&mut state.quarantined) {
                self.counters.settle();
            }
            state.holds = Vec::new();
            state.table = None;
            state.kept = None;
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
        }
    }
}

impl fmt::Debug for Flight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flight")
            .field("peer", &self.peer)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}
