//! What the ranks of an engine are asked to do with what a lease lets be read.
//!
//! A reader asks the scheduler of the engine, which knows what was granted. The scheduler hands the task
//! to the rank together with the grant, so that a rank never has to believe a reader about blocks.

use kvferry_digest::{Digest, Key, Part};
use serde::{Deserialize, Serialize};

use crate::rules::lease::Loss;

/// What a rank is asked to do. Everything in it is in logical words: which blocks it is about is up to
/// the lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Task {
    /// Compute the digest of each of these parts of the request.
    Digest { key: Key, parts: Vec<Part> },
    /// Say which states were written in a step, beyond so many: as soon as there are more.
    Written { step: u64, known: u32 },
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum TaskReply {
    /// One for each part.
    Digests(Vec<Digest>),
    /// The states that were written beyond those that are known, in the order in which they were; where the
    /// step is over, that is all of them, whether they are named or not.
    Written { states: Vec<String>, over: bool },
    /// The lease does not hold, or not for what the reader has read by.
    NotHeld(Loss),
    /// The task makes no sense for what was granted, and why.
    Refused(String),
    /// The rank cannot do such a thing: it has no address, or no means to look at its memory.
    Unable(String),
    /// The rank did not answer in time, or is gone.
    Gone(String),
}

/// What opens the door of a worker to the scheduler of its own engine, and to nobody else.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Token(pub(crate) [u8; 16]);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}
