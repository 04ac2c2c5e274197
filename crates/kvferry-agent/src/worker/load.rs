//! A request to load, and how its load ended: what an engine gives to a worker, and gets back.

use std::time::Duration;

use kvferry_plan::{Area, BlockTable};
use serde::{Deserialize, Serialize};

use crate::metrics::Timings;
use crate::rules::failure::Failure;
use crate::rules::grant::{Grant, Origin};
use crate::rules::lease::Loss;
use crate::rules::life::Stage;
use crate::wire::message::Ticket;

/// A request to load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// The name that this engine gives to it.
    pub request: String,
    /// Where its blocks are.
    pub ticket: Ticket,
    /// What the ticket came with: the tokens that the source engine computed, and its block tables. They
    /// may have passed through a router and a client, so the source engine is asked whether they are
    /// what it granted before anything that was read by them is used.
    ///
    /// `None`: the source engine is asked for them. It may still be computing the request; what is
    /// complete is read meanwhile.
    pub grant: Option<Grant>,
    /// What this engine wants the blocks for: they are not used if the source engine has computed them from
    /// anything else. The ticket, too, may be another request's.
    pub origin: Option<Origin>,
    /// How many tokens to read, at most as many as are granted in the end.
    pub tokens: u64,
    /// For every group of this engine: how many of the first tokens it holds already.
    pub cached: Vec<u64>,
    /// This engine's block tables, one for every group.
    pub destination: Vec<BlockTable>,
    /// How long it may take in all; where the source engine is followed, from when it last had something
    /// new to give.
    pub deadline: Duration,
    /// How long to wait, where the source engine is followed, while it has nothing new to give.
    pub patience: Duration,
    /// Whether to report what is left of the request's own blocks, for engines that zero it. If so,
    /// they must: the last blocks may be read whole, which takes fewer copies.
    pub rest: bool,
}

/// What is read at once: all of a load, or what has been computed since the last time.
#[derive(Clone, Debug)]
pub(super) struct Portion {
    /// What is granted at this moment.
    pub(super) grant: Grant,
    /// How far to read.
    pub(super) tokens: u64,
    /// For every group: from where.
    pub(super) cached: Vec<u64>,
    /// What the engine held of each group before the load: the blocks after it are the request's own.
    pub(super) before: Vec<u64>,
    pub(super) destination: Vec<BlockTable>,
    /// Whether what is left of the request's own blocks is wanted, and may be overwritten.
    pub(super) rest: bool,
}

/// What a worker tells its engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A request has ended.
    Ended(Ending),
    /// Nothing will land any more in the blocks of a request that ended in quarantine.
    Settled {
        /// The request.
        request: String,
    },
}

/// How a request ended on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// The request.
    pub request: String,
    /// How.
    pub outcome: Outcome,
    /// Whether bytes may still land in its blocks: if so, they must not be put to another use before
    /// the [`Notice::Settled`] that follows.
    pub quarantined: bool,
    /// Bytes read.
    pub bytes: u64,
    /// Copies that took.
    pub copies: u64,
    /// Where the time went.
    pub timings: Timings,
    /// What is left of the request's own blocks, where it was asked for.
    pub rest: Vec<Area>,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// All bytes are here, and good.
    Done,
    /// Something broke: the blocks' content is undefined.
    Failed(Failure),
    /// The engine did not want it any more.
    Aborted,
    /// The lease did not hold: the bytes must not be used.
    Expired(Loss),
}

impl Outcome {
    pub(super) fn of(stage: &Stage) -> Self {
        match stage {
            Stage::Done => Self::Done,
            Stage::Failed(failure) => Self::Failed(failure.clone()),
            Stage::Expired(loss) => Self::Expired(*loss),
            _ => Self::Aborted,
        }
    }
}
