//! What is known of operations, regions and transports.

use std::fmt;
use std::time::Duration;

use super::error::Error;

/// Where an operation stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// Bytes are moving.
    InProgress,
    /// Every byte is at its destination, and nothing more will land there.
    Done(Report),
    /// The operation has failed, but bytes may still land in its destination: keep the destination
    /// out of use.
    Quarantined(Error),
    /// The operation has failed and nothing more will land. What the destination holds is
    /// undefined.
    Failed(Error),
}

impl Status {
    /// Whether the destination may be put to another use: nothing of this operation will land
    /// there any more.
    pub fn is_safe(&self) -> bool {
        match self {
            Self::Done(_) | Self::Failed(_) => true,
            Self::InProgress | Self::Quarantined(_) => false,
        }
    }

    /// Whether the outcome is known: done, or why not.
    pub fn outcome(&self) -> Option<Result<&Report, &Error>> {
        match self {
            Self::InProgress => None,
            Self::Done(report) => Some(Ok(report)),
            Self::Quarantined(error) | Self::Failed(error) => Some(Err(error)),
        }
    }
}

/// What an operation did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Bytes moved.
    pub bytes: u64,
    /// Copies asked for.
    pub copies: u64,
    /// Copies posted, after merging those that touch. What is packed is one, and each run of it that had to be
    /// read by itself is one more.
    pub copies_posted: u64,
    /// Of the bytes, those that the peer packed.
    pub packed: u64,
    /// How long the call that started it took.
    pub time_to_post: Duration,
    /// From the end of that call to the last byte.
    pub time_on_wire: Duration,
}

impl Report {
    /// Bytes per second from the call to the end; `None` when that was too short to tell.
    pub fn rate(&self) -> Option<f64> {
        let seconds = (self.time_to_post + self.time_on_wire).as_secs_f64();
        (seconds > 0.0).then(|| self.bytes as f64 / seconds)
    }
}

/// Sums over all operations of a transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Operations started.
    pub started: u64,
    /// Operations that ended well.
    pub done: u64,
    /// Operations that failed, by deadline, cancellation or otherwise.
    pub failed: u64,
    /// Failed operations whose destination is not safe yet.
    pub quarantined: u64,
    /// Bytes moved by operations that ended well.
    pub bytes: u64,
    /// Copies they were asked for.
    pub copies: u64,
    /// Copies they posted, after merging.
    pub copies_posted: u64,
    /// Time the calls that started them took, together.
    pub time_to_post: Duration,
    /// Their time on the wire, together.
    pub time_on_wire: Duration,
    /// Connections that this side's port for data turned away: those that proved nothing in time or were wrong, and
    /// those for which there was no room.
    pub turned_away: u64,
}

/// What the memory to pack into was used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StagingStatistics {
    /// Bytes that there are.
    pub bytes: u64,
    /// Of these, in use now.
    pub in_use: u64,
    /// The most that were in use at once.
    pub most_in_use: u64,
    /// Parts of packed reads of peers that were gathered.
    pub packed: u64,
    /// How often one of them had to wait for others.
    pub waits: u64,
    /// How often one was refused, because nothing came back in time: its peer read it directly.
    pub refused: u64,
}

/// Names a registered region of one transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(pub(crate) u64);

/// Names one run of one transport. A restarted process has another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Instance(pub [u8; 16]);

impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Instance({self})")
    }
}
