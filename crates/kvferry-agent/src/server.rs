//! The engine's one address: who may come in, and what they are told.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvferry_layout::Manifest;
use kvferry_plan::Plan;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::channel::{self, MAX_OPENING, MAX_QUESTION, Receiver, Sender};
use crate::error::PeerError;
use crate::lease::{Answer, Loss};
use crate::message::{
    Card, Hello, Question, Reply, Version, Welcome, decode, decode_opening, encode, encode_opening,
};
use crate::scheduler::{Core, Guest, Published};

/// What a stranger can take of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections of peers that have proven themselves.
    pub connections: usize,
    /// Connections that are still proving themselves: when there are more, the oldest is dropped.
    pub strangers: usize,
    /// How long a connection may take to prove itself.
    pub opening: Duration,
    /// How long a connection may be silent. Peers say something every few seconds.
    pub idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            strangers: 64,
            opening: Duration::from_secs(5),
            idle: Duration::from_secs(60),
        }
    }
}

pub(crate) async fn serve(core: Arc<Core>, listener: TcpListener) {
    let limits = core.options.limits;
    let mut strangers: VecDeque<AbortHandle> = VecDeque::new();
    // Everything ends with this task.
    let mut all = JoinSet::new();
    loop {
        while all.try_join_next().is_some() {}
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, most likely: nothing is gained by trying at once.
                warn!(%error, "cannot accept a connection");
                sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        strangers.retain(|task| !task.is_finished());
        if strangers.len() >= limits.strangers
            && let Some(oldest) = strangers.pop_front()
        {
            oldest.abort();
            core.metrics.turned_away.add(1);
        }
        let core = core.clone();
        let (known, is_known) = tokio::sync::oneshot::channel();
        let stranger = all.spawn(async move {
            let opened = timeout(limits.opening, open(&core, stream)).await;
            match opened.unwrap_or(Err(PeerError::Slow("proving itself"))) {
                Ok(peer) => _ = known.send((core, peer)),
                Err(error) => {
                    core.metrics.turned_away.add(1);
                    warn!(%from, %error, "turned a connection away");
                }
            }
        });
        strangers.push_back(stranger);
        all.spawn(async move {
            if let Ok((core, peer)) = is_known.await {
                talk(core, peer, from).await;
            }
        });
    }
}

struct Peer {
    sender: Sender,
    receiver: Receiver,
    who: String,
    version: Version,
}

async fn open(core: &Core, stream: TcpStream) -> Result<Peer, PeerError> {
    stream.set_nodelay(true).map_err(|e| channel::io_error("accepting", &e))?;
    let (mut sender, mut receiver) = channel::accept(stream, &core.options.trust).await?;
    let ours = core.options.version;
    let hello = receiver.receive(MAX_OPENING).await?;
    let opening = decode_opening(ours, &hello);
    // A peer of another major version has proven itself: it may know which this is.
    let welcome = match opening {
        Ok(_) | Err(PeerError::Version { .. }) => encode_opening(ours, &core.welcome()),
        Err(error) => return Err(error),
    };
    sender.send(&welcome).await?;
    let (theirs, hello): (_, Hello) = opening?;
    let who = hello.who.chars().filter(|c| !c.is_control()).take(200).collect();
    Ok(Peer { sender, receiver, who, version: theirs.min(ours) })
}

async fn talk(core: Arc<Core>, peer: Peer, from: SocketAddr) {
    let Peer { mut sender, mut receiver, who, version } = peer;
    let Some(guest) = Guest::enter(&core, &who, from, version) else {
        core.metrics.turned_away.add(1);
        warn!(%from, who, "turned a peer away: there are too many connections");
        return;
    };
    core.metrics.connections.add(1);
    debug!(%from, who, %version, "a peer has connected");
    let error = loop {
        let message = match timeout(core.options.limits.idle, receiver.receive(MAX_QUESTION)).await
        {
            Ok(Ok(message)) => message,
            Ok(Err(error)) => break error,
            Err(_) => break PeerError::Slow("the next question"),
        };
        let (number, question): (u32, Question) = match decode(&message) {
            Ok(question) => question,
            Err(error) => break error,
        };
        let reply = answer(&core, &who, version, question).await;
        if let Err(error) = sender.send(&encode(&(number, reply))).await {
            break error;
        }
    };
    drop(guest);
    match error {
        PeerError::Misbehaved(problem) => {
            core.metrics.misbehaved.add(1);
            warn!(%from, who, %problem, "ended the connection of a peer that broke the protocol");
        }
        error => debug!(%from, who, %error, "a peer has left"),
    }
}

