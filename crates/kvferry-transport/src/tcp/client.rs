//! One peer, seen from the side that asks: a few connections, each with its thread.
//!
//! Each thread (a lane) keeps several requests on the way, so that the server always has the next
//! one at hand. Bytes that arrive go straight to their destination. A connection that breaks is
//! opened again and what was on it is asked for again; only a peer that cannot be reached any more
//! is lost.

mod lane;

use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use self::lane::LaneThread;
use super::frame::{Hello, Token, Welcome};
use super::proof::{CHALLENGE_BYTES, End, Nonce, is_proven, prove};
use super::socket;
use crate::error::Error;
use crate::progress::{Interrupt, Progress};
use crate::random::random;
use crate::rate::RateWatch;
use crate::region::Spans;
use crate::transport::Instance;

/// How long to wait for a connection, and for the answer to its hello.
const CONNECT_PATIENCE: Duration = Duration::from_secs(2);
const HELLO_PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) instance: Instance,
    pub(crate) rate: Arc<RateWatch>,
    me: Instance,
    addresses: Vec<SocketAddr>,
    token: Token,
    session: [u8; 16],
    queue: Mutex<Queue>,
    work: Condvar,
    lanes: Vec<Lane>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Queue {
    operations: VecDeque<Arc<Progress>>,
    /// Operations whose bytes are in place and whose notification has not left yet. The first
    /// lane sends them, in this order.
    notify: VecDeque<Arc<Progress>>,
    tables: VecDeque<Arc<TableRequest>>,
    closing: bool,
}

#[derive(Debug, Default)]
struct Lane {
    stream: Mutex<Option<Arc<TcpStream>>>,
    /// The operations that have a chunk on the way here.
    on_the_way: Mutex<Vec<u64>>,
    /// The connection was cut by us, for the sake of an operation that was stopped.
    cut: AtomicBool,
}

/// A question for the peer's regions.
#[derive(Debug, Default)]
pub(crate) struct TableRequest {
    answer: Mutex<Option<Result<Table, Error>>>,
    answered: Condvar,
}

/// A peer's regions, and how often they had changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) generation: u64,
    pub(crate) spans: Spans,
}

/// Why a connection could not be opened.
enum Refusal {
    /// The peer is not there any more, or is another: nothing it was sent can land.
    Gone(Error),
    /// No answer: it may be there or not.
    Silent(Error),
}

impl Refusal {
    fn error(&self) -> &Error {
        match self {
            Self::Gone(error) | Self::Silent(error) => error,
        }
    }
}

/// What a client needs to know of a server.
pub(crate) struct Address {
    pub(crate) instance: Instance,
    pub(crate) token: Token,
    pub(crate) addresses: Vec<SocketAddr>,
}

impl Link {
    /// Opens the first connection, and starts the lanes.
    pub(crate) fn open(
        address: Address,
        me: Instance,
        session: [u8; 16],
        lanes: usize,
        rate: RateWatch,
        deadline: Instant,
    ) -> Result<Arc<Self>, Error> {
        let link = Arc::new(Self {
            instance: address.instance,
            rate: Arc::new(rate),
            me,
            addresses: address.addresses,
            token: address.token,
            session,
            queue: Mutex::default(),
            work: Condvar::new(),
            lanes: (0..lanes.max(1)).map(|_| Lane::default()).collect(),
            threads: Mutex::default(),
        });
        let patience = deadline.saturating_duration_since(Instant::now());
        let first = link.open_lane(0, patience).map_err(|refusal| match refusal.error() {
            _ if Instant::now() >= deadline => Error::DeadlinePassed,
            error => error.clone(),
        })?;
        let mut first = Some(first);
        for lane in 0..link.lanes.len() {
            let thread = std::thread::Builder::new().name(format!("kvferry-lane{lane}")).spawn({
                let link = link.clone();
                let stream = first.take();
                move || LaneThread::new(&link, lane, stream).run()
            });
            match thread {
                Ok(thread) => link.threads().push(thread),
                Err(error) => {
                    link.close();
                    return Err(Error::system("starting a thread", &error));
                }
            }
        }
        Ok(link)
    }

    /// Hands over an operation.
    pub(crate) fn post(&self, operation: Arc<Progress>) {
        if operation.is_empty() {
            self.notify(operation);
            return;
        }
        let mut queue = self.lock();
        if queue.closing {
            drop(queue);
            operation.stop(Error::Disconnected);
            return;
        }
        queue.operations.push_back(operation);
        drop(queue);
        self.work.notify_one();
    }

    /// All bytes of an operation are in place: sends its notification, if it has one.
    pub(crate) fn notify(&self, operation: Arc<Progress>) {
        if operation.notification.is_none() {
            operation.notified();
            return;
        }
        let mut queue = self.lock();
        if queue.closing {
            drop(queue);
            operation.stop(Error::Disconnected);
            return;
        }
        queue.notify.push_back(operation);
        drop(queue);
        // Only the first lane sends notifications, and which lane one wake-up reaches is not ours
        // to say.
        self.work.notify_all();
    }

