//! Connections from other engines: who may come in, and how long they may stay.
//!
//! What they are told is up to the [`Host`]. Everything that a stranger can take of this process is
//! bounded by [`Limits`].

use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;
use std::time::{Duration, Instant};

use kvferry_transport::ports;
use kvferry_transport::strangers::Mentions;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpSocket};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use super::channel::{self, MAX_OPENING, MAX_QUESTION, Receiver, Sender, Stream};
use super::message::{
    Hello, Question, Reply, Welcome, decode, decode_opening, encode, encode_opening,
};
use super::owner;
use super::places::{Guest, Guests, Limits, Lost, Waiting};
use super::trust::Trust;
use super::version::Version;
use crate::error::{Error, PeerError};
use crate::metrics::ListenerCounts;

/// So many answers of one connection may wait for something to happen while others are given; the next
/// holds up the connection, for as long as it waits.
const ASIDE: usize = 4096;
/// So many bytes of those answers may wait until the peer takes them. A table is long, and a question short: whoever asks
/// and does not read must not have all of them made at once.
const MOST_UNSENT: usize = 32 << 20;
/// So many connections may wait to be accepted: as many as come in a fifth of a second at 5,000 a second.
const BACKLOG: u32 = 1024;

/// Listens at an address, at one of these ports; answers which one it is in the end.
pub(crate) fn listen(
    bind: SocketAddr,
    among: Option<&RangeInclusive<u16>>,
    on: &Handle,
) -> Result<(TcpListener, SocketAddr), Error> {
    let _inside = on.enter();
    let listen = |bind: SocketAddr| {
        let socket = if bind.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        socket.bind(bind)?;
        let listener = socket.listen(BACKLOG)?;
        let bound = listener.local_addr()?;
        Ok((listener, bound))
    };
    ports::listen(bind, among, listen).map_err(|error| Error::Io {
        what: format!("listening on {}", ports::place(bind, among)),
        kind: error.kind(),
    })
}

/// The address to give to peers: that of a listener, but for the host where another is to be named.
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

/// Who answers at a listener.
pub(crate) trait Host: Send + Sync + 'static {
    /// What a peer that has proven itself is told first.
    fn welcome(&self) -> Welcome;

    /// Answers a question that `who` puts.
    fn answer(&self, who: &str, question: Question) -> impl Future<Output = Reply> + Send;
}

/// One address at which peers come in.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) trust: Trust,
    pub(crate) version: Version,
    pub(crate) limits: Limits,
    pub(crate) counts: Arc<ListenerCounts>,
    strangers: Mutex<Waiting>,
    guests: Mutex<Guests>,
    log: Mutex<Log>,
}

/// What the log was told lately.
#[derive(Debug, Default)]
struct Log {
    turned_away: Mentions,
    let_go: Mentions,
    misbehaved: Mentions,
    /// The port itself has one trouble, wherever it comes from.
    not_accepted: Mentions<()>,
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
    listener: &'a Listener,
    id: u64,
}

impl Stay<'_> {
    /// It has said or taken something.
    fn stirs(&self) {
        self.listener.guests.lock().stirs(self.id);
    }
}

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        self.listener.guests.lock().leave(self.id);
    }
}

impl Listener {
    pub(crate) fn new(trust: Trust, version: Version, wanted: Limits) -> Self {
        let limits = wanted.within_process();
        let strangers = Mutex::new(Waiting::new(limits.strangers));
        let guests = Mutex::new(Guests::new(limits.connections));
        let (counts, log) = (Arc::default(), Mutex::default());
        Self { trust, version, limits, counts, strangers, guests, log }
    }

    /// Who is inside, in the order in which they came.
    pub(crate) fn guests(&self) -> Vec<Guest> {
        self.guests.lock().all().cloned().collect()
    }

