//! Which protocol is spoken.

use std::fmt;

/// A version of the protocol. The major numbers of two sides must be equal, and their minor numbers at most
/// one apart: engines are upgraded one at a time, from one release to the next. The lower one is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version {
    /// Changes when sides no longer understand each other.
    pub major: u16,
    /// Changes when something is added.
    pub minor: u16,
}

impl Version {
    /// What this release speaks.
    pub const CURRENT: Self = Self { major: 1, minor: 0 };

    /// Whether sides that speak these two serve each other.
    pub(crate) fn serves(self, other: Self) -> bool {
        self.major == other.major && self.minor.abs_diff(other.minor) <= 1
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
