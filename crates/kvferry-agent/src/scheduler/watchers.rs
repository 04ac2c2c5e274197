//! Wakes those who wait for something to happen to a lease.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// What is waited for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Of {
    /// Whatever happens to a request's lease.
    Request(String),
    /// That a lease of this name begins.
    Name(String),
}

/// Who waits, by what for; there is nothing here that nobody waits for.
#[derive(Debug, Default)]
pub(super) struct Watchers(Mutex<HashMap<Of, Arc<Notify>>>);

impl Watchers {
    /// Looks until there is something to see, again whenever it is woken, at the latest at `until`.
    pub(super) async fn look<T>(
        &self,
        of: Of,
        until: Instant,
        mut see: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        loop {
            let watcher = self.0.lock().entry(of.clone()).or_default().clone();
            let mut woken = std::pin::pin!(watcher.notified());
            // It counts from here: what happens after the look is not missed.
            woken.as_mut().enable();
            let seen = see();
            let waited = match seen {
                Some(_) => Ok(()),
                None => timeout_at(until, woken).await,
            };
            if seen.is_some() || waited.is_err() {
                self.leave(&of, &watcher);
                return seen;
            }
        }
    }

    /// How many wait for it at this moment.
    pub(super) fn waiting(&self, of: &Of) -> usize {
        // The map has one.
        self.0.lock().get(of).map_or(0, |watcher| Arc::strong_count(watcher) - 1)
    }

    /// Something has happened.
    pub(super) fn wake(&self, of: &Of) {
        // Who waits on finds that there is none, and makes another.
        if let Some(watcher) = self.0.lock().remove(of) {
            watcher.notify_waiters();
        }
    }

    /// Something has happened to everything.
    pub(super) fn wake_all(&self) {
        let watchers = std::mem::take(&mut *self.0.lock());
        watchers.values().for_each(|watcher| watcher.notify_waiters());
    }

    /// What nobody else waits for is forgotten.
    fn leave(&self, of: &Of, watcher: &Arc<Notify>) {
        let mut watchers = self.0.lock();
        let own = watchers.get(of).is_some_and(|other| Arc::ptr_eq(other, watcher));
        // The map, and the caller.
        if own && Arc::strong_count(watcher) <= 2 {
            watchers.remove(of);
        }
    }

    #[cfg(test)]
    fn count(&self) -> usize {
        self.0.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use super::*;

    fn of(name: &str) -> Of {
        Of::Request(name.to_owned())
    }

    #[tokio::test(flavor = "current_thread")]
    async fn whoever_waits_looks_again_when_it_rings_and_only_then() {
        let (watchers, looks) = (Arc::new(Watchers::default()), Arc::new(AtomicU32::new(0)));
        let value = Arc::new(AtomicU32::new(0));
        let waiting = tokio::spawn({
            let (watchers, looks, value) = (watchers.clone(), looks.clone(), value.clone());
            async move {
                let until = Instant::now() + Duration::from_secs(60);
                let see = || {
                    looks.fetch_add(1, Ordering::SeqCst);
                    Some(value.load(Ordering::SeqCst)).filter(|value| *value > 1)
                };
                watchers.look(of("a"), until, see).await
            }
        });
        while looks.load(Ordering::SeqCst) < 1 {
            tokio::task::yield_now().await;
        }
        watchers.wake(&of("b"));
        watchers.wake(&Of::Name("a".to_owned()));
        for (now, then) in [(1, 2), (2, 3)] {
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            assert_eq!(looks.load(Ordering::SeqCst), now, "nothing else wakes it");
            value.store(now, Ordering::SeqCst);
            watchers.wake(&of("a"));
            while looks.load(Ordering::SeqCst) < then {
                tokio::task::yield_now().await;
            }
        }
        assert_eq!(waiting.await.unwrap(), Some(2));
        assert_eq!(watchers.count(), 0);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_wait_in_vain_ends_and_leaves_nothing() {
        let watchers = Watchers::default();
        let until = Instant::now() + Duration::from_millis(20);
        assert_eq!(watchers.look(of("a"), until, || None::<()>).await, None);
        assert!(Instant::now() >= until);
        assert_eq!(watchers.count(), 0);
        assert_eq!(watchers.look(of("a"), until, || Some(3)).await, Some(3));
        assert_eq!(watchers.count(), 0);
    }
}
