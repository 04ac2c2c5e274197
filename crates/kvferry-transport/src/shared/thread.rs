//! Threads that others count on: they outlive what panics on them.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;
use std::thread;
use std::time::Duration;

use tracing::error;

/// A panic that comes again at once must not keep a core busy, nor fill the log.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The life of a thread; what panics in it is lost, and it goes on with the rest.
pub fn outlive(what: &'static str, mut life: impl FnMut()) {
    let mut pause = FIRST_PAUSE;
    while unless_it_panics(what, &mut life).is_none() {
        thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Does something; `None` where it panics. What the panic says has gone to the standard error already.
pub fn unless_it_panics<T>(what: &'static str, done: impl FnOnce() -> T) -> Option<T> {
    // Locks are free again, and what was left half done under them is not looked at but to end it.
    let done = catch_unwind(AssertUnwindSafe(done)).ok();
    if done.is_none() {
        error!(what, "a thread of the transport has panicked: what it was doing is lost");
    }
    done
}

/// The same for what a task does.
pub async fn unless_its_task_panics<T>(
    what: &'static str,
    done: impl Future<Output = T>,
) -> Option<T> {
    let mut done = pin!(done);
    poll_fn(|context| {
        let polled = unless_it_panics(what, || done.as_mut().poll(context));
        polled.map_or(Poll::Ready(None), |polled| polled.map(Some))
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_goes_on_after_a_panic() {
        let mut lives = 0;
        outlive("a test", || {
            lives += 1;
            assert_ne!(lives, 1, "as the test wants it");
        });
        assert_eq!(lives, 2);
    }
}