async fn answer(core: &Arc<Core>, who: &str, version: Version, question: Question) -> Reply {
    match question {
        Question::Fit { manifest, transport } => {
            let Some(published) = core.published() else { return Reply::NotReady };
            let incarnation = published.incarnation;
            let fitted =
                tokio::task::spawn_blocking(move || fit(&published, &manifest, &transport)).await;
            match fitted {
                Ok(Ok(cards)) => {
                    info!(who, cards = cards.len(), "shook hands");
                    Reply::Cards { incarnation, cards }
                }
                Ok(Err(reason)) => {
                    core.metrics.refused.add(1);
                    warn!(who, reason, "refused a peer");
                    Reply::Refused(reason)
                }
                Err(_) => Reply::Refused("the engine could not compile the plan".to_owned()),
            }
        }
        Question::Extend { incarnation, keys } => {
            let restarted = incarnation != core.incarnation();
            let now = core.now();
            let mut leases = core.leases();
            let answers = keys.iter().map(|key| match restarted {
                true => Answer::NotHeld(Loss::Restarted),
                false => leases.extend(key, now),
            });
            Reply::Leases(answers.collect())
        }
        Question::Confirm { incarnation, key, consumer } => {
            if incarnation != core.incarnation() {
                return Reply::Lease(Answer::NotHeld(Loss::Restarted));
            }
            let now = core.now();
            let answer = core.leases().confirm(&key, &consumer, None, now);
            debug!(who, %key, rank = consumer.rank, ?answer, "asked for confirmation");
            core.collect();
            Reply::Lease(answer)
        }
        Question::Abandon { incarnation, keys } => {
            if incarnation == core.incarnation() {
                let now = core.now();
                for key in &keys {
                    if core.leases().abandon(key, now) {
                        debug!(who, %key, "abandoned");
                    }
                }
                core.collect();
            }
            Reply::Done
        }
        Question::Ping => Reply::Done,
        Question::Status if version < Version::STATUS => {
            Reply::Refused(format!("protocol {version} has no such question"))
        }
        Question::Status => Reply::Status(core.status_json()),
    }
}

/// The cards that a destination needs, or why it cannot be served.
fn fit(published: &Published, manifest: &[u8], transport: &str) -> Result<Vec<Card>, String> {
    let destination = Manifest::from_bytes(manifest).map_err(|error| error.to_string())?;
    let other = published.ranks.iter().find(|(card, _)| card.transport != transport);
    if let Some((card, _)) = other {
        return Err(format!(
            "rank {} of the source is reached by transport '{}', the destination uses '{transport}'. \
             Set the same transport on both sides.",
            card.rank, card.transport
        ));
    }
    let sources: Vec<&Manifest> = published.ranks.iter().map(|(_, manifest)| manifest).collect();
    let plan = Plan::compile(&destination, &sources).map_err(|error| error.to_string())?;
    let needed = published.ranks.iter().enumerate().filter(|(i, _)| plan.reads(*i));
    Ok(needed.map(|(_, (card, _))| card.clone()).collect())
}

impl Core {
    fn welcome(&self) -> Welcome {
        Welcome {
            engine: self.options.engine.clone(),
            incarnation: self.incarnation(),
            term_ms: u64::try_from(self.options.term.as_millis()).unwrap_or(u64::MAX),
        }
    }
}
