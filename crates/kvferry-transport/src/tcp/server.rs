//! Serves this process's registered memory, and takes in notifications.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::frame::{self, Answer, Hello, Request, Token, Verb, Verdict, Welcome};
use super::socket;
use crate::error::{Error, InvalidFrame};
use crate::region::Regions;
use crate::transport::{Instance, Notification};

/// How long a new connection may take to say who it is.
const HELLO_PATIENCE: Duration = Duration::from_secs(5);
/// Connections served at once; more are turned away.
const MAX_CONNECTIONS: usize = 4096;
/// Notifications kept for a caller that does not collect them; then their senders wait.
const MAX_INBOX: usize = 1 << 16;
/// Sessions whose notifications are remembered.
const MAX_SESSIONS: usize = 1 << 16;

#[derive(Debug)]
pub(crate) struct Server {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    listener: TcpListener,
    token: Token,
    instance: Instance,
    regions: Arc<Regions>,
    generation: Arc<dyn Generation>,
    state: Mutex<State>,
    /// A connection ended, or the server is closing.
    ended: Condvar,
    inbox: Inbox,
}

/// Counts the changes of the table of regions.
pub(crate) trait Generation: std::fmt::Debug + Send + Sync {
    /// How often the table has changed.
    fn get(&self) -> u64;
}

impl Generation for AtomicU64 {
    fn get(&self) -> u64 {
        self.load(Ordering::SeqCst)
    }
}

