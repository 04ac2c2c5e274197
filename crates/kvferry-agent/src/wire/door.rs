//! Connections from other engines: who may come in, and how long they may stay.
//!
//! What they are told is up to the [`Host`]. Everything that a stranger can take of this process is
//! bounded by [`Limits`].

use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use super::channel::{self, MAX_OPENING, MAX_QUESTION, Receiver, Sender, Stream};
use super::message::{
    Hello, Question, Reply, Welcome, decode, decode_opening, encode, encode_opening,
};
use super::trust::Trust;
use super::version::Version;
use crate::error::{Error, PeerError};
use crate::metrics::DoorCounts;

/// So many answers of one connection may wait for something to happen while others are given; the next
/// holds up the connection, for as long as it waits.
const ASIDE: usize = 4096;

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
    /// How long a peer waits for something new before it is told that there is none.
    pub poll: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            strangers: 64,
            opening: Duration::from_secs(5),
            idle: Duration::from_secs(60),
            poll: Duration::from_secs(1),
        }
    }
}

/// The address to give to peers: that of a door, but for the host where another is to be named.
pub(crate) fn advertised(host: Option<&str>, bound: SocketAddr) -> Result<String, Error> {
    match host {
        Some(host) if host.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv6()) => {
            Ok(format!("[{host}]:{}", bound.port()))
        }
        Some(host) => Ok(format!("{host}:{}", bound.port())),
        None if bound.ip().is_unspecified() => Err(Error::Options(format!(
            "peers cannot connect to {bound}: say which host to advertise"
        ))),
        None => Ok(bound.to_string()),
    }
}

/// Who answers at a door.
pub(crate) trait Host: Send + Sync + 'static {
    /// What a peer that has proven itself is told first.
    fn welcome(&self) -> Welcome;

    /// Answers a question that `who` puts in a protocol of this version.
    fn answer(
        &self,
        who: &str,
        version: Version,
        question: Question,
    ) -> impl Future<Output = Reply> + Send;
}

/// One address at which peers come in.
#[derive(Debug)]
pub(crate) struct Door {
    pub(crate) trust: Trust,
    pub(crate) version: Version,
    pub(crate) limits: Limits,
    pub(crate) counts: Arc<DoorCounts>,
    guests: Mutex<Guests>,
}

/// Who is inside.
#[derive(Debug, Default)]
struct Guests {
    next: u64,
    inside: BTreeMap<u64, Guest>,
}

/// A peer that has proven itself.
#[derive(Clone, Debug)]
pub(crate) struct Guest {
    /// Who it says it is.
    pub(crate) who: String,
    pub(crate) from: SocketAddr,
    /// What is spoken with it.
    pub(crate) version: Version,
}

/// The connection of a peer that has proven itself.
struct Opened {
    sender: Sender,
    receiver: Receiver,
    who: String,
    version: Version,
}

/// The presence of a guest.
struct Stay<'a> {
    door: &'a Door,
    id: u64,
}

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        self.door.guests.lock().inside.remove(&self.id);
    }
}

impl Door {
    pub(crate) fn new(trust: Trust, version: Version, limits: Limits) -> Self {
        let (counts, guests) = (Arc::default(), Mutex::default());
        Self { trust, version, limits, counts, guests }
    }

    /// Who is inside, in the order in which they came.
    pub(crate) fn guests(&self) -> Vec<Guest> {
        self.guests.lock().inside.values().cloned().collect()
    }

