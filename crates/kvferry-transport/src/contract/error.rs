//! What can go wrong, as data.

use std::fmt;
use std::io;

use kvferry_layout::LoopsError;

/// Why a call or an operation failed.
///
/// Errors are plain values: they can be compared, cloned and kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operation's deadline passed before its last byte had arrived.
    ///
    /// What to do: look for the reason at the peer (stopped, overloaded, unreachable) or in the
    /// network; where transfers are merely large for the link, allow more time.
    #[error("the deadline passed before all bytes had arrived")]
    DeadlinePassed,
    /// The operation was cancelled, or its handle was dropped before it had ended.
    ///
    /// What to do: nothing; the caller wanted this.
    #[error("the operation was cancelled")]
    Cancelled,
    /// The peer was disconnected, or the transport closed, while the operation was under way.
    ///
    /// What to do: nothing where this side is shutting down; otherwise connect to the peer again.
    #[error("the peer was disconnected")]
    Disconnected,
    /// The peer is gone: it died, restarted, or can no longer be reached.
    ///
    /// What to do: see in the peer's log why it ended. A restarted peer is a new one: connect to it
    /// with its new description.
    #[error("the peer is lost: {0}")]
    PeerLost(String),
    /// The peer broke the protocol. Its connection was ended.
    ///
    /// What to do: run the same version of kvferry on both sides, and check that nothing else
    /// answers at the peer's address.
    #[error("the peer broke the protocol: {0}")]
    PeerMisbehaved(InvalidFrame),
    /// A copy touches bytes that lie in no registered region.
    ///
    /// What to do: register the memory first. If it was the peer's side and it has registered more
    /// since, connect to it again; if not, the two sides disagree about the layout: report it.
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
    ///
    /// What to do: register each span of memory once; describe several views of it as views of one
    /// region.
    #[error("{bytes} bytes at {address:#x} overlap a region that is registered already")]
    Overlap {
        /// Base of the refused region.
        address: u64,
        /// Length of the refused region.
        bytes: u64,
    },
    /// The region is still the source or destination of operations that have not settled.
    ///
    /// What to do: keep the memory, wait until the operations are safe, and deregister it then.
    #[error("the region is in use by operations that have not settled")]
    RegionBusy,
    /// No such region is registered.
    ///
    /// What to do: deregister each region once, at the transport that registered it.
    #[error("no such region is registered")]
    NoSuchRegion,
    /// The peer's description is not one this transport can read.
    ///
    /// What to do: use the same transport and the same version of kvferry on both sides, and carry
    /// the description over unchanged.
    #[error("the peer's description cannot be used: {0}")]
    BadDescription(String),
    /// This transport cannot do what was asked.
    ///
    /// What to do: the message says what was asked and what is possible instead.
    #[error("{0}")]
    Unsupported(String),
    /// A library this transport needs is missing or does not load.
    ///
    /// What to do: install the library or name it, as the message says; for NIXL, run
    /// `kvferry nixl install`.
    #[error("{0}")]
    Library(String),
    /// There is no usable CUDA driver.
    ///
    /// What to do: run on a machine with an NVIDIA GPU and its driver; in a container, make the GPU
    /// visible (`--gpus`). Where there is no GPU, use another transport: `local`, `tcp` or `nixl`.
    #[error("CUDA's driver cannot be used here: {0}")]
    NoDriver(String),
    /// CUDA refused a call, or a kernel failed.
    ///
    /// What to do: look CUDA's error up by its number. After a kernel that failed (an illegal address,
    /// a launch failure) no GPU work of the process goes on: restart it.
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
    ///
    /// What to do: the message names the call and the system's reason; common ones are limits on
    /// open files and processes, an address that is in use, and missing permissions.
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
    #[doc(hidden)]
    pub fn system(what: impl Into<String>, error: &io::Error) -> Self {
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

/// What was wrong with a frame of the data protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidFrame {
    /// The opening bytes are not those of the data protocol.
    ///
    /// What to do: check the port: this one carries data, and something else connected to it, or
    /// something else answers at it.
    #[error("the opening bytes are not those of kvferry's data protocol")]
    Magic,
    /// The peer speaks another version of the protocol.
    ///
    /// What to do: run the same version of kvferry on both sides.
    #[error("the peer speaks version {theirs} of the data protocol, this side version {ours}")]
    Version {
        /// What the peer said.
        theirs: u32,
        /// What this side speaks.
        ours: u32,
    },
    /// A frame names an operation or a verdict that does not exist.
    ///
    /// What to do: run the same version of kvferry on both sides; if they are the same, report it.
    #[error("operation or verdict {0} does not exist")]
    Operation(u8),
    /// Bytes that must be zero are not.
    ///
    /// What to do: run the same version of kvferry on both sides; if they are the same, report it.
    #[error("reserved bytes are not zero")]
    Reserved,
    /// A request names no span of memory where it must, or more of them than a frame may carry.
    ///
    /// What to do: run the same version of kvferry on both sides; if they are the same, report it.
    #[error("{spans} spans of memory in one request, where {fewest} to {most} are allowed")]
    Count {
        /// How many it names.
        spans: u32,
        /// How many it must name.
        fewest: u32,
        /// How many it may name.
        most: u32,
    },
    /// A length is zero, is larger than a frame may carry, or does not add up.
    ///
    /// What to do: run the same version of kvferry on both sides; if they are the same, report it.
    #[error("a length of {0} bytes is too long for its frame or does not add up")]
    Length(u64),
    /// Something on the connection is not what the peer sent: it was changed, repeated, left out or put in.
    ///
    /// What to do: find out what stands between the two engines. A broken network card does this, and so does somebody who
    /// tries to change what is moved. Nothing of it was used.
    #[error(
        "what came is not what the peer sent: something on the way changed, repeated, dropped or added bytes"
    )]
    Changed,
    /// Loops to gather by make no sense.
    ///
    /// What to do: run the same version of kvferry on both sides; if they are the same, report it.
    #[error("loops to gather by make no sense: {0}")]
    Loops(LoopsError),
    /// An answer does not belong to the request it should answer.
    ///
    /// What to do: run the same version of kvferry on both sides; if they are the same, report it.
    #[error("an answer belongs to another request")]
    Answer,
    /// The peer ended the connection in the middle of a frame.
    ///
    /// What to do: see in the peer's log why it ended; a proxy between the two may have cut the
    /// connection.
    #[error("the connection ended inside a frame")]
    Cut,
}