#[derive(Debug, Default)]
struct State {
    closing: bool,
    next: u64,
    connections: HashMap<u64, Connection>,
    /// The last notification taken in of each session.
    heard: HashMap<[u8; 16], u64>,
    /// The same sessions, oldest first.
    sessions: VecDeque<[u8; 16]>,
    finished: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Connection {
    stream: Arc<TcpStream>,
    /// Known once the hello has been accepted.
    lane: Option<([u8; 16], u32)>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Inbox {
    queue: Mutex<VecDeque<Notification>>,
    changed: Condvar,
}

/// Why a connection ended.
#[derive(Debug)]
enum End {
    Closed,
    Io(io::Error),
    Invalid(InvalidFrame),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<InvalidFrame> for End {
    fn from(error: InvalidFrame) -> Self {
        Self::Invalid(error)
    }
}

impl Server {
    pub(crate) fn start(
        bind: SocketAddr,
        token: Token,
        instance: Instance,
        regions: Arc<Regions>,
        generation: Arc<dyn Generation>,
    ) -> Result<Self, Error> {
        let listener = TcpListener::bind(bind)
            .map_err(|error| Error::system(format!("listening on {bind}"), &error))?;
        let shared = Arc::new(Shared {
            listener,
            token,
            instance,
            regions,
            generation,
            state: Mutex::default(),
            ended: Condvar::new(),
            inbox: Inbox::default(),
        });
        let acceptor = std::thread::Builder::new()
            .name("kvferry-accept".to_owned())
            .spawn({
                let shared = shared.clone();
                move || shared.accept()
            })
            .map_err(|error| Error::system("starting a thread", &error))?;
        Ok(Self { shared, acceptor: Some(acceptor) })
    }

    pub(crate) fn address(&self) -> Result<SocketAddr, Error> {
        self.shared
            .listener
            .local_addr()
            .map_err(|error| Error::system("asking for the listening address", &error))
    }

    pub(crate) fn notifications(&self, until: Instant) -> Vec<Notification> {
        let inbox = &self.shared.inbox;
        let mut queue = inbox.lock();
        while queue.is_empty() {
            let pause = until.saturating_duration_since(Instant::now());
            if pause.is_zero() {
                break;
            }
            queue =
                inbox.changed.wait_timeout(queue, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
        let all = queue.drain(..).collect();
        inbox.changed.notify_all();
        all
    }

    /// Ends every connection; clients that still want something connect again.
    pub(crate) fn cut_all(&self) {
        for connection in self.shared.lock().connections.values() {
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let mut threads = {
            let mut state = self.shared.lock();
            state.closing = true;
            for connection in state.connections.values() {
                let _ = connection.stream.shutdown(Shutdown::Both);
            }
            let State { connections, finished, .. } = &mut *state;
            let running = connections.values_mut().filter_map(|c| c.thread.take());
            finished.drain(..).chain(running).collect::<Vec<_>>()
        };
        self.shared.ended.notify_all();
        // Lock and release, so that no connection is between its check and its wait.
        drop(self.shared.inbox.lock());
        self.shared.inbox.changed.notify_all();
        // SAFETY: the descriptor is the live listener's; shutting it down wakes the acceptor.
        unsafe { libc::shutdown(self.shared.listener.as_raw_fd(), libc::SHUT_RDWR) };
        threads.extend(self.acceptor.take());
        // The acceptor may have added a connection meanwhile: it looks at `closing` under the lock.
        for thread in threads {
            let _ = thread.join();
        }
    }
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Notification>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: &Arc<Self>) {
        loop {
            let accepted = self.listener.accept();
            let mut state = self.lock();
            if state.closing {
                return;
            }
            for thread in state.finished.drain(..) {
                // It has ended, or is about to: it put itself here as its last act.
                let _ = thread.join();
            }
            let stream = match accepted {
                Ok((stream, _)) if state.connections.len() < MAX_CONNECTIONS => Arc::new(stream),
                Ok(_) => continue,
                Err(error) => {
                    drop(state);
                    // Out of descriptors, say: others may give some back.
                    tracing::warn!("accepting a connection: {error}");
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            let id = state.next;
            state.next += 1;
            let spawned = std::thread::Builder::new().name("kvferry-serve".to_owned()).spawn({
                let shared = self.clone();
                let stream = stream.clone();
                move || shared.run(id, &stream)
            });
            match spawned {
                Ok(thread) => {
                    state
                        .connections
                        .insert(id, Connection { stream, lane: None, thread: Some(thread) });
                }
                Err(error) => tracing::warn!("starting a thread for a connection: {error}"),
            }
        }
    }

    fn run(&self, id: u64, stream: &TcpStream) {
        let end = self.serve(id, stream);
        let peer = || stream.peer_addr().map_or_else(|e| e.to_string(), |a| a.to_string());
        match end {
            Ok(()) | Err(End::Closed) => {}
            Err(End::Io(error)) => tracing::debug!("the connection from {} ended: {error}", peer()),
            Err(End::Invalid(error)) => {
                tracing::warn!("ending the connection from {}: {error}", peer());
            }
        }
        let _ = stream.shutdown(Shutdown::Both);
        let mut state = self.lock();
        if let Some(connection) = state.connections.remove(&id) {
            state.finished.extend(connection.thread);
        }
        self.ended.notify_all();
    }

    /// Serves one connection until it ends.
    fn serve(&self, id: u64, stream: &TcpStream) -> Result<(), End> {
        let session = self.greet(id, stream)?;
        let mut body = Vec::new();
        let mut pieces = Vec::with_capacity(frame::MAX_PIECES);
        let mut entries = Vec::with_capacity(frame::MAX_PIECES + 1);
        loop {
            let mut header = [0; Request::BYTES];
            match socket::receive_bytes(stream, &mut header) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                other => other?,
            }
            let request = Request::decode(&header)?;
            body.resize(request.piece_bytes(), 0);
            socket::receive_bytes(stream, &mut body)?;
            if matches!(request.verb, Verb::Read | Verb::Write) {
                frame::pieces(&request, &body, &mut pieces)?;
            }
            let mut answer = Answer { verdict: Verdict::Done, id: request.id, bytes: 0 };
            match request.verb {
                Verb::Read | Verb::Write => {
                    let holds = self.regions.serve(&pieces);
                    if let Err(error) = holds {
                        if let Error::OutsideRegion { address, .. } = error {
                            answer.bytes = address;
                        }
                        if request.verb == Verb::Write {
                            discard(stream, request.bytes)?;
                        }
                        answer.verdict = Verdict::Outside;
                        socket::send_bytes(stream, &answer.encode())?;
                        continue;
                    }
                    entries.clear();
                    if request.verb == Verb::Read {
                        answer.bytes = request.bytes;
                        let header = answer.encode();
                        entries.push(socket::entry_of(&header));
                        entries.extend(pieces.iter().map(|&(at, n)| socket::entry(at, n)));
                        // SAFETY: the pieces lie in registered regions, which may be read at any
                        // time (`Transport::register`) and are held while they are served.
                        unsafe { socket::send_all(stream, &mut entries)? };
                    } else {
                        entries.extend(pieces.iter().map(|&(at, n)| socket::entry(at, n)));
                        // SAFETY: the pieces lie in registered regions, which may be written at any
                        // time (`Transport::register`) and are held while they are written.
                        unsafe { socket::receive_all(stream, &mut entries)? };
                        socket::send_bytes(stream, &answer.encode())?;
                    }
                }
                Verb::Notify => {
                    let mut message = vec![0; request.bytes as usize];
                    socket::receive_bytes(stream, &mut message)?;
                    self.hear(&session, request.id, message)?;
                    socket::send_bytes(stream, &answer.encode())?;
                }
                Verb::Table => {
                    // The generation first: a table that changes meanwhile is newer than it says.
                    let mut table = self.generation.get().to_le_bytes().to_vec();
                    for region in self.regions.spans().0 {
                        frame::put_piece(&mut table, region.base, region.bytes);
                    }
                    answer.bytes = table.len() as u64;
                    let mut message = answer.encode().to_vec();
                    message.append(&mut table);
                    socket::send_bytes(stream, &message)?;
                }
            }
        }
    }

    fn greet(&self, id: u64, stream: &TcpStream) -> Result<Hello, End> {
        socket::set_up(stream)?;
        stream.set_read_timeout(Some(HELLO_PATIENCE))?;
        stream.set_write_timeout(Some(HELLO_PATIENCE))?;
        let mut bytes = [0; Hello::BYTES];
        socket::receive_bytes(stream, &mut bytes)?;
        let hello = Hello::decode(&bytes)?;
        let mut proof = vec![0; hello.proof_bytes as usize];
        socket::receive_bytes(stream, &mut proof)?;
        let admitted = same(&hello.token, &self.token) && self.replace(id, &hello);
        let welcome = Welcome { admitted, instance: self.instance.0, proof_bytes: 0 };
        socket::send_bytes(stream, &welcome.encode())?;
        if !admitted {
            return Err(End::Closed);
        }
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(None)?;
        Ok(hello)
    }

    /// Makes this connection the one of its lane, once the one before has ended: the client then
    /// knows that nothing it sent over that one can land any more.
    fn replace(&self, id: u64, hello: &Hello) -> bool {
        let lane = (hello.session, hello.lane);
        let until = Instant::now() + HELLO_PATIENCE;
        let mut state = self.lock();
        loop {
            let before = state.connections.values().find(|c| c.lane == Some(lane));
            let Some(before) = before else { break };
            let _ = before.stream.shutdown(Shutdown::Both);
            let pause = until.saturating_duration_since(Instant::now());
            if pause.is_zero() || state.closing {
                return false;
            }
            state = self.ended.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
        match state.connections.get_mut(&id) {
            Some(connection) => {
                connection.lane = Some(lane);
                true
            }
            None => false,
        }
    }

    /// Takes in a notification, unless it came before.
    fn hear(&self, hello: &Hello, number: u64, message: Vec<u8>) -> Result<(), End> {
        {
            let mut state = self.lock();
            if !state.heard.contains_key(&hello.session) {
                if state.sessions.len() >= MAX_SESSIONS
                    && let Some(oldest) = state.sessions.pop_front()
                {
                    state.heard.remove(&oldest);
                }
                state.sessions.push_back(hello.session);
            }
            let heard = state.heard.entry(hello.session).or_default();
            if number <= *heard {
                return Ok(());
            }
            *heard = number;
        }
        let mut queue = self.inbox.lock();
        while queue.len() >= MAX_INBOX {
            if self.lock().closing {
                return Err(End::Closed);
            }
            queue = self
                .inbox
                .changed
                .wait_timeout(queue, Duration::from_millis(100))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        queue.push_back(Notification { from: Instance(hello.instance), message });
        self.inbox.changed.notify_all();
        Ok(())
    }
}

/// Reads bytes that have nowhere to go, so that the refusal reaches the one who sent them.
fn discard(stream: &TcpStream, bytes: u64) -> io::Result<()> {
    let mut scratch = [0; 16 << 10];
    let mut left = bytes as usize;
    while left > 0 {
        let part = left.min(scratch.len());
        socket::receive_bytes(stream, &mut scratch[..part])?;
        left -= part;
    }
    Ok(())
}

/// Compares in a time that does not depend on where the difference is.
fn same(a: &Token, b: &Token) -> bool {
    std::iter::zip(a, b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}
