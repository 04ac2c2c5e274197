//! What the demo's processes say to each other: one JSON object a line.

use kvferry_agent::{BlockTable, Grant, Load, Outcome, Ticket, Timings};
use serde::{Deserialize, Serialize};

/// The argument with which a process of a demo is started.
pub const PROCESS: &str = "demo-process";

/// How a rank's memory is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportKind {
    /// Another process's memory, directly.
    Local,
    /// Sockets.
    Tcp,
    /// NVIDIA's transfer library.
    Nixl,
}

/// The first line to every process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) model: String,
    pub(crate) layers: u32,
    pub(crate) topology: String,
    pub(crate) engine: String,
    /// `None`: the engine's scheduler.
    pub(crate) rank: Option<u32>,
    pub(crate) transport: TransportKind,
    pub(crate) key: String,
    pub(crate) term_ms: u64,
    pub(crate) handshake_ms: u64,
    /// The fraction of loads that are audited.
    pub(crate) audit: f64,
}

/// To a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// A source rank: what prefill leaves behind.
    Fill { request: String, seed: u64, tokens: u64, tables: Vec<BlockTable> },
    /// A source rank: the blocks are used for something else.
    Scrub { request: String, tables: Vec<BlockTable> },
    /// A destination rank.
    Load { load: Load, seed: u64 },
    /// A destination rank.
    Abort { request: String },
    /// A destination rank: is anything else changed?
    Audit,
    /// A scheduler.
    Publish { cards: Vec<Vec<u8>> },
    /// A scheduler.
    Grant { request: String, grant: Grant },
    /// A scheduler.
    Hold { ticket: Ticket, patience_ms: u64 },
    /// A scheduler.
    Settle { ticket: Ticket },
    /// A scheduler.
    Abandon { ticket: Ticket },
}

/// From a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// It cannot start.
    Problem(String),
    Card(Vec<u8>),
    Filled {
        request: String,
    },
    Scrubbed {
        request: String,
    },
    Ended(Box<End>),
    Settled {
        request: String,
    },
    Audited {
        wrong: u64,
        bytes: u64,
    },
    Address(String),
    Published,
    Granted {
        request: String,
        ticket: Option<Ticket>,
    },
    Released {
        request: String,
        why: String,
    },
    Lost {
        request: String,
    },
}

/// How a request ended on one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct End {
    pub(crate) request: String,
    pub(crate) outcome: Outcome,
    pub(crate) quarantined: bool,
    pub(crate) bytes: u64,
    pub(crate) copies: u64,
    pub(crate) phases: Timings,
    /// Of a request that was done: bytes of its blocks that are not what they should be.
    pub(crate) wrong: u64,
    /// Bytes that were compared.
    pub(crate) compared: u64,
}
