//! The threads for connections, of those who serve and of those who ask: so many for a process, however many connections
//! there are.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::sleep;

use crate::contract::Error;

/// At most so many: one connection keeps a core busy, and eight of them carry what a host's memory does.
const MOST: usize = 8;
/// After so many turns of tasks a thread looks what has come: one that has much to send must not keep others waiting.
const TURNS: u32 = 4;

/// What a card or a library does mostly takes a few microseconds, and says nothing when it is done.
const LOOKS: u32 = 500;
/// What takes longer than that.
const PAUSE: Duration = Duration::from_millis(1);

/// Kept for as long as anybody has them.
static OF_THIS_PROCESS: Mutex<Weak<IoThreads>> = Mutex::new(Weak::new());

thread_local! {
    static IS_ONE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this is one of them: then it must not wait for what others of its tasks do.
pub fn is_io_thread() -> bool {
    IS_ONE.get()
}

/// A task's pauses while it waits for what wakes nobody: shorter ones first.
#[derive(Debug, Default)]
pub struct Pauses(u32);

impl Pauses {
    /// The next.
    pub async fn pause(&mut self) {
        self.0 = self.0.saturating_add(1);
        if self.0 < LOOKS { yield_now().await } else { sleep(PAUSE).await }
    }
}

/// What runs tasks, each of them on one of its threads.
#[derive(Debug)]
pub struct IoThreads {
    threads: Vec<IoThread>,
    next: AtomicUsize,
}

#[derive(Debug)]
struct IoThread {
    tasks: Handle,
    /// Its thread ends when this does.
    until: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl IoThreads {
    /// Those of this process, which begin with the first that asks.
    pub fn of_this_process() -> Result<Arc<Self>, Error> {
        let mut known = OF_THIS_PROCESS.lock();
        if let Some(threads) = known.upgrade() {
            return Ok(threads);
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (0..cores.clamp(1, MOST)).map(IoThread::start);
        let threads = threads.collect::<Result<_, _>>()?;
        let threads = Arc::new(Self { threads, next: AtomicUsize::new(0) });
        *known = Arc::downgrade(&threads);
        Ok(threads)
    }

    /// Where the next task runs: on one thread after the other.
    pub fn next(&self) -> &Handle {
        let next = self.next.fetch_add(1, Ordering::Relaxed) % self.threads.len();
        &self.threads[next].tasks
    }
}

/// Counts tasks, for who has to wait until all of them have ended.
#[derive(Debug, Default)]
pub struct Tasks {
    running: Mutex<usize>,
    ended: Condvar,
}

/// One that runs, until this is dropped.
#[derive(Debug)]
pub struct Running(Arc<Tasks>);

impl Tasks {
    /// One more.
    pub fn begin(self: &Arc<Self>) -> Running {
        *self.running.lock() += 1;
        Running(self.clone())
    }

    /// Waits until none is left. Not on a thread that they run on.
    pub fn wait(&self) {
        let mut running = self.running.lock();
        while *running > 0 {
            self.ended.wait(&mut running);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        *self.0.running.lock() -= 1;
        self.0.ended.notify_all();
    }
}

impl IoThread {
    fn start(number: usize) -> Result<Self, Error> {
        let failed = |error| Error::system("starting a thread", &error);
        let runtime = Builder::new_current_thread().enable_all().event_interval(TURNS).build();
        let runtime = runtime.map_err(failed)?;
        let tasks = runtime.handle().clone();
        let (until, ended) = oneshot::channel();
        let thread = std::thread::Builder::new().name(format!("kvferry-io{number}"));
        let thread = thread.spawn(move || {
            IS_ONE.set(true);
            _ = runtime.block_on(ended);
        });
        let thread = thread.map_err(failed)?;
        Ok(Self { tasks, until: Some(until), thread: Some(thread) })
    }
}

impl Drop for IoThread {
    /// Tasks that are left end where they wait.
    fn drop(&mut self) {
        self.until = None;
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            _ = thread.join();
        }
    }
}
