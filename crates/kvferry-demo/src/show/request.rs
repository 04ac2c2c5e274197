//! A request of the show.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kvferry_agent::{Grant, Ticket};
use kvferry_plan::BlockTable;

use crate::crew::MemberId;
use crate::words::End;

/// A request on its way through the demo.
pub(super) struct Request {
    pub(super) name: String,
    pub(super) seed: u64,
    pub(super) tokens: u64,
    pub(super) source: Vec<BlockTable>,
    pub(super) source_life: usize,
    /// Whether P's blocks are still taken, and by which ranks they are being scrubbed.
    pub(super) kept: bool,
    pub(super) scrubbing: BTreeSet<MemberId>,
    pub(super) decode: usize,
    pub(super) decode_life: usize,
    pub(super) destination: Vec<BlockTable>,
    pub(super) cached: Vec<u64>,
    pub(super) ticket: Option<Ticket>,
    pub(super) fate: Fate,
    pub(super) stage: Stage,
}

impl Request {
    /// What P lets be read of it.
    pub(super) fn grant(&self) -> Grant {
        Grant { epoch: 0, tokens: self.tokens, tables: self.source.clone() }
    }
}

/// What the dice have in store for it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Served,
    /// Aborted while it waits, without having been loaded.
    DroppedInQueue,
    /// Aborted so long after its load began.
    AbortedAfter(Duration),
    /// Left alone until its lease has expired.
    Forgotten,
}

/// How far it has come.
pub(super) enum Stage {
    Filling(BTreeSet<MemberId>),
    Granting,
    Queued { until: Instant },
    Loading { waits: BTreeSet<MemberId>, ends: Vec<End>, abort_at: Option<Instant> },
    Ended,
}
