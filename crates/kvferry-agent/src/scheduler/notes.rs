//! What readers do with the leases of this engine, and when: for an owner who traces requests. Nothing is
//! noted unless somebody has asked for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use crossbeam_channel::{Receiver, Sender, bounded};

/// Notes that wait to be fetched. An engine that does nothing fetches none, and peers must not fill its
/// memory: further ones are dropped.
const WAITING: usize = 4096;

/// What a reader did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The request.
    pub request: String,
    /// What.
    pub did: Did,
    /// The reader, as it calls itself.
    pub who: String,
    /// When, by the wall clock.
    pub at: SystemTime,
}

/// What a reader can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Did {
    /// It has begun to follow the request.
    Followed,
    /// It has read all that it needs, and was told that the lease was held.
    Read,
}

impl Did {
    /// As a word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Followed => "followed",
            Self::Read => "read",
        }
    }
}

#[derive(Debug)]
pub(super) struct Notes {
    wanted: AtomicBool,
    sender: Sender<Note>,
    receiver: Receiver<Note>,
}

impl Default for Notes {
    fn default() -> Self {
        let (sender, receiver) = bounded(WAITING);
        Self { wanted: AtomicBool::new(false), sender, receiver }
    }
}

impl Notes {
    /// From now on.
    pub(super) fn want(&self) {
        self.wanted.store(true, Ordering::Relaxed);
    }

    pub(super) fn put(&self, did: Did, request: &str, who: &str) {
        if !self.wanted.load(Ordering::Relaxed) {
            return;
        }
        let (request, who) = (request.to_owned(), who.to_owned());
        _ = self.sender.try_send(Note { request, did, who, at: SystemTime::now() });
    }

    pub(super) fn take(&self) -> Vec<Note> {
        self.receiver.try_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_noted_unasked_and_never_too_much() {
        let notes = Notes::default();
        notes.put(Did::Read, "early", "d/0");
        assert_eq!(notes.take(), []);
        notes.want();
        for _ in 0..WAITING + 3 {
            notes.put(Did::Followed, "one", "d/0");
        }
        let taken = notes.take();
        assert_eq!(taken.len(), WAITING);
        assert_eq!(
            (&*taken[0].request, taken[0].did, &*taken[0].who),
            ("one", Did::Followed, "d/0")
        );
        notes.put(Did::Read, "two", "d/1");
        assert_eq!(notes.take().len(), 1);
    }
}
