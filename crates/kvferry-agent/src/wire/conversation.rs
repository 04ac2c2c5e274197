//! Messages between two programs that are no engines, but prove themselves to each other as engines do: the two ends of a
//! link test.
//!
//! Each call waits until a deadline at most. What strangers can take of the end that listens is bounded as at an engine's
//! own port.

use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use tokio::time::{timeout, timeout_at};

use super::channel::{self, MAX_OPENING, Receiver, Sender, io_error};
use super::link::{Caller, connect, greet};
use super::listener::listen;
use super::message::{Hello, Welcome, decode_opening, encode_opening};
use super::owner;
use super::places::{Limits, Waiting};
use super::reach::Reach;
use super::ticket::Incarnation;
use super::trust::Trust;
use super::version::Version;
use crate::error::{Error, PeerError};

/// So many connections may be proving themselves at once to an end that waits for one.
const STRANGERS: usize = 64;

/// A connection whose other end has proven itself.
pub struct Conversation {
    runtime: Arc<Runtime>,
    sender: Sender,
    receiver: Receiver,
    socket: TcpStream,
    who: String,
}

impl Conversation {
    /// Connects to whoever listens at `host:port`, and says that this is `name`.
    pub fn open(
        address: &str,
        trust: &Trust,
        name: &str,
        deadline: Instant,
    ) -> Result<Self, PeerError> {
        let runtime = runtime().map_err(|error| io_error("starting", &error))?;
        let caller = Caller {
            who: name.to_owned(),
            trust: trust.clone(),
            version: Version::CURRENT,
            reach: Reach::Own,
            keepalive: Limits::default().idle,
        };
        let opened = runtime.block_on(async {
            let until = deadline.into();
            let stream = timeout_at(until, connect(address, &caller.reach)).await;
            let stream = stream.unwrap_or(Err(PeerError::Slow("connecting")))?;
            let socket = twin(&stream)?;
            let greeted = timeout_at(until, greet(stream, address, &caller)).await;
            let greeted = greeted.unwrap_or(Err(PeerError::NoGreeting("nothing came in time")))?;
            Ok((greeted, socket))
        });
        let ((sender, receiver, welcome), socket) = opened?;
        Ok(Self { runtime: Arc::new(runtime), sender, receiver, socket, who: welcome.engine })
    }

    /// Who the other end says that it is.
    pub fn who(&self) -> &str {
        &self.who
    }

    /// The socket, to be asked about: what goes over it is this conversation's.
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Sends a message.
    pub fn send(&mut self, message: &[u8], deadline: Instant) -> Result<(), PeerError> {
        let sent =
            async { timeout_at(deadline.into(), self.sender.send(message)).await.map_err(|_| ()) };
        self.runtime.block_on(sent).unwrap_or(Err(PeerError::Slow("sending")))
    }

    /// Receives a message of at most `longest` bytes.
    pub fn receive(&mut self, longest: usize, deadline: Instant) -> Result<Vec<u8>, PeerError> {
        let received = async {
            timeout_at(deadline.into(), self.receiver.receive(longest)).await.map_err(|_| ())
        };
        self.runtime.block_on(received).unwrap_or(Err(PeerError::Slow("receiving")))
    }
}

/// An address at which conversations are begun.
pub struct Listening {
    runtime: Arc<Runtime>,
    listener: TcpListener,
    trust: Trust,
    address: SocketAddr,
}

impl Listening {
    /// Listens at an address.
    pub fn start(bind: SocketAddr, trust: Trust) -> Result<Self, Error> {
        trust.check_bind(bind)?;
        let runtime = runtime().map_err(|error| Error::Io {
            what: "starting to listen".to_owned(),
            kind: error.kind(),
        })?;
        let (listener, address) = listen(bind, None, runtime.handle())?;
        Ok(Self { runtime: Arc::new(runtime), listener, trust, address })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for the first to prove itself, and tells it that this is `name`; `None` if nobody has done so by the deadline.
    /// `turned_away` hears of those who could not.
    pub fn accept(
        &self,
        name: &str,
        deadline: Instant,
        mut turned_away: impl FnMut(SocketAddr, &PeerError),
    ) -> Option<Conversation> {
        let limits = Limits { strangers: STRANGERS, ..Limits::default() };
        let accepted = async {
            let (mut all, mut places) = (JoinSet::new(), Waiting::new(limits.strangers));
            loop {
                tokio::select! {
                    // Whoever has proven itself goes before those who have not begun.
                    biased;
                    Some(Ok((number, from, opened))) = all.join_next() => {
                        places.leave(number);
                        match opened {
                            Ok(opened) => break opened,
                            Err(error) => turned_away(from, &error),
                        }
                    }
                    accepted = self.listener.accept() => {
                        let Ok((stream, from)) = accepted else {
                            // Out of descriptors, most likely: nothing is gained by trying at once.
                            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                            continue;
                        };
                        let (number, lost) = places.enter(from.ip().into());
                        let (trust, name) = (self.trust.clone(), name.to_owned());
                        all.spawn(async move {
                            let opened = tokio::select! {
                                biased;
                                opened = timeout(limits.opening, hear(stream, from, &trust, name)) => {
                                    opened.unwrap_or(Err(PeerError::Slow("proving itself")))
                                }
                                _ = lost => Err(PeerError::Slow("proving itself at a port that is full")),
                            };
                            (number, from, opened)
                        });
                    }
                }
            }
        };
        let accepted = async { timeout_at(deadline.into(), accepted).await.ok() };
        let (sender, receiver, socket, who) = self.runtime.block_on(accepted)?;
        Some(Conversation { runtime: self.runtime.clone(), sender, receiver, socket, who })
    }
}

/// Hears a stranger out until it has proven itself.
async fn hear(
    stream: tokio::net::TcpStream,
    from: SocketAddr,
    trust: &Trust,
    name: String,
) -> Result<(Sender, Receiver, TcpStream, String), PeerError> {
    let near = stream.set_nodelay(true).and_then(|()| stream.local_addr());
    owner::check(trust, near.map_err(|error| io_error("accepting", &error))?, from)?;
    let socket = twin(&stream)?;
    let (mut sender, mut receiver) = channel::accept(stream, trust).await?;
    let hello = receiver.receive(MAX_OPENING).await?;
    let opening = decode_opening(Version::CURRENT, &hello);
    let welcome = Welcome { engine: name, incarnation: Incarnation(0), term_ms: 0 };
    // One of another version has proven itself: it may know which this is.
    sender.send(&encode_opening(Version::CURRENT, &welcome)).await?;
    let (_, hello): (_, Hello) = opening?;
    let who = hello.who.chars().filter(|c| !c.is_control()).take(200).collect();
    Ok((sender, receiver, socket, who))
}

fn runtime() -> std::io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// The same socket again, to be asked about.
fn twin(stream: &tokio::net::TcpStream) -> Result<TcpStream, PeerError> {
    let twin = stream.as_fd().try_clone_to_owned();
    twin.map(TcpStream::from).map_err(|error| io_error("connecting", &error))
}
