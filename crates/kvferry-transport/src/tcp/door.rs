//! Who comes to a server's port. One thread accepts, and hears out all who have proven nothing yet; whoever has proven
//! itself is handed on, to be served by a task of the I/O threads.
//!
//! A stranger has one deadline for all that it has to say, however it trickles in, and a place among a bounded number
//! of them ([`Strangers`]), which are apart from those of the connections that are served.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Registry, Token};
use socket2::SockRef;

use super::connections::Shared;
use super::greeting::{Greeting, Next, Refusal};
use super::proof::Said;
use crate::contract::Error;
use crate::strangers::Strangers;

/// New connections that wait until they are accepted: the kernel drops more of them, and who connects asks again only
/// a second later. (The kernel has a limit of its own, `net.core.somaxconn`.)
const BACKLOG: i32 = 4096;
/// So many are accepted before those that are inside are heard again.
const BATCH: usize = 64;
/// How long to wait where the system has no more files for new connections.
const PAUSE: Duration = Duration::from_millis(100);

const LISTENER: Token = Token(usize::MAX);

struct Stranger {
    stream: TcpStream,
    peer: SocketAddr,
    until: Instant,
    greeting: Greeting,
}

/// What became of a stranger that was heard.
enum Heard {
    /// It has not said everything yet.
    Waits,
    Proven(Said),
    /// It left, or failed.
    Gone,
    Refused(Refusal),
    /// There is no room for what it would be.
    Crowded(String),
}

pub(super) struct Door {
    shared: Arc<Shared>,
    poll: Poll,
    places: Strangers,
    /// By the numbers of their places: the oldest, which is the first that is late, comes first.
    inside: BTreeMap<u64, Stranger>,
    /// From when on there may be someone to accept.
    knocked: Option<Instant>,
}

impl Door {
    pub(super) fn open(shared: Arc<Shared>) -> Result<Self, Error> {
        let listener = &shared.listener;
        let open = || {
            SockRef::from(listener).listen(BACKLOG)?;
            listener.set_nonblocking(true)?;
            let poll = Poll::new()?;
            let source = &mut SourceFd(&listener.as_raw_fd());
            poll.registry().register(source, LISTENER, Interest::READABLE)?;
            Ok(poll)
        };
        let failed = |error: io::Error| Error::system("waiting for connections", &error);
        let poll = open().map_err(failed)?;
        let places = Strangers::new(shared.bounds.strangers);
        let inside = BTreeMap::new();
        Ok(Self { shared, poll, places, inside, knocked: None })
    }

    /// Until the server closes.
    pub(super) fn attend(mut self) {
        let mut events = Events::with_capacity(1024);
        loop {
            let waited = self.poll.poll(&mut events, self.patience());
            if self.shared.is_closing() {
                return;
            }
            if let Err(error) = waited {
                if error.kind() != io::ErrorKind::Interrupted {
                    self.complain(&error);
                    std::thread::sleep(PAUSE);
                }
                continue;
            }
            // First those who are inside: who has spoken in time is not turned out for a newcomer.
            for event in &events {
                match event.token() {
                    // Not before a pause is over.
                    LISTENER => _ = self.knocked.get_or_insert_with(Instant::now),
                    Token(id) => self.hear(id as u64),
                }
            }
            self.turn_out_the_late();
            if self.knocked.is_some_and(|since| since <= Instant::now()) {
                self.knocked = self.accept();
            }
        }
    }

    /// How long there is nothing to do unless somebody says something.
    fn patience(&self) -> Option<Duration> {
        let late = self.inside.first_key_value().map(|(_, stranger)| stranger.until);
        let next = self.knocked.into_iter().chain(late).min();
        next.map(|next| next.saturating_duration_since(Instant::now()))
    }

