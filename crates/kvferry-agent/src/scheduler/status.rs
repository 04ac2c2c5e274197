//! What an agent is doing, as data, and how to ask a running one.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::background::after;
use crate::error::{Misbehaviour, PeerError};
use crate::wire::link::{Caller, Link};
use crate::wire::message::{Question, Reply};
use crate::wire::ticket::Incarnation;
use crate::wire::trust::Trust;
use crate::wire::version::Version;

/// What an agent is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The engine.
    pub engine: String,
    /// Its present life.
    pub incarnation: Incarnation,
    /// The protocol it speaks.
    pub protocol: String,
    /// Since when.
    pub uptime_ms: u64,
    /// How many ranks it has published.
    pub ranks: usize,
    /// Whether it promises nothing new, because it is about to go.
    #[serde(default)]
    pub draining: bool,
    /// The requests that it keeps for others.
    pub leases: Vec<LeaseStatus>,
    /// The requests that it computes for others, who may read what is complete.
    #[serde(default)]
    pub growing: Vec<GrowingStatus>,
    /// The requests that others keep for it: waiting, or being read.
    pub holds: Vec<HoldStatus>,
    /// Who is connected to it.
    pub peers: Vec<GuestStatus>,
    /// Whom it is connected to.
    pub connected_to: Vec<String>,
}

/// A request that is kept for others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseStatus {
    /// The request.
    pub request: String,
    /// Since when.
    pub age_ms: u64,
    /// Until it expires.
    pub left_ms: u64,
    /// Ranks that have confirmed.
    pub confirmed: usize,
}

/// A request that is computed for others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrowingStatus {
    /// The request.
    pub request: String,
    /// Since when.
    pub age_ms: u64,
    /// Tokens that are complete.
    pub tokens: u64,
    /// How often it was started over.
    pub restarts: u32,
    /// Who wait to hear more of it, at this moment: a reader asks again after every answer.
    pub followers: usize,
}

/// A request that others keep.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldStatus {
    /// The request.
    pub request: String,
    /// Who keeps it.
    pub engine: String,
    /// Where.
    pub address: String,
    /// Since when.
    pub age_ms: u64,
    /// Whether it is being read; it waits otherwise.
    #[serde(default)]
    pub reading: bool,
}

/// A connected peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestStatus {
    /// Who it says it is.
    pub who: String,
    /// From where.
    pub from: String,
    /// The protocol that is spoken with it.
    pub protocol: String,
}

pub(super) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Asks a running agent for its status.
pub fn ask_status(address: &str, trust: &Trust, patience: Duration) -> Result<Status, PeerError> {
    match ask(address, trust, patience, "kvferry status", Question::Status)? {
        Reply::Status(json) => {
            serde_json::from_str(&json).map_err(|_| PeerError::Misbehaved(Misbehaviour::Garbage))
        }
        Reply::Refused(reason) => Err(PeerError::Refused(reason)),
        _ => Err(PeerError::Misbehaved(Misbehaviour::Answer)),
    }
}

/// Puts one question to a running agent.
pub(super) fn ask(
    address: &str,
    trust: &Trust,
    patience: Duration,
    who: &str,
    question: Question,
) -> Result<Reply, PeerError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime =
        runtime.map_err(|error| PeerError::Io { what: "starting", kind: error.kind() })?;
    let caller = Caller {
        who: who.to_owned(),
        trust: trust.clone(),
        version: Version::CURRENT,
        keepalive: patience,
    };
    runtime.block_on(async {
        let deadline = after(patience).into();
        let link = Link::open(address, &caller, deadline).await?;
        if matches!(question, Question::Drain { .. }) && link.version() < Version::DRAINS {
            let (theirs, needed) = (link.version(), Version::DRAINS);
            return Err(PeerError::TooOld { what: "draining", theirs, needed });
        }
        link.ask(question, deadline).await
    })
}
