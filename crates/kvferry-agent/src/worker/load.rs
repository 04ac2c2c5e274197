//! A request to load, and how its load ended: what an engine gives to a worker, and gets back.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kvferry_plan::lowering::Way;
use kvferry_plan::{Area, BlockTable};
use serde::{Deserialize, Serialize};

use crate::carrier::Chosen;
use crate::metrics::Timings;
use crate::rules::failure::Failure;
use crate::rules::grant::{Grant, Origin};
use crate::rules::lease::Loss;
use crate::rules::life::Stage;
use crate::wire::ticket::Ticket;

/// A request to load: [`new`](Self::new), and what differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
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
    /// Whether to report what is left of the request's own blocks, for engines that zero it.
    pub rest: bool,
}

impl Load {
    /// So many tokens of what a ticket names, to the blocks of these tables, one for every group of this engine. It holds
    /// none of them yet, takes a minute at most, and asks the source engine where they are.
    pub fn new(
        request: impl Into<String>,
        ticket: Ticket,
        tokens: u64,
        destination: Vec<BlockTable>,
    ) -> Self {
        const PATIENCE: Duration = Duration::from_secs(60);
        Self {
            request: request.into(),
            ticket,
            grant: None,
            origin: None,
            tokens,
            cached: vec![0; destination.len()],
            destination,
            deadline: PATIENCE,
            patience: PATIENCE,
            rest: false,
        }
    }

    /// With [`grant`](Self::grant): what the ticket came with.
    pub fn granted(mut self, grant: impl Into<Option<Grant>>) -> Self {
        self.grant = grant.into();
        self
    }

    /// With [`cached`](Self::cached): what this engine holds already.
    pub fn cached(mut self, cached: Vec<u64>) -> Self {
        self.cached = cached;
        self
    }

    /// With [`origin`](Self::origin): the prompt that the blocks are wanted for.
    pub fn origin(mut self, origin: impl Into<Option<Origin>>) -> Self {
        self.origin = origin.into();
        self
    }

    /// With other times than a minute: [`deadline`](Self::deadline) and [`patience`](Self::patience).
    pub fn within(mut self, deadline: Duration, patience: Duration) -> Self {
        (self.deadline, self.patience) = (deadline, patience);
        self
    }
}

/// What is read at once: all of a load, or what has been computed since the last time. Block tables are shared by all
/// parts of a load.
#[derive(Clone, Debug)]
pub(super) struct Portion {
    pub(super) load: Arc<Load>,
    /// What is granted at this moment.
    pub(super) grant: Arc<Grant>,
    /// How many tokens are there to be read, granted or not: nothing is used before it is.
    pub(super) written: u64,
    /// How far to read.
    pub(super) tokens: u64,
    /// For every group: from where.
    pub(super) cached: Vec<u64>,
    /// Whether what is left of the request's own blocks is wanted, and may be overwritten.
    pub(super) rest: bool,
}

/// What a worker tells its engine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "nearly all of them are endings")]
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
    /// When each stage was over.
    pub moments: Box<Moments>,
    /// How it was read.
    pub lowerings: Lowerings,
    /// By what, from each rank of the other engine that something is read from; none where it did not get so far.
    pub read_by: Arc<[ReadBy]>,
    /// What is left of the request's own blocks, where it was asked for.
    pub rest: Vec<Area>,
    /// What the source engine has [enclosed](crate::Scheduler::enclose), where it was followed. As good as the blocks.
    pub enclosed: Vec<u8>,
}

/// The way to one rank of another engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadBy {
    /// Its number.
    pub rank: u32,
    /// What moves its bytes, and why that and nothing better.
    pub chosen: Chosen,
}

/// When the stages of a load were over: what [`Timings`] measures, on a line of time. A stage that never
/// came to a good end has no moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moments {
    /// When the load began, by the wall clock: it is laid beside what other processes say.
    pub began: SystemTime,
    /// Since then: the engine to read from was known.
    pub known: Option<Duration>,
    /// It had waited for its turn.
    pub admitted: Option<Duration>,
    /// The first read was handed out.
    pub reads: Option<Duration>,
    /// The last byte had come.
    pub arrived: Option<Duration>,
    /// What had come was compared with what the source holds, or that was not due.
    pub audited: Option<Duration>,
    /// The source had answered whether the lease was held.
    pub confirmed: Option<Duration>,
    /// How it ended was reported.
    pub ended: Option<Duration>,
}

impl Moments {
    pub(super) fn now() -> Self {
        Self {
            began: SystemTime::now(),
            known: None,
            admitted: None,
            reads: None,
            arrived: None,
            audited: None,
            confirmed: None,
            ended: None,
        }
    }

    /// All of them by name, in order, since the load began.
    pub fn named(&self) -> [(&'static str, Option<Duration>); 7] {
        [
            ("known", self.known),
            ("admitted", self.admitted),
            ("reads", self.reads),
            ("arrived", self.arrived),
            ("audited", self.audited),
            ("confirmed", self.confirmed),
            ("ended", self.ended),
        ]
    }
}

/// The lowerings that a load was read by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lowerings([bool; Way::ALL.len()]);

impl Lowerings {
    pub(super) fn add(&mut self, way: Way) {
        self.0[way as usize] = true;
    }

    pub(super) fn merge(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(one, other)| *one |= other);
    }

    /// Their names.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + use<> {
        Way::ALL.into_iter().zip(self.0).filter_map(|(way, used)| used.then_some(way.name()))
    }
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