    /// Accepts some. When to look again, unless all were accepted.
    fn accept(&mut self) -> Option<Instant> {
        for _ in 0..BATCH {
            match self.shared.listener.accept() {
                Ok((stream, peer)) => self.let_in(stream, peer),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return None,
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                    _ => {
                        // Out of files, say: others may give some back.
                        self.complain(&error);
                        return Some(Instant::now() + PAUSE);
                    }
                },
            }
        }
        Some(Instant::now())
    }

    /// Says now and then what keeps it from accepting.
    fn complain(&self, error: &io::Error) {
        // Nobody connects from this address.
        let nobody = IpAddr::from(Ipv4Addr::UNSPECIFIED);
        if self.shared.mentions.lock().mention(nobody.into(), Instant::now()).is_some() {
            tracing::warn!("accepting a connection: {error}");
        }
    }

    fn let_in(&mut self, stream: TcpStream, peer: SocketAddr) {
        let (id, gone) = self.places.enter(peer.ip().into());
        if let Some(gone) = gone {
            let why = "too many have proven nothing yet, and most of them come from there";
            self.turn_out(gone, Some(&why));
        }
        let source = &mut SourceFd(&stream.as_raw_fd());
        let ready = stream.set_nonblocking(true).and_then(|()| {
            self.poll.registry().register(source, Token(id as usize), Interest::READABLE)
        });
        if ready.is_err() {
            self.places.leave(id);
            return;
        }
        let until = Instant::now() + self.shared.bounds.greeting;
        let greeting = Greeting::new(self.shared.delivery.seals(peer.ip()));
        self.inside.insert(id, Stranger { stream, peer, until, greeting });
    }

    fn hear(&mut self, id: u64) {
        let Some(stranger) = self.inside.get_mut(&id) else { return };
        match stranger.hear(&self.shared) {
            Heard::Waits => {}
            Heard::Gone => self.turn_out(id, None),
            Heard::Refused(refusal) => {
                if let Refusal::Version(_, answer) = &refusal {
                    let _ = stranger.stream.write_all(answer);
                }
                self.turn_out(id, Some(&refusal));
            }
            Heard::Crowded(why) => self.turn_out(id, Some(&why)),
            Heard::Proven(said) => {
                self.places.leave(id);
                let Some(stranger) = self.inside.remove(&id) else { return };
                if stranger.released(self.poll.registry()).is_ok() {
                    self.shared.serve_from_now_on(stranger.stream, stranger.peer, said);
                }
            }
        }
    }

    fn turn_out_the_late(&mut self) {
        let now = Instant::now();
        while let Some((&id, stranger)) = self.inside.first_key_value()
            && stranger.until <= now
        {
            let why =
                format!("it took {:?} and had not proven itself", self.shared.bounds.greeting);
            self.turn_out(id, Some(&why));
        }
    }

    fn turn_out(&mut self, id: u64, why: Option<&dyn Display>) {
        self.places.leave(id);
        // Closing it takes it off the list of those who are waited for, too.
        if let Some(stranger) = self.inside.remove(&id)
            && let Some(why) = why
        {
            self.shared.turn_away(stranger.peer, why);
        }
    }
}

impl Stranger {
    /// All that it has said since.
    fn hear(&mut self, shared: &Shared) -> Heard {
        loop {
            let bytes = match self.stream.read(self.greeting.room()) {
                Ok(0) => return Heard::Gone,
                Ok(bytes) => bytes,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Heard::Waits,
                    io::ErrorKind::Interrupted => continue,
                    _ => return Heard::Gone,
                },
            };
            match self.greeting.came(bytes, &shared.secret) {
                Ok(Next::More) => {}
                Ok(Next::Answer(answer)) => {
                    // Before it is answered: who gets no answer knows that it may try again.
                    if let Err(why) = shared.has_room(self.peer) {
                        return Heard::Crowded(why);
                    }
                    // Nothing else is on its way there: so few bytes always go at once.
                    if self.stream.write_all(&answer).is_err() {
                        return Heard::Gone;
                    }
                }
                Ok(Next::Proven(said)) => return Heard::Proven(said),
                Err(refusal) => return Heard::Refused(refusal),
            }
        }
    }

    /// Its socket is nobody's any more, and waits again where it has to.
    fn released(&self, registry: &Registry) -> io::Result<()> {
        registry.deregister(&mut SourceFd(&self.stream.as_raw_fd()))?;
        self.stream.set_nonblocking(false)
    }
}
