//! What agents say to each other.
//!
//! A connection opens with a [`Hello`] and a [`Welcome`], whose first four bytes (major and minor
//! version) have the same meaning in every version to come. After them the side that connected asks,
//! and the other answers; questions carry a number, so that many can be under way.
//!
//! Minor versions add: fields at the end of a hello or welcome, which older readers skip, and
//! questions, which newer sides do not put to older ones.

use std::fmt;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use kvferry_plan::BlockTable;

use super::task::{Task, TaskReply, Token};
use super::version::Version;
use crate::error::{Misbehaviour, PeerError};
use crate::rules::grant::{Fingerprint, Grant, InFlight, Origin};
use crate::rules::lease::{Answer, Consumer, Frontier, LeaseKey};

/// Names one life of an engine. It changes when the engine restarts, and when its ranks publish new
/// memory: whatever was said about an earlier life is void.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(#[serde(with = "hex")] pub u64);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// What P hands to the router, and the router to D: where a request's blocks are, and under which
/// lease.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ticket {
    /// The engine that holds the blocks.
    pub engine: String,
    /// Where it listens: `host:port`.
    pub address: String,
    /// Its life that granted the lease.
    pub incarnation: Incarnation,
    /// The request.
    pub request: String,
    /// Which lease of the request.
    #[serde(with = "hex")]
    pub nonce: u64,
    /// How long the lease lasts without an extension.
    pub term_ms: u64,
}

impl Ticket {
    pub(crate) fn key(&self) -> LeaseKey {
        LeaseKey { request: self.request.clone(), nonce: self.nonce }
    }

    pub(crate) fn term(&self) -> Duration {
        // Whatever a ticket says, neither a storm of heartbeats nor none at all.
        Duration::from_millis(self.term_ms.clamp(20, 3_600_000))
    }
}

/// Numbers as text in JSON, where large ones lose digits.
mod hex {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(n: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(&format_args!("{n:016x}"))
        } else {
            n.serialize(serializer)
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        if deserializer.is_human_readable() {
            let text = String::deserialize(deserializer)?;
            u64::from_str_radix(&text, 16).map_err(serde::de::Error::custom)
        } else {
            u64::deserialize(deserializer)
        }
    }
}

/// The first message of the side that connected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// Who it is, for the other side's logs.
    pub(crate) who: String,
}

/// The answer to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Welcome {
    /// The engine's name.
    pub(crate) engine: String,
    /// Its present life.
    pub(crate) incarnation: Incarnation,
    /// How long its leases last.
    pub(crate) term_ms: u64,
}

/// What one rank of an engine makes known: the facts of its cache, and how to reach them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// The rank.
    pub rank: u32,
    /// Its manifest, encoded.
    pub manifest: Vec<u8>,
    /// The transport that reaches its memory.
    pub transport: String,
    /// That transport's description, which opens the door to the memory.
    pub description: Vec<u8>,
    /// Where the rank takes tasks from its own scheduler. Peers are not told.
    #[serde(skip)]
    pub(crate) service: Option<ServiceCard>,
}

/// Where a rank takes tasks, and what proves that they come from its own scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ServiceCard {
    pub(crate) address: String,
    pub(crate) token: Token,
}

impl Card {
    /// As bytes, to carry from a worker to its scheduler.
    pub fn to_bytes(&self) -> Vec<u8> {
        encode(&(self, &self.service))
    }

