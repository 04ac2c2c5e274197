//! One peer, seen from the side that asks: a few connections, each with its task on the I/O threads.
//!
//! Each task (a lane) keeps several requests on the way, so that the server always has the next
//! one at hand. Bytes that arrive go straight to their destination. A connection that breaks is
//! opened again and what was on it is asked for again; only a peer that cannot be reached any more
//! is lost.

mod arrival;
mod fetching;
mod lane;
mod state;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::sleep;

pub use self::arrival::{Arrival, Fetch, Fetched, Orphan, Room, Rooms};
use self::lane::LaneTask;
pub(crate) use self::state::PeerRegions;
use self::state::{HELLO_PATIENCE, Lane, Question, State};
pub use self::state::{Lanes, Packs};
use super::proof::Secret;
use crate::contract::{Error, Instance};
use crate::shared::chunks::Chunked;
use crate::shared::custody::Interrupt;
use crate::shared::io::{IoThreads, Tasks, is_io_thread};
use crate::shared::rate::RateWatch;
use crate::shared::thread::unless_its_task_panics;

/// What panics at once again must not keep a core busy, nor fill the log.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Connections to one server.
#[derive(Debug)]
pub struct Client {
    /// What is said of slow transfers from it.
    pub rate: Arc<RateWatch>,
    state: Arc<State>,
    /// The lanes.
    tasks: Arc<Tasks>,
    io: Arc<IoThreads>,
}

/// What a client needs to know of a server.
#[derive(Clone, Copy, Debug)]
pub struct Address {
    /// What opens the door.
    pub secret: Secret,
    /// Where it listens.
    pub at: SocketAddr,
    /// What it packs into, if it packs.
    pub packs: Option<Packs>,
}

impl Client {
    /// Opens the first connection, and starts the lanes.
    pub fn open(
        address: Address,
        lanes: Lanes,
        rate: RateWatch,
        arrival: Arrival,
        deadline: Instant,
    ) -> Result<Arc<Self>, Error> {
        let state = Arc::new(State {
            secret: address.secret,
            address: address.at,
            queue: Mutex::default(),
            work: Notify::new(),
            lanes: (0..lanes.count.max(1)).map(|_| Lane::default()).collect(),
            gathers: lanes.gathers,
            packs: Mutex::new(address.packs),
            encrypt: lanes.encrypt,
            seals: AtomicBool::new(false),
            arrival,
            mentions: Mutex::default(),
        });
        let client = Arc::new(Self {
            rate: Arc::new(rate),
            state,
            tasks: Arc::default(),
            io: IoThreads::of_this_process()?,
        });
        let (opened, outcome) = bounded(1);
        let patience = deadline.saturating_duration_since(Instant::now());
        client.start(0, Some((patience, opened)));
        // It has the same deadline.
        outcome
            .recv_deadline(deadline + HELLO_PATIENCE)
            .unwrap_or(Err(Error::DeadlinePassed))
            .map_err(|error| match error {
                Error::PeerLost(_) if Instant::now() >= deadline => Error::DeadlinePassed,
                error => error,
            })?;
        for lane in 1..client.state.lanes.len() {
            client.start(lane, None);
        }
        Ok(client)
    }

    /// Starts a lane; the first connects at once, and says how that went.
    fn start(&self, number: usize, first: Option<(Duration, Sender<Result<(), Error>>)>) {
        let (running, state) = (self.tasks.begin(), self.state.clone());
        self.io.next().spawn(async move {
            // When it ends, nothing of it is left.
            let _running = running;
            let state = state;
            let mut lane = LaneTask::new(&state, number);
            if let Some((patience, opened)) = first {
                let outcome = lane.begin(patience).await;
                let failed = outcome.is_err();
                // Nobody may be waiting any more.
                let _ = opened.send(outcome);
                if failed {
                    return;
                }
            }
            let mut pause = FIRST_PAUSE;
            while unless_its_task_panics("a connection", lane.run()).await.is_none() {
                // Nobody else takes in what it has asked for.
                let error = Error::Library("what reads from the peer has panicked".to_owned());
                unless_its_task_panics("a connection", lane.broken(&error)).await;
                sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        });
    }

    /// Who the server is.
    pub fn instance(&self) -> Instance {
        self.state.secret.instance
    }

    /// What the peer packs into.
    pub fn packs(&self) -> Option<Packs> {
        *self.state.packs.lock()
    }

    /// Whether the bytes that are moved are encrypted on their way.
    pub fn encrypts(&self) -> bool {
        self.state.seals.load(Ordering::Relaxed)
    }

    /// The peer has said anew what it packs into.
    pub(super) fn repack(&self, packs: Option<Packs>) {
        *self.state.packs.lock() = packs;
    }

    /// Hands over an operation.
    pub fn post(&self, operation: Arc<Chunked>) {
        let mut queue = self.state.queue.lock();
        if queue.closing {
            drop(queue);
            operation.custody().stop(Error::Disconnected);
            return;
        }
        queue.operations.push_back(operation);
        drop(queue);
        self.state.work.notify_one();
    }

    /// Asks the peer for its regions.
    pub fn regions(&self, deadline: Instant) -> Result<PeerRegions, Error> {
        let (to, answer) = bounded(1);
        {
            let mut queue = self.state.queue.lock();
            if queue.closing {
                return Err(Error::Disconnected);
            }
            queue.questions.push_back(Question { to, until: deadline });
        }
        self.state.work.notify_one();
        answer.recv_deadline(deadline).unwrap_or_else(|error| {
            Err(if error.is_timeout() { Error::DeadlinePassed } else { Error::Disconnected })
        })
    }

    /// Ends all operations, connections and tasks. Nothing lands after this.
    pub fn close(&self) {
        self.state.queue.lock().closing = true;
        self.state.fail_all(&Error::Disconnected);
        self.state.work.notify_waiters();
        for lane in &self.state.lanes {
            lane.cut();
        }
        // A lane may be the last that let go of what has this client.
        if !is_io_thread() {
            self.tasks.wait();
        }
        // A lane may have given something back while it was being told.
        self.state.fail_all(&Error::Disconnected);
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
    }
}

impl Interrupt for Client {
    fn interrupt(&self, id: u64) {
        // Those that wait in line are simply dropped.
        self.state.queue.lock().operations.retain(|operation| operation.custody().id() != id);
        for lane in &self.state.lanes {
            // Held while it is cut: a lane strikes what was on the way off this list before it opens
            // another connection, and so never loses that one to what went by the one before.
            let on_the_way = lane.on_the_way.lock();
            if on_the_way.contains(&id) {
                lane.cut_by_us.store(true, Ordering::SeqCst);
                lane.cut();
            }
        }
    }
}
