//! What the lanes of one client share: the queue, the connections, and how to open one.

use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout, timeout_at};

use super::arrival::{Arrival, Fetch, Orphan};
use crate::contract::Error;
use crate::shared::chunks::Chunked;
use crate::shared::random::random;
use crate::shared::spans::Spans;
use crate::strangers::Mentions;
use crate::tcp::channel::Channel;
use crate::tcp::frame::{Challenge, Hello};
use crate::tcp::proof::{End, Said, Secret};
use crate::tcp::seal::{Cipher, Encrypt, Terms};
use crate::tcp::socket::{self, Socket};

/// How long to wait for a connection, and for the answer to its hello.
const CONNECT_PATIENCE: Duration = Duration::from_secs(2);
pub(super) const HELLO_PATIENCE: Duration = Duration::from_secs(10);
/// How long the peer may take nothing of what it is sent: a request fits into what a socket holds.
const SENDING: Duration = Duration::from_secs(40);
/// How long to wait before a connection that ended without an answer is opened again: twice as long each time.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LAST_PAUSE: Duration = Duration::from_millis(200);

/// A peer's regions, and how often they had changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRegions {
    pub generation: u64,
    pub spans: Spans,
}

/// A question for the peer's regions.
#[derive(Debug)]
pub(super) struct Question {
    /// Where the answer goes.
    pub(super) to: Sender<Result<PeerRegions, Error>>,
    /// Until when somebody waits for it.
    pub(super) until: Instant,
}

impl Question {
    pub(super) fn answer(&self, answer: Result<PeerRegions, Error>) {
        // Nobody may be waiting any more.
        let _ = self.to.send(answer);
    }
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) secret: Secret,
    pub(super) address: SocketAddr,
    pub(super) queue: Mutex<Queue>,
    pub(super) work: Notify,
    pub(super) lanes: Vec<Lane>,
    /// See [`Lanes`].
    pub(super) gathers: usize,
    pub(super) packs: Mutex<Option<Packs>>,
    pub(super) encrypt: Encrypt,
    /// Whether the bytes that are moved are sealed: as was agreed last.
    pub(super) seals: AtomicBool,
    pub(super) arrival: Arrival,
    pub(super) mentions: Mutex<Mentions>,
}

/// A peer's slots to pack into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packs {
    /// Bytes of one.
    pub slot: u64,
    /// Whether a card fills them, which has all of its memory: nothing else is sent.
    pub on_card: bool,
}

/// A client's connections.
#[derive(Clone, Copy, Debug)]
pub struct Lanes {
    /// How many.
    pub count: usize,
    /// Parts that each may have asked the peer to gather. With one, a peer that waits for a slot on a
    /// connection keeps none for it, so that peers never wait for each other.
    pub gathers: usize,
    /// Whether the bytes that are moved are encrypted.
    pub encrypt: Encrypt,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) operations: VecDeque<Arc<Chunked>>,
    pub(super) questions: VecDeque<Question>,
    pub(super) closing: bool,
}

/// One connection, as the others see it.
#[derive(Debug, Default)]
pub(super) struct Lane {
    pub(super) stream: Mutex<Option<Arc<TcpStream>>>,
    /// The operations that have a chunk on the way here.
    pub(super) on_the_way: Mutex<Vec<u64>>,
    /// The connection was cut by us, for the sake of an operation that was stopped.
    pub(super) cut_by_us: AtomicBool,
}

impl State {
    /// What fetches what was gathered, where it does not come on the connection.
    pub(super) fn fetch(&self) -> Option<&dyn Fetch> {
        match &self.arrival {
            Arrival::Fetched(fetch) => Some(&**fetch),
            Arrival::Sent(_) => None,
        }
    }

    /// Keeps what is not wanted any more until nothing touches it.
    pub(super) fn adopt(&self, orphan: Orphan) {
        match &self.arrival {
            Arrival::Fetched(fetch) => fetch.adopt(orphan),
            Arrival::Sent(rooms) => rooms.adopt(orphan),
        }
    }

    /// Says now and then that what comes from the peer is not what it sends. Nothing of it is used.
    pub(super) fn complain(&self, error: &Error) {
        let from = self.address.ip().to_canonical();
        if let Some(others) = self.mentions.lock().mention(from.into(), Instant::now()) {
            tracing::warn!(
                "a connection to {from} was ended, and what was on it is asked for again: {error} ({others} others since the last such line)"
            );
        }
    }

    /// Ends everything that waits in line.
    pub(super) fn fail_all(&self, error: &Error) {
        let (operations, questions) = {
            let mut queue = self.queue.lock();
            (std::mem::take(&mut queue.operations), std::mem::take(&mut queue.questions))
        };
        for operation in operations {
            operation.custody().stop(error.clone());
        }
        for question in questions {
            question.answer(Err(error.clone()));
        }
    }

