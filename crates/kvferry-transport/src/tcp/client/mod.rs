//! One peer, seen from the side that asks: a few connections, each with its thread.
//!
//! Each thread (a lane) keeps several requests on the way, so that the server always has the next
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
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::Mutex;

pub use self::arrival::{Arrival, Fetch, Fetched, Orphan, Room, Rooms};
use self::lane::LaneThread;
pub(crate) use self::state::PeerRegions;
use self::state::{Lane, Question, State};
pub use self::state::{Lanes, Packs};
use super::proof::Secret;
use crate::contract::{Error, Instance};
use crate::shared::chunks::Chunked;
use crate::shared::custody::Interrupt;
use crate::shared::rate::RateWatch;
use crate::shared::thread::outlive;

/// Connections to one server.
#[derive(Debug)]
pub struct Client {
    /// What is said of slow transfers from it.
    pub rate: Arc<RateWatch>,
    state: Arc<State>,
    threads: Mutex<Vec<JoinHandle<()>>>,
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
            work: parking_lot::Condvar::new(),
            lanes: (0..lanes.count.max(1)).map(|_| Lane::default()).collect(),
            gathers: lanes.gathers,
            packs: Mutex::new(address.packs),
            encrypt: lanes.encrypt,
            seals: AtomicBool::new(false),
            arrival,
            mentions: Mutex::default(),
        });
        let open = || {
            let patience = deadline.saturating_duration_since(Instant::now());
            state.open(0, patience).map_err(|error| match error {
                Error::PeerLost(_) if Instant::now() >= deadline => Error::DeadlinePassed,
                error => error,
            })
        };
        let mut first = Some(open()?);
        let threads = Mutex::default();
        let client = Arc::new(Self { rate: Arc::new(rate), state, threads });
        for lane in 0..client.state.lanes.len() {
            let thread = std::thread::Builder::new().name(format!("kvferry-lane{lane}")).spawn({
                let state = client.state.clone();
                let channel = first.take();
                move || {
                    let (mut lane, mut began) = (LaneThread::new(&state, lane, channel), false);
                    outlive("a connection", || {
                        // No other thread takes in what this one has asked for.
                        if std::mem::replace(&mut began, true) {
                            lane.broken(&Error::Library(
                                "the thread that reads has panicked".to_owned(),
                            ));
                        }
                        lane.run();
                    });
                }
            });
            match thread {
                Ok(thread) => client.threads.lock().push(thread),
                Err(error) => {
                    client.close();
                    return Err(Error::system("starting a thread", &error));
                }
            }
        }
        Ok(client)
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
        let (to, answer) = crossbeam_channel::bounded(1);
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

    /// Ends all operations, connections and threads. Nothing lands after this.
    pub fn close(&self) {
        self.state.queue.lock().closing = true;
        self.state.fail_all(&Error::Disconnected);
        self.state.work.notify_all();
        for lane in &self.state.lanes {
            lane.cut();
        }
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            // A lane may be the last that let go of what has this client.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
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
