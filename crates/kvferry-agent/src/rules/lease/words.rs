//! What is said of leases: their names, who reads them, how they end, and why they do not grow.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::rules::grant::{InFlight, Origin};

/// Names one lease. The nonce differs for every lease ever granted, so that a late or repeated
/// message for an earlier life of a request cannot touch a later one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LeaseKey {
    /// The request, as the engine names it.
    pub request: String,
    /// Which lease of that request.
    pub nonce: u64,
}

impl fmt::Display for LeaseKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{:016x}", self.request, self.nonce)
    }
}

/// Who reads a request: one rank of one engine, in one attempt.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Consumer {
    /// The engine.
    pub engine: String,
    /// Which of its ranks.
    pub rank: u32,
    /// How many ranks it has: the lease is done when each of them has confirmed.
    pub ranks: u32,
    /// Drawn anew whenever the rank starts to read: an answer to one attempt says nothing about the
    /// bytes of another.
    pub attempt: u64,
}

/// What P answers to a confirmation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Answer {
    /// The blocks were kept until now: what was read before the question was asked is good.
    Held,
    /// They were not, or nobody knows any more: what was read must not be used.
    NotHeld(Loss),
}

/// Why a lease is not held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Loss {
    /// No such lease is known: it never was, or it ended long ago.
    Unknown,
    /// It ended.
    Ended(Ended),
    /// The engine that granted it has restarted, or its ranks have.
    Restarted,
    /// It is held, but for other blocks or tokens than those that were read.
    NotGranted,
    /// There is none yet, and there will be none: the engine is about to go.
    Draining,
    /// It is held, and these are its blocks, but they were computed from something else than what the
    /// reader has.
    OtherOrigin {
        /// What they were computed from.
        granted: Option<Origin>,
        /// What the reader has.
        wanted: Option<Origin>,
    },
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("no such lease is known"),
            Self::Ended(ended) => write!(f, "the lease ended: {ended}"),
            Self::Restarted => f.write_str("the engine has restarted since it granted the lease"),
            Self::NotGranted => f.write_str(
                "the block tables that were read are not those that the engine granted: a router or a \
                 client has changed them",
            ),
            Self::Draining => {
                f.write_str("the engine is being drained, and hands over nothing new")
            }
            Self::OtherOrigin { granted, wanted } => {
                let said = |origin: &Option<Origin>| match origin {
                    Some(origin) => format!("{origin:?}"),
                    None => "nothing that was named".to_owned(),
                };
                write!(
                    f,
                    "the blocks were computed from another prompt: from {}, but this request is {}. Send \
                     the same prompt, adapter, cache salt and media to both engines, and each answer's \
                     parameters with the request that they are for",
                    said(granted),
                    said(wanted)
                )
            }
        }
    }
}

/// How a lease ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Ended {
    /// Every rank of the reading engine has confirmed.
    Confirmed,
    /// The reader gave it up.
    Abandoned,
    /// Nobody extended it in time.
    Expired,
    /// The engine that granted it took it back.
    Revoked,
}

impl Ended {
    /// All of them, in the order of declaration.
    pub const ALL: [Self; 4] = [Self::Confirmed, Self::Abandoned, Self::Expired, Self::Revoked];

    /// As a word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Confirmed => "confirmed",
            Self::Abandoned => "abandoned",
            Self::Expired => "expired",
            Self::Revoked => "revoked",
        }
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The blocks of a request are the engine's again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Released {
    /// The request.
    pub request: String,
    /// Why.
    pub why: Ended,
    /// How long its blocks were kept.
    pub after: Duration,
}

/// A request that has a lease already.
///
/// What to do: revoke that lease, or wait for its end, before granting another.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request '{0}' has a lease already")]
pub struct AlreadyGranted(pub String);

/// Why a lease does not grow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotGrown {
    /// There is none: it never began, was sealed, or was taken back.
    ///
    /// What to do: begin a lease before it grows, and stop when it has been sealed.
    #[error("request '{0}' has no lease that grows")]
    NoLease(String),
    /// Who reads it has given it up while it grew.
    ///
    /// What to do: stop computing the request, or free its blocks as soon as it ends: nobody reads them.
    #[error("request '{0}' was given up by who reads it, while its lease grew")]
    GivenUp(String),
    /// What was granted may have been read: it cannot become anything else within an epoch.
    ///
    /// What to do: append to the tables that were granted; where the engine starts the request over, say
    /// so first.
    #[error(
        "request '{request}' was granted {before} tokens; a grant of {after} with other tables does not go on from there"
    )]
    Changed {
        /// The request.
        request: String,
        /// Tokens granted so far.
        before: u64,
        /// Tokens of the new grant.
        after: u64,
    },
    /// Steps in flight that do not go on from what is complete, or from each other.
    ///
    /// What to do: number the engine's steps in the order in which they run, and name those that bring the
    /// request further, in that order.
    #[error(
        "request '{request}': step {} in flight, to {} tokens, does not go on from step {}, to {} tokens",
        step.step, step.tokens, before.step, before.tokens
    )]
    StepsDoNotRise {
        /// The request.
        request: String,
        /// The step.
        step: InFlight,
        /// The one before it, or what is complete (step 0).
        before: InFlight,
    },
    /// More is to be given with the blocks than followers take.
    ///
    /// What to do: enclose at most 16 KiB: what else the other engine needs belongs into its blocks.
    #[error("request '{request}': {bytes} bytes are to be enclosed, and 16384 are the most")]
    TooMuchEnclosed {
        /// The request.
        request: String,
        /// Bytes.
        bytes: usize,
    },
}
