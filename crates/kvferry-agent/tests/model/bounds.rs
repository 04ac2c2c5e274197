//! How large a world is, what may happen in it, and which safeguard it lacks.

use std::sync::Arc;

use kvferry_agent::follow::{Follower, Pace};
use kvferry_agent::{BlockTable, Grant};

use crate::world::{ELSEWHERE, HOME, RANKS};

/// A safeguard that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// D uses what it read without asking.
    NoConfirmation,
    /// P counts confirmations, whoever sends them.
    CountByNumber,
    /// P does not look at which life of a request a message is for.
    NoNonce,
    /// P gives the answer to one attempt to another.
    NoAttempt,
    /// D hands blocks back when it has asked for its reads to stop.
    HandBackOnCancel,
    /// P never ends a lease by itself.
    NoExpiry,
    /// A lease that grows expires like any other, and its block is free.
    ExpiresWhileItGrows,
    /// A restarted P answers for leases of its earlier life.
    NoIncarnation,
    /// D does not say by which tables it read.
    NoFingerprint,
    /// D does not say what it reads for.
    NoOrigin,
    /// A client that guesses tables can guess their epoch, too.
    EpochsCanBeGuessed,
    /// P does not tell followers that it has started over.
    NoEpoch,
    /// D keeps what it read before P started over.
    KeepsOldEpoch,
    /// D takes a late answer, of an epoch that is over, for one of the epoch that it knows.
    TakesOldForNew,
    /// P grants whatever its engine says last, and not only what goes on from what it granted before.
    NoGrowthRuleOfP,
    /// D goes on with whatever P says last, and keeps what it has read.
    NoGrowthRuleOfD,
    /// Neither of them compares what is granted with what was granted before.
    NoGrowthRule,
    /// D reads on while what it asked for last may still land.
    ReadsOverLateWords,
    /// P lets be read, and confirms, as if what is complete so far were all.
    NoSeal,
    /// D asks by the name even when it knows which lease it has begun to read.
    FollowsTheName,
    /// D reads what P is about to complete before it hears that it is written.
    BelievesThePromise,
    /// P says that a layer is written before it is.
    SpeaksTooEarly,
    /// D does not look at which step a word is about.
    NoStep,
    /// D does not look at which life of P a word is about.
    NoLife,
    /// D does not compare what it has with what P holds.
    NoAudit,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) grants: u8,
    /// For each rank.
    pub(crate) attempts: [u8; RANKS],
    pub(crate) ticks: u8,
    /// Whether P may restart, once.
    pub(crate) restart: bool,
    /// Whether a client may change tables on their way to D, or add some.
    pub(crate) forgery: bool,
    /// Whether a client may send a ticket with another prompt.
    pub(crate) swaps: bool,
    /// Whether a word may arrive as another; if so, every load is audited.
    pub(crate) corruption: bool,
    /// P computes word by word, and starts over at most this often; `None`: all at once.
    pub(crate) growth: Option<u8>,
    /// If so, its words are the layers of one token, and it speaks of each.
    pub(crate) layers: bool,
    /// Whether P's engine may start over in other blocks, once, without saying so.
    pub(crate) unsaid: bool,
    /// Whether what P says to followers may come twice, late and in any order.
    pub(crate) repeats: bool,
    /// Whether ranks may know nothing but the name.
    pub(crate) names: bool,
    pub(crate) fault: Fault,
}

impl Bounds {
    /// One lease that both ranks read once, in a world where nothing but messages goes wrong.
    pub(crate) const ONE_LEASE: Self = Self {
        grants: 1,
        attempts: [1, 1],
        ticks: 0,
        restart: false,
        forgery: false,
        swaps: false,
        corruption: false,
        growth: None,
        layers: false,
        unsaid: false,
        repeats: false,
        names: false,
        fault: Fault::None,
    };

    /// The same for one rank.
    pub(crate) const ONE_RANK: Self = Self { attempts: [1, 0], ..Self::ONE_LEASE };

    /// How many tokens there are: two of a word each, or one with two layers.
    pub(crate) fn tokens(&self) -> u8 {
        if self.layers { 1 } else { 2 }
    }

    /// What is granted when so many tokens are complete, at one of P's places. A token of several layers
    /// has a block before it is complete.
    pub(crate) fn grant(&self, place: u8, epoch: u8, tokens: u8) -> Grant {
        let first = u32::from(place) * 2;
        let blocks = if self.layers { 1 } else { tokens.into() };
        let table = BlockTable { first: 0, blocks: (first..first + blocks).collect() };
        Grant { epoch: epoch.into(), tokens: tokens.into(), tables: vec![table] }
    }

    /// What a client makes of that: all of it, in blocks of another user.
    pub(crate) fn forged(&self) -> Grant {
        self.grant(ELSEWHERE, 0, self.tokens())
    }

    /// The first epoch of a lease that grows.
    pub(crate) fn first_epoch(&self) -> u8 {
        if self.fault == Fault::EpochsCanBeGuessed { 0 } else { 100 }
    }

    /// What is granted in the end.
    pub(crate) fn all(&self, epoch: u8) -> Grant {
        self.grant(HOME, epoch, self.tokens())
    }

    /// What a rank knows at first: what came with its ticket.
    pub(crate) fn follower(&self, grant: Option<Grant>) -> Follower {
        let pace = Pace { from: 0, to: self.tokens().into(), step: 1 };
        let mut follower = Follower::of(grant.map(Arc::new), pace);
        if self.layers {
            follower.by_layer(2);
        }
        follower
    }

    /// Whether P lets its engine go back.
    pub(crate) fn p_goes_back(&self) -> bool {
        matches!(self.fault, Fault::NoGrowthRuleOfP | Fault::NoGrowthRule)
    }

    /// Whether D goes back with P.
    pub(crate) fn d_goes_back(&self) -> bool {
        matches!(self.fault, Fault::NoGrowthRuleOfD | Fault::NoGrowthRule)
    }
}
