//! What is left of the agent when a part of it panics: the work of that part ends with an error, and the rest goes on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use tracing::error;

use crate::rules::failure::Failure;

/// Does something, or says what panicked.
pub(crate) fn caught<T>(what: &'static str, done: impl FnOnce() -> T) -> Result<T, Failure> {
    // Whoever calls this looks at nothing that was left half done, but to end it.
    catch_unwind(AssertUnwindSafe(done)).map_err(|_| broken(what))
}

/// For those who hear of a panic from elsewhere. What it said has gone to the standard error already.
pub(crate) fn broken(what: &'static str) -> Failure {
    error!(what, "a part of the agent has panicked: its work ends with an error");
    Failure::Internal(what.to_owned())
}

/// Tells of a panic in a task that holds it.
pub(crate) struct Watched<F: FnMut(Failure)> {
    what: &'static str,
    tell: F,
}

impl<F: FnMut(Failure)> Watched<F> {
    pub(crate) fn new(what: &'static str, tell: F) -> Self {
        Self { what, tell }
    }
}

impl<F: FnMut(Failure)> Drop for Watched<F> {
    fn drop(&mut self) {
        if thread::panicking() {
            (self.tell)(broken(self.what));
        }
    }
}
