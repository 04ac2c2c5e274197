//! Which protocol is spoken.

use std::fmt;

/// A version of the protocol. The major numbers of two sides must be equal; of the minor numbers the
/// lower one is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version {
    /// Changes when sides no longer understand each other.
    pub major: u16,
    /// Changes when something is added.
    pub minor: u16,
}

impl Version {
    /// What this release speaks.
    pub const CURRENT: Self = Self { major: 1, minor: 3 };
    /// From here on a side can be asked for its status.
    pub(crate) const STATUS: Self = Self { major: 1, minor: 1 };
    /// From here on a confirmation says what was read by.
    pub(crate) const GRANTS: Self = Self { major: 1, minor: 2 };
    /// From here on a lease can be followed while it grows.
    pub(crate) const FRONTIERS: Self = Self { major: 1, minor: 3 };
    /// From here on a confirmation says what the blocks are wanted for.
    pub(crate) const ORIGINS: Self = Self { major: 1, minor: 3 };
    /// From here on an engine's ranks can be given tasks.
    pub(crate) const TASKS: Self = Self { major: 1, minor: 3 };
    /// From here on a side can be told to drain.
    pub(crate) const DRAINS: Self = Self { major: 1, minor: 3 };
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