    /// Lets peers in and has the host answer them, for as long as this is polled.
    pub(crate) async fn serve<H: Host>(self: Arc<Self>, listener: TcpListener, host: Arc<H>) {
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
            if strangers.len() >= self.limits.strangers
                && let Some(oldest) = strangers.pop_front()
            {
                oldest.abort();
                self.counts.turned_away.add(1);
            }
            let (known, is_known) = tokio::sync::oneshot::channel();
            let (door, host) = (self.clone(), host.clone());
            let stranger = all.spawn(async move {
                let opened = async {
                    let nodelay = stream.set_nodelay(true);
                    nodelay.map_err(|e| channel::io_error("accepting", &e))?;
                    door.open(stream, &*host).await
                };
                let opened = timeout(door.limits.opening, opened).await;
                match opened.unwrap_or(Err(PeerError::Slow("proving itself"))) {
                    Ok(opened) => _ = known.send((door, host, opened)),
                    Err(error) => {
                        door.counts.turned_away.add(1);
                        warn!(%from, %error, "turned a connection away");
                    }
                }
            });
            strangers.push_back(stranger);
            all.spawn(async move {
                if let Ok((door, host, opened)) = is_known.await {
                    door.talk(opened, from, &host).await;
                }
            });
        }
    }

    /// Hears a stranger out until it has proven itself.
    async fn open(&self, stream: impl Stream, host: &impl Host) -> Result<Opened, PeerError> {
        let (mut sender, mut receiver) = channel::accept(stream, &self.trust).await?;
        let hello = receiver.receive(MAX_OPENING).await?;
        let opening = decode_opening(self.version, &hello);
        // A peer of a version that is not served has proven itself: it may know which this is.
        let welcome = match opening {
            Ok(_) | Err(PeerError::Version { .. }) => encode_opening(self.version, &host.welcome()),
            Err(error) => return Err(error),
        };
        sender.send(&welcome).await?;
        let (theirs, hello): (_, Hello) = opening?;
        let who = hello.who.chars().filter(|c| !c.is_control()).take(200).collect();
        Ok(Opened { sender, receiver, who, version: theirs.min(self.version) })
    }

    /// Answers a guest until it leaves or breaks the protocol.
    async fn talk<H: Host>(&self, opened: Opened, from: SocketAddr, host: &Arc<H>) {
        let Opened { sender, mut receiver, who, version } = opened;
        let Some(stay) = self.enter(Guest { who: who.clone(), from, version }) else {
            self.counts.turned_away.add(1);
            warn!(%from, who, "turned a peer away: there are too many connections");
            return;
        };
        self.counts.connections.add(1);
        debug!(%from, who, %version, "a peer has connected");
        let sender = Arc::new(tokio::sync::Mutex::new(sender));
        // Answers that wait for something to happen; they end with the connection.
        let mut aside = JoinSet::new();
        let error = loop {
            let message = match timeout(self.limits.idle, receiver.receive(MAX_QUESTION)).await {
                Ok(Ok(message)) => message,
                Ok(Err(error)) => break error,
                Err(_) => break PeerError::Slow("the next question"),
            };
            let (number, question): (u32, Question) = match decode(&message) {
                Ok(question) => question,
                Err(error) => break error,
            };
            while aside.try_join_next().is_some() {}
            let waits = question.waits() && aside.len() < ASIDE;
            let (host, sender, name) = (host.clone(), sender.clone(), who.clone());
            let mut answer = Box::pin(async move {
                let reply = host.answer(&name, version, question).await;
                sender.lock().await.send(&encode(&(number, reply))).await
            });
            if waits {
                // Most often there is something to tell at once.
                match poll_fn(|context| Poll::Ready(answer.as_mut().poll(context))).await {
                    Poll::Ready(Ok(())) => {}
                    Poll::Ready(Err(error)) => break error,
                    // If it cannot be sent, the next question cannot be heard either.
                    Poll::Pending => _ = aside.spawn(answer),
                }
            } else if let Err(error) = answer.await {
                break error;
            }
        };
        drop(stay);
        match error {
            PeerError::Misbehaved(problem) => {
                self.counts.misbehaved.add(1);
                warn!(%from, who, %problem, "ended the connection of a peer that broke the protocol");
            }
            error => debug!(%from, who, %error, "a peer has left"),
        }
    }

    /// `None` when there are too many.
    fn enter(&self, guest: Guest) -> Option<Stay<'_>> {
        let mut guests = self.guests.lock();
        if guests.inside.len() >= self.limits.connections {
            return None;
        }
        let id = guests.next;
        guests.next += 1;
        guests.inside.insert(id, guest);
        Some(Stay { door: self, id })
    }

    /// One whole connection, from the first byte to the last: the same as `serve` does, without a
    /// listener and without clocks. Answers whether the peer proved itself.
    pub(crate) async fn visit<H: Host>(&self, stream: impl Stream, host: &Arc<H>) -> bool {
        match self.open(stream, &**host).await {
            Ok(opened) => {
                self.talk(opened, ([127, 0, 0, 1], 0).into(), host).await;
                true
            }
            Err(_) => false,
        }
    }
}