    /// From bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PeerError> {
        let (card, service) = decode::<(Self, Option<ServiceCard>)>(bytes)?;
        Ok(Self { service, ..card })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Question {
    /// Does this rank fit, and which of your ranks must it read?
    Fit { manifest: Vec<u8>, transport: String },
    /// These requests are still wanted.
    Extend { incarnation: Incarnation, keys: Vec<LeaseKey> },
    /// This rank has read what it needs: was the lease held until now? Only 1.1 and older ask like this;
    /// here to keep the places of those that follow.
    Confirm { incarnation: Incarnation, key: LeaseKey, consumer: Consumer },
    /// These requests are not wanted any more.
    Abandon { incarnation: Incarnation, keys: Vec<LeaseKey> },
    /// Are you there?
    Ping,
    /// What are you doing? (since 1.1)
    Status,
    /// Like [`Confirm`](Self::Confirm), and says what was read by. (since 1.2)
    ConfirmRead {
        incarnation: Incarnation,
        key: LeaseKey,
        consumer: Consumer,
        read_by: Fingerprint,
    },
    /// How far is this request? Answered when there is more than is known, at the latest after a while;
    /// other questions do not wait behind it. (since 1.3)
    Follow { sought: Sought, known: Known },
    /// Have one of your ranks do this with what I have read by. (since 1.3)
    Ask {
        incarnation: Incarnation,
        key: LeaseKey,
        read_by: Fingerprint,
        rank: u32,
        /// How long I wait for it.
        patience_ms: u64,
        task: Task,
    },
    /// A scheduler to a rank of its own engine: do this with what was granted. (since 1.3)
    Do { token: Token, grant: Grant, patience_ms: u64, task: Task },
    /// You are about to go: promise nothing new; or you are not. (since 1.3)
    Drain { on: bool },
    /// Like [`ConfirmRead`](Self::ConfirmRead), and says what the blocks are wanted for. (since 1.3)
    ConfirmFor {
        incarnation: Incarnation,
        key: LeaseKey,
        consumer: Consumer,
        read_by: Fingerprint,
        origin: Option<Origin>,
    },
    /// What has one of your ranks written in a step that is in flight for this request, beyond so many
    /// states? Answered like [`Follow`](Self::Follow). (since 1.3)
    Written { incarnation: Incarnation, key: LeaseKey, rank: u32, step: u64, known: u32 },
}

impl Question {
    /// Whether its answer waits for something to happen.
    pub(crate) fn waits(&self) -> bool {
        match self {
            Self::Follow { .. } | Self::Written { .. } => true,
            Self::Do { task, .. } => matches!(task, Task::Written { .. }),
            _ => false,
        }
    }
}

/// What is followed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Sought {
    /// A lease that is known.
    Lease { incarnation: Incarnation, key: LeaseKey },
    /// The latest lease of this name, which may not have begun yet.
    Name(String),
}

/// What whoever asks knows already of a lease.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Known {
    /// Which lease; `None` where only its name is known.
    pub(crate) nonce: Option<u64>,
    pub(crate) epoch: u32,
    pub(crate) tokens: u64,
    /// How many ids of each table; `None` where tables are not wanted.
    pub(crate) blocks: Option<Vec<u32>>,
    /// The last step in flight that was told of.
    pub(crate) step: u64,
}

/// How far a lease has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct News {
    pub(crate) incarnation: Incarnation,
    pub(crate) key: LeaseKey,
    pub(crate) epoch: u32,
    pub(crate) tokens: u64,
    /// Whether that is all.
    pub(crate) sealed: bool,
    /// What each table has beyond what is known.
    pub(crate) tables: Vec<Addition>,
    /// What is being computed beyond the tokens.
    pub(crate) in_flight: Vec<InFlight>,
}

/// The end of a block table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Addition {
    /// The table's first position.
    pub(crate) first: u64,
    /// How many ids come before these.
    pub(crate) known: u32,
    pub(crate) blocks: Vec<u32>,
}

impl Known {
    /// What is known with a grant, tables included.
    pub(crate) fn of(nonce: u64, grant: &Grant, step: u64) -> Self {
        let blocks = grant.tables.iter().map(|table| table.blocks.len() as u32);
        Self {
            nonce: Some(nonce),
            epoch: grant.epoch,
            tokens: grant.tokens,
            blocks: Some(blocks.collect()),
            step,
        }
    }

    /// Whether there is anything that it does not know.
    pub(crate) fn lacks(&self, news: &News) -> bool {
        let step = news.last_step();
        news.sealed
            || self.nonce != Some(news.key.nonce)
            || (news.epoch, news.tokens) != (self.epoch, self.tokens)
            || step > self.step
    }
}

impl News {
    /// What to tell of a lease to someone who knows this much.
    pub(crate) fn of(
        incarnation: Incarnation,
        key: LeaseKey,
        frontier: &Frontier<'_>,
        known: &Known,
    ) -> Self {
        let Frontier { grant, in_flight, sealed, .. } = *frontier;
        let same = known.nonce == Some(key.nonce) && known.epoch == grant.epoch;
        let tables = known.blocks.iter().flat_map(|blocks| {
            grant.tables.iter().enumerate().map(move |(index, table)| {
                let had = blocks.get(index).copied().filter(|_| same).unwrap_or(0);
                // More than there are: it does not know what it says.
                let known = if had as usize <= table.blocks.len() { had } else { 0 };
                let blocks = table.blocks[known as usize..].to_vec();
                Addition { first: table.first, known, blocks }
            })
        });
        let tables = tables.collect();
        let in_flight = in_flight.to_vec();
        let Grant { epoch, tokens, .. } = *grant;
        Self { incarnation, key, epoch, tokens, sealed, tables, in_flight }
    }

