//! What an agent is doing, as data, and how to ask a running one.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::background::after;
use crate::error::{Misbehaviour, PeerError};
use crate::wire::link::{Caller, Link};
use crate::wire::message::{Question, Reply};
use crate::wire::reach::Reach;
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
    /// What is missing in these lists: whoever asks from outside is told the first of each.
    #[serde(default)]
    pub left_out: LeftOut,
}

/// How much of each list of a [`Status`] is left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Of [`Status::leases`].
    pub leases: usize,
    /// Of [`Status::growing`].
    pub growing: usize,
    /// Of [`Status::holds`].
    pub holds: usize,
    /// Of [`Status::peers`].
    pub peers: usize,
    /// Of [`Status::connected_to`].
    pub connected_to: usize,
}

/// So much of each list is told to whoever asks. An engine with a thousand of each would have to send 400 kB for a
/// question of six bytes.
const TOLD: usize = 64;

impl Status {
    /// The first of each list.
    fn shortened(mut self) -> Self {
        fn cut<T>(list: &mut Vec<T>) -> usize {
            let left_out = list.len().saturating_sub(TOLD);
            list.truncate(TOLD);
            left_out
        }
        self.left_out = LeftOut {
            leases: cut(&mut self.leases),
            growing: cut(&mut self.growing),
            holds: cut(&mut self.holds),
            peers: cut(&mut self.peers),
            connected_to: cut(&mut self.connected_to),
        };
        self
    }
}

/// What others are told of the status: made anew so many times a second, and told again to whoever asks more often.
#[derive(Debug, Default)]
pub(super) struct Told {
    since: Option<Instant>,
    made: u32,
    last: String,
}

const MADE_A_SECOND: u32 = 20;

impl Told {
    pub(super) fn tell(&mut self, now: Instant, make: impl FnOnce() -> Status) -> String {
        if self.since.is_none_or(|since| now.duration_since(since) >= Duration::from_secs(1)) {
            (self.since, self.made) = (Some(now), 0);
        }
        if self.made < MADE_A_SECOND {
            self.made += 1;
            self.last = serde_json::to_string(&make().shortened()).unwrap_or_default();
        }
        self.last.clone()
    }
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
        reach: Reach::Own,
        keepalive: patience,
    };
    runtime.block_on(async {
        let deadline = after(patience).into();
        let link = Link::open(address, &caller, deadline).await?;
        link.ask(question, deadline).await
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_asks_again_and_again_hears_the_same() {
        let status = |uptime_ms| Status {
            engine: "p".to_owned(),
            incarnation: Incarnation(1),
            protocol: "1.0".to_owned(),
            uptime_ms,
            ranks: 1,
            draining: false,
            leases: vec![],
            growing: vec![],
            holds: vec![],
            peers: vec![],
            connected_to: vec!["here".to_owned(); 1000],
            left_out: LeftOut::default(),
        };
        let (mut told, start, mut made) = (Told::default(), Instant::now(), 0);
        let mut tell = |now| {
            told.tell(now, || {
                made += 1;
                status(made)
            })
        };
        let all: Vec<String> = (0..1000).map(|_| tell(start)).collect();
        assert_ne!(all[0], all[1]);
        assert_eq!(all[999], all[MADE_A_SECOND as usize - 1]);
        let later: Status = serde_json::from_str(&tell(start + Duration::from_secs(1))).unwrap();
        assert_eq!(later.uptime_ms, u64::from(MADE_A_SECOND) + 1);
        assert_eq!((later.connected_to.len(), later.left_out.connected_to), (64, 936));
    }
}
