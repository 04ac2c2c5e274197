//! The thread that makes the calls that move bytes.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::capi::{Prepared, Request};
use super::cuda::Context;
use super::flight::{Flight, Job};
use super::{Shared, lost};
use crate::error::Error;

/// How long closing waits for operations to end of their own accord.
const LAST_PATIENCE: Duration = Duration::from_secs(1);
/// Operations posted between two looks at those under way.
const BATCH: usize = 16;

pub(super) struct Driver {
    shared: Arc<Shared>,
    active: Vec<Active>,
    /// The GPU whose context this thread works in.
    gpu: Option<u32>,
    context: Option<Context>,
}

/// A posted operation.
struct Active {
    flight: Arc<Flight>,
    /// Requests that NIXL has not ended.
    requests: Vec<Request>,
    /// The first error of the others.
    error: Option<Error>,
    /// The lists the requests were made from.
    lists: Vec<Arc<Prepared>>,
}

impl Driver {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, active: Vec::new(), gpu: None, context: None }
    }

    pub(super) fn run(mut self) {
        let mut pause = Pause::default();
        loop {
            let batch = {
                let mut queue = self.shared.lock();
                let ready = |flight: &Arc<Flight>| !flight.peer.0.paused.load(Ordering::SeqCst);
                while !queue.closing && !queue.flights.iter().any(ready) {
                    let idle = self.active.is_empty()
                        && queue.flights.is_empty()
                        && queue.leaving.is_empty();
                    if !idle {
                        // Something must be looked after: soon, or when there is more to do.
                        let waited = self.shared.changed.wait_timeout(queue, pause.next());
                        queue = waited.unwrap_or_else(PoisonError::into_inner).0;
                        break;
                    }
                    let waited = self.shared.changed.wait(queue);
                    queue = waited.unwrap_or_else(PoisonError::into_inner);
                }
                if queue.closing {
                    drop(queue);
                    self.close();
                    return;
                }
                let mut batch = Vec::new();
                while batch.len() < BATCH
                    && let Some(at) = queue.flights.iter().position(ready)
                    && let Some(flight) = queue.flights.remove(at)
                {
                    // Under the lock: whoever pauses the peer now waits for this one.
                    *flight.peer.under_way() += 1;
                    batch.push(flight);
                }
                if batch.is_empty() {
                    // Those that wait for a paused peer have deadlines too.
                    for flight in &queue.flights {
                        flight.enforce_deadline();
                    }
                }
                batch
            };
            if !batch.is_empty() {
                pause = Pause::default();
            }
            for flight in batch {
                self.post(flight);
            }
            if self.look_after() {
                pause = Pause::default();
            }
            self.dismiss();
        }
    }

    fn post(&mut self, flight: Arc<Flight>) {
        if flight.peer.0.closed.load(Ordering::SeqCst) {
            flight.stop(Error::Disconnected);
        }
        let Some(job) = flight.take() else {
            *flight.peer.under_way() -= 1;
            return;
        };
        let gpu = self.shared.lock().gpu;
        if gpu != self.gpu {
            self.gpu = gpu;
            self.context = gpu.and_then(Context::enter);
        }
        let mut active = Active { flight, requests: Vec::new(), error: None, lists: Vec::new() };
        let made = self.make(&active.flight, job, &mut active.lists);
        match made {
            Ok(requests) => {
                for mut request in requests {
                    match request.post() {
                        Ok(true) => {}
                        Ok(false) => active.requests.push(request),
                        Err(code) => {
                            active.error = Some(lost(code));
                            break;
                        }
                    }
                }
            }
            Err(error) => active.error = Some(error),
        }
        self.active.push(active);
    }

    fn make(
        &self,
        flight: &Flight,
        job: Job,
        lists: &mut Vec<Arc<Prepared>>,
    ) -> Result<Vec<Request>, Error> {
        let agent = &self.shared.agent;
        match job {
            Job::OnGrids { write, ours, theirs } => {
                let our_list = self.shared.prepared(None, ours.0)?;
                let their_list = self.shared.prepared(Some(&flight.peer), theirs.0)?;
                let request = agent
                    .request_prepared(write, &our_list, &ours.1, &their_list, &theirs.1)
                    .map_err(lost)?;
                lists.extend([our_list, their_list]);
                Ok(vec![request])
            }
            Job::OneByOne { write, groups } => groups
                .iter()
                .map(|group| {
                    let ours = group.iter().map(|pair| pair.0);
                    let theirs = group.iter().map(|pair| pair.1);
                    agent.request(write, &flight.peer.0.name, ours, theirs).map_err(lost)
                })
                .collect(),
        }
    }

    /// Asks NIXL how everything stands; whether anything has ended.
    fn look_after(&mut self) -> bool {
        let before = self.active.len();
        let shared = &self.shared;
        self.active.retain_mut(|active| {
            active.flight.enforce_deadline();
            active.requests.retain_mut(|request| match request.ended() {
                Ok(ended) => !ended,
                Err(code) => {
                    active.error.get_or_insert_with(|| lost(code));
                    false
                }
            });
            if let Some(error) = &active.error {
                active.flight.stop(error.clone());
            }
            if !active.requests.is_empty() {
                return true;
            }
            let flight = &active.flight;
            let mut outcome = active.error.take().map_or(Ok(()), Err);
            if let (Ok(()), Some(message), false) =
                (&outcome, &flight.notification, flight.has_outcome())
            {
                outcome = shared.agent.notify(&flight.peer.0.name, message).map_err(lost);
            }
            active.lists.clear();
            *flight.peer.under_way() -= 1;
            flight.let_go(Some(outcome));
            false
        });
        self.active.len() < before
    }

    /// Forgets the peers that were disconnected and of which nothing is under way any more: before
    /// that, NIXL would report their transfers as ended while they still land.
    fn dismiss(&mut self) {
        let leaving = self.shared.lock().leaving.clone();
        for peer in leaving {
            for active in &self.active {
                if Arc::ptr_eq(&active.flight.peer.0, &peer.0) {
                    active.flight.stop(Error::Disconnected);
                }
            }
            if *peer.under_way() == 0 {
                self.shared.forget_prepared(peer.0.instance);
                let _ = self.shared.agent.forget(&peer.0.name);
                self.shared.lock().leaving.retain(|other| !Arc::ptr_eq(&other.0, &peer.0));
            }
        }
    }

    /// Ends everything, for when the agent is about to go.
    fn close(mut self) {
        let flights = std::mem::take(&mut self.shared.lock().flights);
        for flight in flights {
            flight.stop(Error::Disconnected);
        }
        for active in &self.active {
            active.flight.stop(Error::Disconnected);
        }
        let until = Instant::now() + LAST_PATIENCE;
        let mut pause = Pause::default();
        while !self.active.is_empty() && Instant::now() < until {
            self.look_after();
            std::thread::sleep(pause.next());
        }
        let mut abandoned = self.shared.abandoned.0.lock().unwrap_or_else(PoisonError::into_inner);
        for active in self.active.drain(..) {
            abandoned.push(active.flight);
        }
        drop(abandoned);
        self.shared.lock_prepared().clear();
        let leaving = std::mem::take(&mut self.shared.lock().leaving);
        let peers = std::mem::take(&mut *self.shared.lock_peers());
        for peer in leaving.into_iter().chain(peers) {
            let _ = self.shared.agent.forget(&peer.0.name);
        }
    }
}

/// Longer and longer pauses between two looks.
#[derive(Debug, Default)]
pub(super) struct Pause(u32);

impl Pause {
    pub(super) fn next(&mut self) -> Duration {
        self.0 = self.0.saturating_add(1);
        Duration::from_micros(match self.0 {
            0..=8 => 20,
            9..=64 => 100,
            65..=512 => 500,
            _ => 2000,
        })
    }
}