    /// Lets peers in and has the host answer them, for as long as this is polled.
    pub(crate) async fn serve<H: Host>(self: Arc<Self>, socket: TcpListener, host: Arc<H>) {
        // Everything ends with this task.
        let mut all = JoinSet::new();
        loop {
            while all.try_join_next().is_some() {}
            let (stream, from) = match socket.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, most likely: nothing is gained by trying at once.
                    if let Some(left_out) = self.log.lock().not_accepted.mention((), Instant::now())
                    {
                        warn!(%error, left_out, "cannot accept a connection");
                    }
                    sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let (number, lost) = self.strangers.lock().enter(from.ip().into());
            let (listener, host) = (self.clone(), host.clone());
            all.spawn(async move {
                let opened = async {
                    let nodelay = stream.set_nodelay(true);
                    let near = nodelay.and_then(|()| stream.local_addr());
                    let near = near.map_err(|e| channel::io_error("accepting", &e))?;
                    owner::check(&listener.trust, near, from)?;
                    listener.open(stream, &*host).await
                };
                let opened = tokio::select! {
                    // Whoever has proven itself in the same moment has done so.
                    biased;
                    opened = timeout(listener.limits.opening, opened) => {
                        opened.unwrap_or(Err(PeerError::Slow("proving itself")))
                    }
                    _ = lost => Err(PeerError::Slow("proving itself at a port that is full")),
                };
                listener.strangers.lock().leave(number);
                match opened {
                    Ok(opened) => listener.talk(opened, from, &host).await,
                    Err(error) => listener.turn_away(from, &error),
                }
            });
        }
    }