    /// Why a connection failed: whatever it says, because we closed it, if we did.
    pub(super) fn why(&self, error: Error) -> Error {
        if self.queue.lock().closing { Error::Disconnected } else { error }
    }

    /// Opens the connection of a lane. One that ends before it is answered is opened again: who listens there may have
    /// more strangers than places, and drops some that it has not heard.
    pub(super) async fn open(&self, lane: usize, patience: Duration) -> Result<Channel, Error> {
        let until = Instant::now() + patience;
        let (mut tries, mut pause) = (0, FIRST_PAUSE);
        loop {
            tries += 1;
            let error = match self.open_once(lane, until).await {
                Ok(channel) => return Ok(channel),
                Err(Unopened::Failed(error)) => return Err(error),
                // It may be we who ended it.
                Err(Unopened::Ended(_)) if self.queue.lock().closing => {
                    return Err(Error::Disconnected);
                }
                Err(Unopened::Ended(error)) => error,
            };
            if Instant::now() + pause >= until {
                return Err(Error::PeerLost(format!(
                    "{} has ended {tries} connections without an answer ({error}): its port has too many of them, or \
                     belongs to another process or another version of kvferry",
                    self.address
                )));
            }
            sleep(pause).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    async fn open_once(&self, lane: usize, until: Instant) -> Result<Channel, Unopened> {
        let address = self.address;
        let patience = until
            .saturating_duration_since(Instant::now())
            .clamp(Duration::from_millis(1), CONNECT_PATIENCE);
        let late = |_| io::Error::new(io::ErrorKind::TimedOut, "connection timed out");
        let connecting = timeout(patience, tokio::net::TcpStream::connect(address));
        let connected = connecting.await.map_err(late).flatten();
        let stream = connected
            .and_then(tokio::net::TcpStream::into_std)
            .map_err(|error| Error::PeerLost(format!("connecting to {address}: {error}")))?;
        let stream = Arc::new(stream);
        *self.lanes[lane].stream.lock() = Some(stream.clone());
        // Closing cuts the streams it sees: it saw this one, or we see that it ran.
        if self.queue.lock().closing {
            return Err(Error::Disconnected.into());
        }
        let (said, socket) = self.greet(stream, until).await?;
        self.seals.store(said.terms.content, Ordering::Relaxed);
        Ok(Channel::new(socket, End::Client, said.terms, &self.secret.secrets(&said)))
    }

    async fn greet(
        &self,
        stream: Arc<TcpStream>,
        until: Instant,
    ) -> Result<(Said, Socket), Unopened> {
        let silent = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => Unopened::Ended(error),
            _ => {
                let what = format!("no greeting from {}: {error}", self.address);
                Unopened::Failed(Error::PeerLost(what))
            }
        };
        let until = until.min(Instant::now() + HELLO_PATIENCE);
        socket::set_up(&stream).map_err(silent)?;
        let socket = Socket::new(stream, SENDING).map_err(silent)?;
        let content = self.encrypt.with(self.address.ip());
        let terms = Terms { cipher: Cipher::of_this_processor(), content };
        let hello = Hello { nonce: random()?, terms }.encode();
        socket.send([&hello]).await.map_err(silent)?;
        let mut bytes = [0; Challenge::BYTES];
        let answered = timeout_at(until.into(), socket.receive([&mut bytes])).await;
        answered.map_err(|_| io::ErrorKind::TimedOut.into()).flatten().map_err(silent)?;
        let Challenge { nonce, terms, proof } =
            Challenge::decode(&bytes).map_err(Error::PeerMisbehaved)?;
        let said = Said { hello, nonce, terms };
        if !self.secret.is_proven(End::Server, &said, &proof) {
            return Err(Error::PeerLost(format!(
                "whoever answers at {} does not know the token of the peer's description: another \
                 process has its port",
                self.address
            ))
            .into());
        }
        let proof = self.secret.prove(End::Client, &said);
        socket.send([&proof]).await.map_err(silent)?;
        Ok((said, socket))
    }
}

/// Why a connection was not opened.
enum Unopened {
    /// The other end closed it before it had answered.
    Ended(io::Error),
    /// Otherwise: nothing to try again.
    Failed(Error),
}

impl From<Error> for Unopened {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Lane {
    pub(super) fn forget(&self, id: u64) {
        let mut on_the_way = self.on_the_way.lock();
        if let Some(at) = on_the_way.iter().position(|&other| other == id) {
            on_the_way.swap_remove(at);
        }
    }

    /// Wakes the lane from whatever it waits for on its connection.
    pub(super) fn cut(&self) {
        if let Some(stream) = self.stream.lock().as_ref() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}