    /// The last step in flight; 0: there is none.
    pub(crate) fn last_step(&self) -> u64 {
        self.in_flight.last().map_or(0, |last| last.step)
    }

    /// What it makes of a grant that is known; `None` where it does not go on from there.
    pub(crate) fn after(self, known: &Grant) -> Option<Grant> {
        let Self { epoch, tokens, tables, .. } = self;
        let tables = tables.into_iter().enumerate().map(|(index, added)| {
            let Addition { first, known: had, mut blocks } = added;
            if had > 0 {
                let table = known.tables.get(index).filter(|_| epoch == known.epoch)?;
                let had = table.blocks.get(..had as usize).filter(|_| table.first == first)?;
                blocks.splice(..0, had.iter().copied());
            }
            Some(BlockTable { first, blocks })
        });
        Some(Grant { epoch, tokens, tables: tables.collect::<Option<_>>()? })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The ranks to read.
    Cards { incarnation: Incarnation, cards: Vec<Card> },
    /// The two sides do not fit.
    Refused(String),
    /// The ranks have not said yet what they hold.
    NotReady,
    /// For each of the leases.
    Leases(Vec<Answer>),
    /// For the one lease.
    Lease(Answer),
    /// Nothing more to say.
    Done,
    /// As JSON.
    Status(String),
    /// How far a lease has come.
    Frontier(News),
    /// What came of a task.
    Task(TaskReply),
    /// What keeps it from going.
    Left(Left),
}

/// What still keeps an engine from going.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// Requests that it keeps or computes for others.
    pub leases: u32,
    /// Requests that others keep for it.
    pub holds: u32,
}

impl Left {
    /// Whether it can go.
    pub fn is_empty(&self) -> bool {
        self.leases == 0 && self.holds == 0
    }
}

pub(crate) fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    // Plain data: neither maps of unknown length nor anything else that postcard cannot encode.
    postcard::to_allocvec(value).unwrap_or_default()
}

/// Decodes a whole message.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, PeerError> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        _ => Err(PeerError::Misbehaved(Misbehaviour::Garbage)),
    }
}

/// A hello or welcome, with the version before it.
pub(crate) fn encode_opening<T: Serialize>(version: Version, value: &T) -> Vec<u8> {
    let mut bytes = version.major.to_le_bytes().to_vec();
    bytes.extend(version.minor.to_le_bytes());
    bytes.extend(encode(value));
    bytes
}

