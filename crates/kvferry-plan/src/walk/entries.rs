//! Which entries a request is about.

use kvferry_layout::{Law, Window};

/// Which entries of a state a request needs, and which it finds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entries {
    /// Entries `0..held` are there already, where they are live.
    pub(crate) held: u64,
    /// Entries `first..end` are to be copied.
    pub(crate) first: u64,
    /// See `first`.
    pub(crate) end: u64,
}

impl Entries {
    pub(crate) fn new(law: Law, window: &Window, tokens: u64, cached: u64) -> Self {
        let (held, end) = (law.held(cached, tokens), law.entries(tokens));
        let live = law.closed(window.first_live(tokens));
        Self { held, first: held.max(live).min(end), end }
    }
}
