//! Why a request can fail.

use serde::{Deserialize, Serialize};

/// Why one request failed. Other requests and other peers are not affected.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// Its time was up.
    ///
    /// What to do: look at the stage that it names. If it is "waiting", let more requests read at
    /// once or start fewer; otherwise check the network and the other engine, or give requests more
    /// time.
    #[error("the deadline passed while it was {stage}")]
    Deadline {
        /// What it was doing.
        stage: String,
    },
    /// The engine to read from cannot be reached, or went away.
    ///
    /// What to do: check that the other engine runs, and that its address and ports can be reached
    /// from this machine.
    #[error("the engine to read from is gone: {0}")]
    PeerGone(String),
    /// The engine to read from contradicts what it said before, or answers what was not asked.
    ///
    /// What to do: the request is safe, nothing that was read is used. Report it, with the versions of both
    /// sides, unless something between the engines changes what they say.
    #[error("the engine to read from is not to be believed: {0}")]
    PeerMisbehaved(String),
    /// The two sides do not fit, or do not trust each other.
    ///
    /// What to do: make the two sides agree in what the message names; trying again does not help.
    #[error("refused: {0}")]
    Refused(String),
    /// The engine to read from, or its ranks, have restarted since the request was granted.
    ///
    /// What to do: prefill the request again. If it happens often, find out why that engine restarts.
    #[error("the engine to read from has restarted since it granted the request")]
    Restarted,
    /// The request's block tables do not fit the engines' groups.
    ///
    /// What to do: pass on the block tables exactly as the other engine gave them, and check that
    /// the destination's tables have room for all tokens.
    #[error("the request does not fit: {0}")]
    BadRequest(String),
    /// The transport could not move the bytes.
    ///
    /// What to do: look up the transport's own message, and check the network or device that it names.
    #[error("the transport failed: {0}")]
    Transport(String),
    /// What landed is not what the source holds: an audit found different digests. The message says in
    /// which state, read from which rank, and on which side to look.
    ///
    /// What to do: the request is safe, its bytes are not used. If it happens again, take the machine,
    /// the network card or the driver that the affected ranks share out of service; after a few
    /// mismatches the pair is refused by itself.
    #[error("an audit found other bytes than the source holds: {0}")]
    Mismatch(String),
    /// A part of this engine's own agent broke while it worked for the request; the message names it. The log has the
    /// panic itself.
    ///
    /// What to do: report it, with the lines of the log before it. The request is safe, and others go on; restart the
    /// engine if it happens again.
    #[error("a part of this engine's agent broke: {0}")]
    Internal(String),
}

impl Failure {
    /// All kinds.
    pub const KINDS: [&'static str; 9] = [
        "deadline",
        "peer_gone",
        "refused",
        "restarted",
        "bad_request",
        "transport",
        "mismatch",
        "peer_misbehaved",
        "internal",
    ];

    /// What each of the kinds means, in their order.
    pub(crate) const MEANINGS: [&'static str; Self::KINDS.len()] = [
        "Its time was up.",
        "The engine to read from could not be reached, or went away.",
        "The two sides do not fit, or do not trust each other.",
        "The engine to read from has restarted since it granted the request.",
        "Its block tables do not fit the engines' groups.",
        "The transport could not move the bytes.",
        "An audit found other bytes than the source holds.",
        "The engine to read from contradicts what it said before, or answers what was not asked.",
        "A part of this engine's own agent broke.",
    ];

    /// One word for each kind, for counters.
    pub fn kind(&self) -> &'static str {
        Self::KINDS[self.number()]
    }

    /// Its place among the kinds.
    pub(crate) fn number(&self) -> usize {
        match self {
            Self::Deadline { .. } => 0,
            Self::PeerGone(_) => 1,
            Self::Refused(_) => 2,
            Self::Restarted => 3,
            Self::BadRequest(_) => 4,
            Self::Transport(_) => 5,
            Self::Mismatch(_) => 6,
            Self::PeerMisbehaved(_) => 7,
            Self::Internal(_) => 8,
        }
    }
}