    fn turn_away(&self, from: SocketAddr, error: &PeerError) {
        self.counts.turned_away.add(1);
        let said = self.log.lock().turned_away.mention(from.ip().into(), Instant::now());
        if let Some(left_out) = said {
            warn!(%from, %error, left_out, "turned a connection away");
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

    /// Answers a guest until it leaves, breaks the protocol, does not take its answers, or has to make room.
    async fn talk<H: Host>(&self, opened: Opened, from: SocketAddr, host: &Arc<H>) {
        let Opened { sender, receiver, who, version } = opened;
        let (stay, lost) = self.enter(Guest { who: who.clone(), from, version });
        self.counts.connections.add(1);
        debug!(%from, who, %version, "a peer has connected");
        let unread = Arc::new(Notify::new());
        let error = tokio::select! {
            error = self.listen_to(&stay, (sender, receiver), &who, host, &unread) => error,
            () = unread.notified() => PeerError::Slow("taking an answer"),
            _ = lost => PeerError::Closed,
        };
        drop(stay);
        if let PeerError::Misbehaved(problem) = error {
            self.counts.misbehaved.add(1);
            let said = self.log.lock().misbehaved.mention(from.ip().into(), Instant::now());
            if let Some(left_out) = said {
                warn!(
                    %from,
                    who,
                    %problem,
                    left_out,
                    "ended the connection of a peer that broke the protocol"
                );
            }
        } else {
            debug!(%from, who, %error, "a peer has left");
        }
    }

    /// Answers a guest until one of its questions cannot be heard or answered, and says why. An answer that waited for
    /// something to happen, and cannot be given, is told by `unread`.
    async fn listen_to<H: Host>(
        &self,
        stay: &Stay<'_>,
        (sender, mut receiver): (Sender, Receiver),
        who: &str,
        host: &Arc<H>,
        unread: &Arc<Notify>,
    ) -> PeerError {
        let sender = Arc::new(tokio::sync::Mutex::new(sender));
        let patience = self.limits.answer;
        // Answers that wait for something to happen, and their bytes; they end with the connection.
        let (mut aside, unsent) = (JoinSet::new(), Arc::new(AtomicUsize::new(0)));
        loop {
            let message = match timeout(self.limits.idle, receiver.receive(MAX_QUESTION)).await {
                Ok(Ok(message)) => message,
                Ok(Err(error)) => return error,
                Err(_) => return PeerError::Slow("the next question"),
            };
            stay.stirs();
            let (number, question): (u32, Question) = match decode(&message) {
                Ok(question) => question,
                Err(error) => return error,
            };
            while aside.try_join_next().is_some() {}
            let waits = question.waits() && aside.len() < ASIDE;
            let (host, sender, name) = (host.clone(), sender.clone(), who.to_owned());
            let unsent = unsent.clone();
            let mut answer = Box::pin(async move {
                let reply = host.answer(&name, question).await;
                let message = encode(&(number, reply));
                let bytes = if waits { message.len() } else { 0 };
                if unsent.fetch_add(bytes, Relaxed) > MOST_UNSENT {
                    return Err(PeerError::Slow("taking its answers"));
                }
                let sent = async { sender.lock().await.send(&message).await };
                // Whoever asks and does not read would keep it for ever.
                let sent = timeout(patience, sent).await;
                unsent.fetch_sub(bytes, Relaxed);
                sent.unwrap_or(Err(PeerError::Slow("taking an answer")))
            });
            if waits {
                // Most often there is something to tell at once.
                match poll_fn(|context| Poll::Ready(answer.as_mut().poll(context))).await {
                    Poll::Ready(Ok(())) => stay.stirs(),
                    Poll::Ready(Err(error)) => return error,
                    Poll::Pending => {
                        let unread = unread.clone();
                        aside.spawn(async move {
                            if answer.await.is_err() {
                                unread.notify_one();
                            }
                        });
                    }
                }
            } else if let Err(error) = answer.await {
                return error;
            } else {
                stay.stirs();
            }
        }
    }

    /// A guest comes in, for as long as its place is not lost. When there are too many, another one is let go.
    fn enter(&self, guest: Guest) -> (Stay<'_>, Lost) {
        let (id, lost, gone) = self.guests.lock().enter(guest);
        if let Some(Guest { who, from, .. }) = gone {
            self.counts.turned_away.add(1);
            let said = self.log.lock().let_go.mention(from.ip().into(), Instant::now());
            if let Some(left_out) = said {
                warn!(%from, who, left_out, "let a peer go that was quiet: there are too many connections");
            }
        }
        (Stay { listener: self, id }, lost)
    }

    /// One whole connection, from the first byte to the last: the same as `serve` does, without a
    /// socket and without clocks. Answers whether the peer proved itself.
    #[cfg(any(test, fuzzing))]
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

#[cfg(test)]
mod tests {
    use super::super::news::{Known, Sought};
    use super::super::ticket::Incarnation;
    use super::*;

    /// Says much, at once or a little later.
    struct Talkative;

    impl Host for Talkative {
        fn welcome(&self) -> Welcome {
            Welcome { engine: "p".to_owned(), incarnation: Incarnation(1), term_ms: 1000 }
        }

        async fn answer(&self, _: &str, question: Question) -> Reply {
            if question.waits() {
                sleep(Duration::from_millis(10)).await;
            }
            Reply::Status("much to say ".repeat(10_000))
        }
    }

    /// Whether a guest that asks so often, and never reads, is let go although answers have this long.
    fn lets_go(question: &Question, times: u32, answer: Duration) -> bool {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let left = runtime.block_on(async {
            let limits = Limits { answer, idle: Duration::from_secs(600), ..Limits::default() };
            let listener = Listener::new(Trust::Loopback, Version::CURRENT, limits);
            let (theirs, ours) = tokio::io::duplex(4096);
            let (mut sender, mut receiver) =
                channel::open(theirs, &Trust::Loopback, "p:1").await.unwrap();
            let host = Arc::new(Talkative);
            let visit = timeout(Duration::from_secs(60), listener.visit(ours, &host));
            let asked = async {
                let hello = Hello { who: "d".to_owned() };
                sender.send(&encode_opening(Version::CURRENT, &hello)).await.unwrap();
                receiver.greeting().await.unwrap();
                for number in 0..times {
                    // Until it is let go.
                    _ = sender.send(&encode(&(number, question))).await;
                }
                // It stays, and reads no more.
                std::future::pending::<()>().await;
            };
            tokio::select! {
                left = visit => left,
                () = asked => unreachable!("it never ends"),
            }
        });
        left == Ok(true)
    }

    fn follow() -> Question {
        Question::Follow { sought: Sought::Name("cmpl-1".to_owned()), known: Known::default() }
    }

    /// Whoever asks and does not read holds up nothing for longer than it would wait itself.
    #[test]
    fn a_guest_that_does_not_read_is_let_go() {
        for question in [Question::Status, follow()] {
            assert!(lets_go(&question, 1, Duration::from_millis(50)), "{question:?}");
        }
    }

    /// However long it may take: answers that wait are made one by one, but all of them can come at once.
    #[test]
    fn answers_that_nobody_takes_are_not_all_made() {
        let answer = encode(&Reply::Status("much to say ".repeat(10_000))).len();
        let times = (2 * MOST_UNSENT / answer) as u32;
        assert!((times as usize) < ASIDE);
        assert!(lets_go(&follow(), times, Duration::from_secs(600)));
    }
}
