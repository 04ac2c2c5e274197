//! What agents say to each other.
//!
//! A connection opens with a [`Hello`] and a [`Welcome`], whose first four bytes (major and minor
//! version) have the same meaning in every version to come. After them the side that connected asks,
//! and the other answers; questions carry a number, so that many can be under way.
//!
//! Minor versions add: fields at the end of a hello or welcome, which older readers skip, and
//! questions, which newer sides do not put to older ones.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::news::{Known, News, Sought};
use super::task::{Task, TaskReply, Token};
use super::ticket::Incarnation;
use super::version::Version;
use crate::error::{Misbehaviour, PeerError};
use crate::rules::grant::{Claim, Fingerprint, Grant};
use crate::rules::lease::{Answer, Consumer, LeaseKey};

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
    /// For those who are elsewhere.
    pub(crate) address: String,
    /// For those who are in the same place: the address that others are given may lead nowhere from here.
    pub(crate) near: String,
    /// Names the place.
    pub(crate) place: String,
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
    /// This rank has read what it needs, and says by what and for what: was the lease held until now?
    Confirm { incarnation: Incarnation, key: LeaseKey, consumer: Consumer, claim: Claim },
    /// These requests are not wanted any more.
    Abandon { incarnation: Incarnation, keys: Vec<LeaseKey> },
    /// Are you there?
    Ping,
    /// What are you doing?
    Status,
    /// How far is this request? Answered when there is more than is known, at the latest after a while;
    /// other questions do not wait behind it.
    Follow { sought: Sought, known: Known },
    /// Have one of your ranks do this with what I have read by.
    Ask {
        incarnation: Incarnation,
        key: LeaseKey,
        read_by: Fingerprint,
        rank: u32,
        /// How long I wait for it.
        patience_ms: u64,
        task: Task,
    },
    /// A scheduler to a rank of its own engine: do this with what was granted.
    Do { token: Token, grant: Grant, patience_ms: u64, task: Task },
    /// You are about to go: promise nothing new; or you are not.
    Drain { on: bool },
    /// What has one of your ranks written in a step that is in flight for this request, beyond so many
    /// states? Answered like [`Follow`](Self::Follow).
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
}
