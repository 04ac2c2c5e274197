//! Where kernels say that they have ended: words of pinned memory, which cost nothing to look at. With each
//! goes what its launch counts in.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use super::driver::{Card, OnCard, Pinned, Stream};
use super::program::{COUNTS, Ends};
use kvferry_transport::Error;

const PAGE: usize = 4096;
/// One word to a line of the cache: a kernel writes it while the host looks at others.
const APART: usize = 64;
/// Nor do two launches count in one line of the card's cache.
const COUNTS_APART: usize = (COUNTS as usize).next_multiple_of(128);

/// Many words, and as many places to count in.
struct Page {
    words: Pinned,
    counts: OnCard,
}

/// A word: the page that it lies in, and its number there.
type Word = (Arc<Page>, usize);

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

    /// A word for one launch in a stream, which must be that of all others; and whether the stream fills what it
    /// counts in first, which that launch must not overlap.
    pub(super) fn take(&self, stream: &Stream) -> Result<(Signal, bool), Error> {
        let mut free = self.free.lock();
        let known = free.pop();
        let filled = known.is_none();
        let (page, number) = match known {
            Some(place) => place,
            None => {
                let count = PAGE / APART;
                let bytes = count * COUNTS_APART;
                let counts = OnCard::new(&self.card, bytes)?;
                let page = Arc::new(Page { words: self.card.pinned(PAGE)?, counts });
                // SAFETY: the page is kept by its words, and those by launches that come after this.
                unsafe { stream.fill(page.counts.address(), 0, bytes as u64)? };
                free.extend((1..count).map(|number| (page.clone(), number)));
                (page, 0)
            }
        };
        let signal = Signal { page, number, home: self.clone() };
        signal.word().store(0, Ordering::Relaxed);
        Ok((signal, filled))
    }
}

/// A word that a kernel sets when everything that it moves is in place. It must be kept until then.
pub(super) struct Signal {
    page: Arc<Page>,
    number: usize,
    home: Signals,
}

impl Signal {
    fn word(&self) -> &AtomicU32 {
        // SAFETY: the page is as long as that, aligned, and lives as long as this; it is only ever
        // accessed as whole words.
        unsafe { AtomicU32::from_ptr(self.page.words.memory.add(self.number * APART).cast()) }
    }

    /// Where the kernel finds it, and what it counts in.
    pub(super) fn ends(&self) -> Ends {
        let counts = self.page.counts.address() + (self.number * COUNTS_APART) as u64;
        Ends { counts, signal: self.word().as_ptr() as u64 }
    }

    /// Whether it was set. What the kernel wrote before is then visible.
    pub(super) fn is_set(&self) -> bool {
        self.word().load(Ordering::Acquire) != 0
    }
}

impl Drop for Signal {
    fn drop(&mut self) {
        // What a launch that broke has counted is nobody's to go on with.
        if self.is_set() {
            self.home.free.lock().push((self.page.clone(), self.number));
        }
    }
}
