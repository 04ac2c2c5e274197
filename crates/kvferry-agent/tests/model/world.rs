//! What there is: one prefill engine with one block for the request, two decode ranks with one block each, and
//! every message that was ever sent.

use std::collections::BTreeSet;
use std::time::Duration;

use kvferry_agent::follow::{Follower, Part};
use kvferry_agent::lease::{Answer, LeaseKey, Leases};
use kvferry_agent::life::Life;
use kvferry_agent::{Fingerprint, Grant, Origin};

use crate::shared::Shared;

pub(crate) const RANKS: usize = 2;
pub(crate) const REQUEST: &str = "request";
pub(crate) const NAME: &str = "name";
pub(crate) const SCRAP: u8 = 0;
/// What a network makes of a word.
pub(crate) const CORRUPT: u8 = u8::MAX - 1;
/// What P's other blocks hold: another user's prompt.
pub(crate) const FOREIGN: u8 = u8::MAX;

/// Where P computes the request, unless it has moved without a word.
pub(crate) const HOME: u8 = 0;
/// Where it has moved to then.
pub(crate) const AWAY: u8 = 1;
/// Where it never is.
pub(crate) const ELSEWHERE: u8 = 2;

/// What is sent between P and the ranks. How far P is has rules of its own: see [`Load::answers`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Message {
    Extend {
        grant: u8,
    },
    Confirm {
        grant: u8,
        rank: u8,
        attempt: u8,
        read_by: Fingerprint,
        swapped: bool,
    },
    Answer {
        rank: u8,
        attempt: u8,
        answer: Answer,
    },
    /// What is in P's block that this lease is about?
    Ask {
        grant: u8,
        rank: u8,
        attempt: u8,
        read_by: Fingerprint,
    },
    /// `None`: the lease is not held.
    Digest {
        rank: u8,
        attempt: u8,
        words: Option<[u8; 2]>,
    },
    Abandon {
        grant: u8,
    },
}

/// What P says of a growing lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Told {
    pub(crate) grant: u8,
    pub(crate) epoch: u8,
    pub(crate) tokens: u8,
    /// Where they are.
    pub(crate) place: u8,
    /// The step in flight; 0: none is known.
    pub(crate) step: u8,
    pub(crate) sealed: bool,
}

/// That a layer is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Word {
    /// The life of P, by the last grant before it.
    pub(crate) life: u8,
    pub(crate) step: u8,
    pub(crate) layer: u8,
}

/// One decode rank: a process with one block.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rank {
    /// Attempts started, over all its lives.
    pub(crate) attempts: u8,
    pub(crate) load: Option<Load>,
    /// A read that the transport has not settled: it can land.
    pub(crate) reading: Option<Reading>,
    /// The two words of its block, and for which attempt it is kept.
    pub(crate) words: [u8; 2],
    pub(crate) kept_for: Option<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Load {
    pub(crate) life: Life,
    /// The ticket that it has; 0: only the name.
    pub(crate) grant: u8,
    pub(crate) attempt: u8,
    /// A client has sent its ticket with another prompt.
    pub(crate) swapped: bool,
    pub(crate) follower: Follower,
    /// As soon as it knows P, it asks how far P is.
    pub(crate) asked: bool,
    /// What P has answered, and can be heard; `None`: the lease is not held. An answer comes on the
    /// connection that P was asked on: late or not at all, but not twice. In a world where it may come twice,
    /// a question may, too, and P answers it with what is so by then.
    pub(crate) answers: BTreeSet<Option<Told>>,
    /// What it reads now.
    pub(crate) part: Option<Part>,
    /// The step in flight that it has heard of.
    pub(crate) step: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Reading {
    pub(crate) attempt: u8,
    /// Where it reads.
    pub(crate) place: u8,
    /// The words that it reads, and which of them have landed.
    pub(crate) words: [bool; 2],
    pub(crate) landed: [bool; 2],
}

impl Reading {
    pub(crate) fn whole(&self) -> bool {
        self.words == self.landed
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) leases: Shared<Leases>,
    pub(crate) now: u8,
    /// Leases granted, over all lives of P; also the value that P's block then holds.
    pub(crate) grants: u8,
    /// Grants up to this one are of an earlier life of P.
    pub(crate) born: u8,
    /// P's block: free, or of a grant.
    pub(crate) block: Option<u8>,
    /// Where that is, and what it holds.
    pub(crate) place: u8,
    pub(crate) words: [u8; 2],
    /// How often P may still start the request over, while it computes it.
    pub(crate) computing: Option<u8>,
    /// The last step that P has begun in this life, where it speaks of layers, and all that was ever said.
    pub(crate) step: u8,
    pub(crate) said: Shared<BTreeSet<Word>>,
    pub(crate) ranks: [Shared<Rank>; RANKS],
    pub(crate) sent: Shared<BTreeSet<Message>>,
}

pub(crate) fn at(tick: u8) -> Duration {
    Duration::from_secs(u64::from(tick))
}

pub(crate) fn key(grant: u8) -> LeaseKey {
    LeaseKey { request: REQUEST.to_owned(), nonce: u64::from(grant) }
}

/// A table without leases, as P begins each of its lives.
pub(crate) fn no_leases() -> Shared<Leases> {
    Shared::new(Leases::new(at(1), at(2)))
}

/// What P has computed, or what a client makes of it.
pub(crate) fn origin(swapped: bool) -> Origin {
    Origin([u8::from(swapped); 16])
}

/// Where the blocks of a grant are; while there are none, that is all the same.
pub(crate) fn place_of(grant: &Grant) -> u8 {
    let first = grant.tables.first().and_then(|table| table.blocks.first());
    first.map_or(HOME, |block| (block / 2) as u8)
}

impl World {
    pub(crate) fn new() -> Self {
        let rank =
            Rank { attempts: 0, load: None, reading: None, words: [SCRAP; 2], kept_for: None };
        let rank = Shared::new(rank);
        Self {
            leases: no_leases(),
            now: 0,
            grants: 0,
            born: 0,
            block: None,
            place: HOME,
            words: [SCRAP; 2],
            computing: None,
            step: 0,
            said: Shared::new(BTreeSet::new()),
            ranks: [rank.clone(), rank],
            sent: Shared::new(BTreeSet::new()),
        }
    }

    /// Sends a message, unless nobody will ever listen to it: every such message would double the worlds.
    pub(crate) fn send(&mut self, message: Message) {
        if self.is_heard(&message) {
            self.sent.insert(message);
        }
    }

    /// Forgets what nobody will ever listen to any more.
    pub(crate) fn tidy(&mut self) {
        if !self.sent.iter().all(|message| self.is_heard(message)) {
            let mut sent = self.sent.clone();
            sent.retain(|message| self.is_heard(message));
            self.sent = sent;
        }
    }

    /// Whether a message can have any effect. Attempts and lives do not come back.
    fn is_heard(&self, message: &Message) -> bool {
        let waits = |rank: &u8, attempt: &u8| {
            let load = self.ranks.get(usize::from(*rank)).and_then(|rank| rank.load.as_ref());
            load.is_some_and(|load| load.attempt == *attempt && !load.life.stage().is_end())
        };
        match message {
            Message::Extend { grant } | Message::Abandon { grant } => *grant > self.born,
            Message::Confirm { grant, rank, attempt, .. } => {
                *grant > self.born || waits(rank, attempt)
            }
            Message::Answer { rank, attempt, .. }
            | Message::Ask { rank, attempt, .. }
            | Message::Digest { rank, attempt, .. } => waits(rank, attempt),
        }
    }
}
