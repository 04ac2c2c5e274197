//! A thread that ends operations whose deadline has passed, whether anybody polls them or not.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::error::Error;
use crate::progress::Progress;

#[derive(Debug)]
pub(crate) struct Keeper {
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
    operation: Weak<Progress>,
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

impl Keeper {
    pub(crate) fn start() -> Result<Self, Error> {
        let shared = Arc::new(Shared::default());
        let thread = std::thread::Builder::new()
            .name("kvferry-keeper".to_owned())
            .spawn({
                let shared = shared.clone();
                move || shared.run()
            })
            .map_err(|error| Error::system("starting a thread", &error))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(crate) fn watch(&self, operation: &Arc<Progress>) {
        let mut state = self.shared.lock();
        if state.watched.len() >= state.sweep_at.max(256) {
            state.watched.retain(|Reverse(watched)| watched.operation.strong_count() > 0);
            state.sweep_at = state.watched.len() * 2;
        }
        let sooner =
            state.watched.peek().is_none_or(|Reverse(first)| operation.deadline < first.deadline);
        state.watched.push(Reverse(Watched {
            deadline: operation.deadline,
            operation: Arc::downgrade(operation),
        }));
        if sooner {
            self.shared.changed.notify_one();
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.lock();
        while !state.closing {
            let now = Instant::now();
            let next = state.watched.peek().map(|Reverse(first)| first.deadline);
            state = match next {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) if deadline <= now => {
                    let operation = state.watched.pop().and_then(|w| w.0.operation.upgrade());
                    drop(state);
                    if let Some(operation) = operation {
                        operation.stop(Error::DeadlinePassed);
                    }
                    self.lock()
                }
                Some(deadline) => {
                    self.changed
                        .wait_timeout(state, deadline - now)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
    }
}
