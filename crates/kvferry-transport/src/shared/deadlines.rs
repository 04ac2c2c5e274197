//! A thread that ends operations whose deadline has passed, whether anybody polls them or not.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::custody::Custody;
use super::thread::outlive;
use crate::contract::Error;

#[derive(Debug)]
pub(crate) struct Deadlines {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    watched: BinaryHeap<Reverse<Watched>>,
    /// Above this many entries it is worth looking for those that have ended.
    sweep_at: usize,
    closing: bool,
}

#[derive(Debug)]
struct Watched {
    deadline: Instant,
    operation: Weak<Custody>,
}

impl PartialEq for Watched {
    fn eq(&self, other: &Self) -> bool {
        self.deadline == other.deadline
    }
}

impl Eq for Watched {}

impl PartialOrd for Watched {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Watched {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.deadline.cmp(&other.deadline)
    }
}

impl Deadlines {
    pub(crate) fn start() -> Result<Self, Error> {
        let shared = Arc::new(Shared::default());
        let thread = std::thread::Builder::new()
            .name("kvferry-late".to_owned())
            .spawn({
                let shared = shared.clone();
                move || outlive("deadlines", || shared.run())
            })
            .map_err(|error| Error::system("starting a thread", &error))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(crate) fn watch(&self, operation: &Arc<Custody>) {
        let mut state = self.shared.state.lock();
        if state.watched.len() >= state.sweep_at.max(256) {
            state.watched.retain(|Reverse(watched)| watched.operation.strong_count() > 0);
            state.sweep_at = state.watched.len() * 2;
        }
        let deadline = operation.deadline();
        let sooner = state.watched.peek().is_none_or(|Reverse(first)| deadline < first.deadline);
        let operation = Arc::downgrade(operation);
        state.watched.push(Reverse(Watched { deadline, operation }));
        if sooner {
            self.shared.changed.notify_one();
        }
    }
}

impl Drop for Deadlines {
    fn drop(&mut self) {
        self.shared.state.lock().closing = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        let mut state = self.state.lock();
        while !state.closing {
            let next = state.watched.peek().map(|Reverse(first)| first.deadline);
            match next {
                None => self.changed.wait(&mut state),
                Some(deadline) if deadline <= Instant::now() => {
                    let operation = state.watched.pop().and_then(|w| w.0.operation.upgrade());
                    drop(state);
                    if let Some(operation) = operation {
                        operation.stop(Error::DeadlinePassed);
                    }
                    state = self.state.lock();
                }
                Some(deadline) => {
                    self.changed.wait_until(&mut state, deadline);
                }
            }
        }
    }
}
