//! What can go wrong, as data.

use std::io;

use serde::{Deserialize, Serialize};

/// Why one request failed. Other requests and other peers are not affected.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// Its time was up.
    #[error("the deadline passed while it was {phase}")]
    Deadline {
        /// What it was doing.
        phase: String,
    },
    /// The engine to read from cannot be reached, or went away.
    #[error("the engine to read from is gone: {0}")]
    PeerGone(String),
    /// The two sides do not fit, or do not trust each other.
    #[error("refused: {0}")]
    Refused(String),
    /// The engine to read from, or its ranks, have restarted since the request was granted.
    #[error("the engine to read from has restarted since it granted the request")]
    Restarted,
    /// The request's block tables do not fit the engines' groups.
    #[error("the request does not fit: {0}")]
    BadRequest(String),
    /// The transport could not move the bytes.
    #[error("the transport failed: {0}")]
    Transport(String),
}

impl Failure {
    /// One word for each kind, for counters.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Deadline { .. } => "deadline",
            Self::PeerGone(_) => "peer_gone",
            Self::Refused(_) => "refused",
            Self::Restarted => "restarted",
            Self::BadRequest(_) => "bad_request",
            Self::Transport(_) => "transport",
        }
    }

    /// All kinds.
    pub const KINDS: [&'static str; 6] =
        ["deadline", "peer_gone", "refused", "restarted", "bad_request", "transport"];
}

/// Why a connection to a peer cannot be had, or ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// The operating system says so.
    #[error("{what}: {kind}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// What the system said.
        kind: io::ErrorKind,
    },
    /// It takes too long.
    #[error("{0} takes too long")]
    Slow(&'static str),
    /// The peer did not prove that it holds our key.
    #[error(
        "the peer does not hold the same key as this side, or holds none. Give both sides the same \
         key (file or environment)"
    )]
    Untrusted,
    /// TLS does not come about.
    #[error("TLS: {0}")]
    Tls(String),
    /// The peer broke the protocol.
    #[error("the peer broke the protocol: {0}")]
    Misbehaved(Misbehaviour),
    /// The peer speaks another major version.
    #[error(
        "the peer speaks protocol {theirs}, this side {ours}: the major versions must be the same. \
         Install the same release of kvferry on both sides"
    )]
    Version {
        /// What the peer speaks.
        theirs: crate::message::Version,
        /// What this side speaks.
        ours: crate::message::Version,
    },
    /// The peer is too old for what is asked.
    #[error("the peer speaks protocol {theirs}: {what} needs {needed}")]
    TooOld {
        /// What was asked for.
        what: &'static str,
        /// What the two sides agreed on.
        theirs: crate::message::Version,
        /// What is needed.
        needed: crate::message::Version,
    },
    /// The peer says no, and why.
    #[error("the peer refuses: {0}")]
    Refused(String),
    /// The connection was given up on this side.
    #[error("the connection is closed")]
    Closed,
}

/// How a peer broke the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Misbehaviour {
    /// Its first bytes are not those of this protocol.
    #[error("its first bytes are not kvferry's")]
    Magic,
    /// It wants a kind of protection that this side does not offer.
    #[error("it opens the connection in mode {theirs}, this side expects {ours}")]
    Mode {
        /// What it wants.
        theirs: u8,
        /// What this side offers.
        ours: u8,
    },
    /// A message longer than allowed.
    #[error("a message of {0} bytes")]
    TooLong(u64),
    /// A message that does not decode.
    #[error("a message that does not decode")]
    Garbage,
    /// A message that was altered on its way, or replayed.
    #[error("a message that fails authentication")]
    Forged,
    /// An answer to a question that was not asked, or the wrong kind of answer.
    #[error("an answer that does not fit the question")]
    Answer,
}

/// Why the agent cannot do what is asked of it on this side.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option that cannot be.
    #[error("{0}")]
    Options(String),
    /// The key cannot be read or is no key.
    #[error("{0}")]
    Key(String),
    /// Without a key only loopback is served.
    #[error(
        "{0} can be reached from other machines, and there is no key to keep strangers out: give a \
         key, bind to a loopback address, or say 'insecure' if everyone on that network may read \
         and write this engine's memory"
    )]
    NeedsKey(std::net::SocketAddr),
    /// The operating system refuses.
    #[error("{what}: {kind}")]
    Io {
        /// What was being done.
        what: String,
        /// What the system said.
        kind: io::ErrorKind,
    },
    /// The transport refuses.
    #[error("{0}")]
    Transport(#[from] kvferry_transport::Error),
    /// A request of this name is under way.
    #[error("request '{0}' is under way already")]
    Duplicate(String),
    /// The request has a lease.
    #[error(transparent)]
    AlreadyGranted(#[from] crate::lease::AlreadyGranted),
    /// The agent has stopped.
    #[error("the agent has stopped")]
    Stopped,
    /// A peer.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// The cards of an engine's ranks do not belong together.
    #[error("{0}")]
    Cards(String),
}