/// Reads a hello or welcome of a version that is served, or says which other it is; skips what a newer
/// minor version has added.
pub(crate) fn decode_opening<T: DeserializeOwned>(
    ours: Version,
    bytes: &[u8],
) -> Result<(Version, T), PeerError> {
    let garbage = PeerError::Misbehaved(Misbehaviour::Garbage);
    let [a, b, c, d, rest @ ..] = bytes else { return Err(garbage) };
    let theirs =
        Version { major: u16::from_le_bytes([*a, *b]), minor: u16::from_le_bytes([*c, *d]) };
    if !ours.serves(theirs) {
        return Err(PeerError::Version { theirs, ours });
    }
    let (value, _) = postcard::take_from_bytes(rest).map_err(|_| garbage)?;
    Ok((theirs, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_minor_version_may_add_to_a_hello() {
        let ours = Version { major: 1, minor: 0 };
        let newer = Version { major: 1, minor: 1 };
        let mut bytes = encode_opening(newer, &Hello { who: "d".to_owned() });
        bytes.extend(b"something new");
        let (version, hello): (_, Hello) = decode_opening(ours, &bytes).unwrap();
        assert_eq!((version, hello.who.as_str()), (newer, "d"));
    }

    #[test]
    fn a_version_too_far_away_is_named_even_if_nothing_else_can_be_read() {
        let ours = Version { major: 1, minor: 3 };
        for (major, minor) in [(9, 3), (0, 3), (1, 1), (1, 5)] {
            let bytes = [major as u8, 0, minor as u8, 0, 0xff, 0xff];
            let answer: Result<(Version, Hello), _> = decode_opening(ours, &bytes);
            let theirs = Version { major, minor };
            assert_eq!(answer.unwrap_err(), PeerError::Version { theirs, ours });
        }
    }

    #[test]
    fn what_does_not_decode_is_an_error() {
        let garbage = PeerError::Misbehaved(Misbehaviour::Garbage);
        let mut bytes = encode(&Question::Ping);
        assert_eq!(decode::<Question>(&bytes), Ok(Question::Ping));
        bytes.push(0);
        assert_eq!(decode::<Question>(&bytes), Err(garbage.clone()));
        assert_eq!(decode::<Question>(&[200]), Err(garbage.clone()));
        assert_eq!(decode::<Question>(&[]), Err(garbage.clone()));
        // A length that is not there must not be allocated for.
        assert_eq!(decode::<Question>(&[0, 0xff, 0xff, 0xff, 0xff, 0x0f]), Err(garbage));
    }

    fn grant(epoch: u32, tokens: u64, tables: &[(u64, &[u32])]) -> Grant {
        let tables =
            tables.iter().map(|&(first, blocks)| BlockTable { first, blocks: blocks.to_vec() });
        Grant { epoch, tokens, tables: tables.collect() }
    }

    fn frontier(grant: &Grant, sealed: bool) -> Frontier<'_> {
        Frontier { nonce: 7, grant, in_flight: &[InFlight { step: 3, tokens: 99 }], sealed }
    }

    /// What P tells of a lease to someone who knows `known` of its lease `nonce`.
    fn told(now: &Grant, nonce: u64, known: &Grant) -> News {
        let key = LeaseKey { request: "r".to_owned(), nonce: 7 };
        News::of(Incarnation(1), key, &frontier(now, false), &Known::of(nonce, known, 0))
    }

    #[test]
    fn only_what_is_new_of_the_tables_is_sent() {
        let grown = grant(0, 40, &[(0, &[1, 2, 3]), (5, &[9])]);
        for (known, sent) in [
            (grant(0, 0, &[]), 4),
            (grant(0, 16, &[(0, &[1]), (0, &[])]), 3),
            (grant(0, 40, &[(0, &[1, 2, 3]), (5, &[9])]), 0),
        ] {
            let news = told(&grown, 7, &known);
            assert_eq!(news.tables.iter().map(|added| added.blocks.len()).sum::<usize>(), sent);
            assert_eq!(news.after(&known), Some(grown.clone()));
        }
        // Of another epoch or lease nothing is known, nor of ids that are not there.
        let known = grant(0, 16, &[(0, &[1]), (0, &[])]);
        let anew = grant(1, 16, &[(0, &[8]), (0, &[])]);
        assert_eq!(told(&anew, 7, &known).after(&known), Some(anew.clone()));
        assert_eq!(told(&grown, 6, &known).tables[0].known, 0);
        let long = grant(0, 16, &[(0, &[1, 2, 3, 4, 5])]);
        assert_eq!(told(&grown, 7, &long).tables[0].known, 0);
        // Who wants no tables gets none.
        let known = Known { blocks: None, ..Known::of(7, &known, 0) };
        let key = LeaseKey { request: "r".to_owned(), nonce: 7 };
        let news = News::of(Incarnation(1), key, &frontier(&grown, true), &known);
        assert_eq!(news.tables, []);
    }

    #[test]
    fn a_step_in_flight_is_news_once() {
        let so_far = grant(0, 40, &[(0, &[1, 2, 3])]);
        let key = LeaseKey { request: "r".to_owned(), nonce: 7 };
        let lacks = |known: Known| {
            let news = News::of(Incarnation(1), key.clone(), &frontier(&so_far, false), &known);
            known.lacks(&news)
        };
        // Also for those who want no tables.
        for blocks in [Known::of(7, &so_far, 0).blocks, None] {
            let known = |step| Known { blocks: blocks.clone(), ..Known::of(7, &so_far, step) };
            assert!(lacks(known(0)));
            assert!(lacks(known(2)));
            assert!(!lacks(known(3)));
            assert!(lacks(Known { tokens: 39, ..known(3) }));
        }
    }

    #[test]
    fn news_that_go_on_from_nowhere_are_nothing() {
        let known = grant(0, 16, &[(0, &[1])]);
        let base = told(&grant(0, 40, &[(0, &[1, 2])]), 7, &known);
        let added = |first, known| vec![Addition { first, known, blocks: vec![2] }];
        for (epoch, tables) in
            [(0, added(0, 2)), (0, added(3, 1)), (1, added(0, 1)), (0, added(0, u32::MAX))]
        {
            assert_eq!(News { epoch, tables, ..base.clone() }.after(&known), None);
        }
    }

    #[test]
    fn an_incarnation_survives_json() {
        let incarnation = Incarnation(u64::MAX - 1);
        let json = serde_json::to_string(&incarnation).unwrap();
        assert_eq!(json, "\"fffffffffffffffe\"");
        assert_eq!(serde_json::from_str::<Incarnation>(&json).unwrap(), incarnation);
    }
}
