//! What can go wrong, as data.

use std::fmt;
use std::io;

/// Why a call or an operation failed.
///
/// Errors are plain values: they can be compared, cloned and kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operation's deadline passed before its last byte (or its notification) had arrived.
    #[error("the deadline passed")]
    DeadlinePassed,
    /// The operation was cancelled, or its handle was dropped before it had ended.
    #[error("the operation was cancelled")]
    Cancelled,
    /// The peer was disconnected, or the transport closed, while the operation was under way.
    #[error("the peer was disconnected")]
    Disconnected,
    /// The peer is gone: it died, restarted, or can no longer be reached.
    #[error("the peer is lost: {0}")]
    PeerLost(String),
    /// The peer broke the protocol. Its connection was ended.
    #[error("the peer broke the protocol: {0}")]
    PeerMisbehaved(InvalidFrame),
    /// A copy touches bytes that lie in no registered region.
    #[error("{bytes} bytes at {address:#x} lie outside the registered regions of {side}")]
    OutsideRegion {
        /// Whose regions.
        side: Side,
        /// First byte of the copy on that side.
        address: u64,
        /// Length of the copy.
        bytes: u64,
    },
    /// A region to register overlaps one that is registered already.
    #[error("{bytes} bytes at {address:#x} overlap a region that is registered already")]
    Overlap {
        /// Base of the refused region.
        address: u64,
        /// Length of the refused region.
        bytes: u64,
    },
    /// The region is still the source or destination of operations that have not settled.
    #[error("the region is in use by operations that have not settled")]
    RegionBusy,
    /// No such region is registered.
    #[error("no such region is registered")]
    NoSuchRegion,
    /// The peer's description is not one this transport can read.
    #[error("the peer's description cannot be used: {0}")]
    BadDescription(String),
    /// This transport cannot do what was asked.
    #[error("{0}")]
    Unsupported(String),
    /// A library this transport needs is missing or does not load.
    #[error("{0}")]
    Library(String),
    /// There is no usable CUDA driver.
    ///
    /// What to do: run on a machine with an NVIDIA GPU and its driver; in a container, make the GPU
    /// visible (`--gpus`).
    #[error("CUDA's driver cannot be used here: {0}")]
    NoDriver(String),
    /// CUDA refused a call, or a kernel failed.
    ///
    /// What to do: look CUDA's error up; after a failed kernel the process must be restarted.
    #[error("{what}: {text} (CUDA error {code})")]
    Cuda {
        /// What was being done.
        what: String,
        /// CUDA's number of the error.
        code: i32,
        /// What CUDA says about it.
        text: String,
    },
    /// The operating system refused a call.
    #[error("{what}: {kind}{}", Code(*code))]
    System {
        /// What was being done.
        what: String,
        /// The kind of refusal.
        kind: io::ErrorKind,
        /// The system's own error number, where there is one.
        code: Option<i32>,
    },
}

impl Error {
    pub(crate) fn system(what: impl Into<String>, error: &io::Error) -> Self {
        Self::System { what: what.into(), kind: error.kind(), code: error.raw_os_error() }
    }
}

struct Code(Option<i32>);

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(code) => write!(f, " (os error {code})"),
            None => Ok(()),
        }
    }
}

/// Which end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// This process.
    Local,
    /// The peer.
    Peer,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Local => "this process",
            Self::Peer => "the peer",
        })
    }
}

/// What was wrong with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidFrame {
    /// The opening bytes are not those of this protocol.
    #[error("the opening bytes are not kvferry's")]
    Magic,
    /// The peer speaks another version of the protocol.
    #[error("protocol version {theirs}, but this side speaks {ours}")]
    Version {
        /// What the peer said.
        theirs: u32,
        /// What this side speaks.
        ours: u32,
    },
    /// The peer asked for an operation that does not exist.
    #[error("unknown operation {0}")]
    Operation(u8),
    /// Bytes that must be zero are not.
    #[error("reserved bytes are set")]
    Reserved,
    /// A count is zero, or larger than a frame may carry.
    #[error("{0} copies in one frame")]
    Count(u32),
    /// A length is larger than a frame may carry, or does not add up.
    #[error("a length of {0} bytes")]
    Length(u64),
    /// An answer does not belong to the request it should answer.
    #[error("an answer to another request")]
    Answer,
    /// The peer ended the connection in the middle of a frame.
    #[error("the connection ended inside a frame")]
    Cut,
}