    /// Asks the peer for its regions.
    pub(crate) fn table(&self, deadline: Instant) -> Result<Table, Error> {
        let request = Arc::new(TableRequest::default());
        {
            let mut queue = self.lock();
            if queue.closing {
                return Err(Error::Disconnected);
            }
            queue.tables.push_back(request.clone());
        }
        self.work.notify_all();
        let mut answer = request.lock();
        loop {
            if let Some(answer) = answer.take() {
                return answer;
            }
            let pause = deadline.saturating_duration_since(Instant::now());
            if pause.is_zero() {
                return Err(Error::DeadlinePassed);
            }
            answer = request
                .answered
                .wait_timeout(answer, pause)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Ends all operations, connections and threads. Nothing lands after this.
    pub(crate) fn close(&self) {
        self.lock().closing = true;
        self.fail_all(&Error::Disconnected);
        self.work.notify_all();
        for lane in &self.lanes {
            lane.cut();
        }
        let threads = std::mem::take(&mut *self.threads());
        for thread in threads {
            let _ = thread.join();
        }
        // A lane may have given something back while it was being told.
        self.fail_all(&Error::Disconnected);
    }

    fn fail_all(&self, error: &Error) {
        let (operations, tables) = {
            let mut queue = self.lock();
            let queue = &mut *queue;
            let operations: Vec<_> =
                queue.operations.drain(..).chain(queue.notify.drain(..)).collect();
            (operations, std::mem::take(&mut queue.tables))
        };
        for operation in operations {
            operation.stop(error.clone());
        }
        for table in tables {
            table.set(Err(error.clone()));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_lane(&self, lane: usize, patience: Duration) -> Result<Arc<TcpStream>, Refusal> {
        let until = Instant::now() + patience;
        let mut last = Refusal::Silent(Error::PeerLost("it gave no address".to_owned()));
        for address in &self.addresses {
            let left = until.saturating_duration_since(Instant::now());
            let connected = TcpStream::connect_timeout(
                address,
                left.clamp(Duration::from_millis(1), CONNECT_PATIENCE),
            );
            last = match connected {
                Ok(stream) => {
                    let stream = Arc::new(stream);
                    *self.lanes[lane].lock_stream() = Some(stream.clone());
                    // `close` cuts the streams it sees: it saw this one, or we see that it ran.
                    if self.lock().closing {
                        return Err(Refusal::Gone(Error::Disconnected));
                    }
                    match self.greet(lane, &stream, until) {
                        Ok(()) => return Ok(stream),
                        Err(refusal) => refusal,
                    }
                }
                Err(error) => {
                    let lost = Error::PeerLost(format!("connecting to {address}: {error}"));
                    match error.kind() {
                        io::ErrorKind::ConnectionRefused => Refusal::Gone(lost),
                        _ => Refusal::Silent(lost),
                    }
                }
            };
        }
        Err(last)
    }

    fn greet(&self, lane: usize, stream: &TcpStream, until: Instant) -> Result<(), Refusal> {
        let silent = |error: io::Error| Refusal::Silent(Error::PeerLost(format!("hello: {error}")));
        let misbehaved = |error| Refusal::Gone(Error::PeerMisbehaved(error));
        let patience = until
            .saturating_duration_since(Instant::now())
            .clamp(Duration::from_millis(1), HELLO_PATIENCE);
        socket::set_up(stream).map_err(silent)?;
        stream.set_read_timeout(Some(patience)).map_err(silent)?;
        let hello = Hello {
            nonce: random().map_err(Refusal::Gone)?,
            instance: self.me.0,
            session: self.session,
            lane: lane as u32,
            proof_bytes: 0,
        };
        let hello = hello.encode();
        socket::send_bytes(stream, &hello).map_err(silent)?;
        let mut challenge = [0; CHALLENGE_BYTES];
        socket::receive_bytes(stream, &mut challenge).map_err(silent)?;
        let (nonce, proof) = challenge.split_at(32);
        let nonce: &Nonce = nonce.try_into().expect("it was split there");
        if !is_proven(&self.token, End::Server, &hello, nonce, proof) {
            let stranger = "who answers at its address does not know the token of its description";
            return Err(Refusal::Gone(Error::PeerLost(stranger.to_owned())));
        }
        let proof = prove(&self.token, End::Client, &hello, nonce);
        socket::send_bytes(stream, &proof).map_err(silent)?;
        let mut bytes = [0; Welcome::BYTES];
        socket::receive_bytes(stream, &mut bytes).map_err(silent)?;
        let welcome = Welcome::decode(&bytes).map_err(misbehaved)?;
        let mut proof = vec![0; welcome.proof_bytes as usize];
        socket::receive_bytes(stream, &mut proof).map_err(silent)?;
        stream.set_read_timeout(None).map_err(silent)?;
        let what = match (welcome.instance == self.instance.0, welcome.admitted) {
            (false, _) => "another process answers at its address",
            (true, false) => "it does not let this process in",
            (true, true) => return Ok(()),
        };
        Err(Refusal::Gone(Error::PeerLost(what.to_owned())))
    }
}

impl Interrupt for Link {
    fn interrupt(&self, id: u64) {
        {
            // Those that wait in line are simply dropped.
            let mut queue = self.lock();
            queue.operations.retain(|operation| operation.id != id);
            queue.notify.retain(|operation| operation.id != id);
        }
        for lane in &self.lanes {
            if lane.lock_on_the_way().contains(&id) {
                lane.cut.store(true, Ordering::SeqCst);
                lane.cut();
            }
        }
    }
}

impl Lane {
    fn lock_stream(&self) -> MutexGuard<'_, Option<Arc<TcpStream>>> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_on_the_way(&self) -> MutexGuard<'_, Vec<u64>> {
        self.on_the_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget(&self, id: u64) {
        let mut on_the_way = self.lock_on_the_way();
        if let Some(at) = on_the_way.iter().position(|&other| other == id) {
            on_the_way.swap_remove(at);
        }
    }

    /// Wakes the lane's thread from whatever it waits for on its connection.
    fn cut(&self) {
        if let Some(stream) = self.lock_stream().as_ref() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl TableRequest {
    fn lock(&self) -> MutexGuard<'_, Option<Result<Table, Error>>> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, answer: Result<Table, Error>) {
        *self.lock() = Some(answer);
        self.answered.notify_all();
    }
}
