//! Where kernels say that they have ended: words of pinned memory, which cost nothing to look at.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use super::driver::{Card, Pinned};
use crate::contract::Error;

const PAGE: usize = 4096;
/// One word to a line of the cache: a kernel writes it while the host looks at others.
const APART: usize = 64;

/// A word: the page that it lies in, and where.
type Word = (Arc<Pinned>, usize);

/// Words that wait for a launch.
#[derive(Clone)]
pub(super) struct Signals {
    card: Card,
    free: Arc<Mutex<Vec<Word>>>,
}

impl Signals {
    pub(super) fn new(card: &Card) -> Self {
        Self { card: card.clone(), free: Arc::default() }
    }

    /// A word for one launch.
    pub(super) fn take(&self) -> Result<Signal, Error> {
        let mut free = self.free.lock();
        let (page, at) = match free.pop() {
            Some(place) => place,
            None => {
                let page = Arc::new(self.card.pinned(PAGE)?);
                free.extend((APART..PAGE).step_by(APART).map(|at| (page.clone(), at)));
                (page, 0)
            }
        };
        let signal = Signal { page, at, home: self.clone() };
        signal.word().store(0, Ordering::Relaxed);
        Ok(signal)
    }
}

/// A word that a kernel sets when everything that it moves is in place. It must be kept until then.
pub(super) struct Signal {
    page: Arc<Pinned>,
    at: usize,
    home: Signals,
}

impl Signal {
    fn word(&self) -> &AtomicU32 {
        // SAFETY: the page is as long as that, aligned, and lives as long as this; it is only ever
        // accessed as whole words.
        unsafe { AtomicU32::from_ptr(self.page.memory.add(self.at).cast()) }
    }

    /// Where the kernel finds it.
    pub(super) fn address(&self) -> u64 {
        self.word().as_ptr() as u64
    }

    /// Whether it was set. What the kernel wrote before is then visible.
    pub(super) fn is_set(&self) -> bool {
        self.word().load(Ordering::Acquire) != 0
    }
}

impl Drop for Signal {
    fn drop(&mut self) {
        self.home.free.lock().push((self.page.clone(), self.at));
    }
}
