//! Reads that do what a test says.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use kvferry_agent::{Carrier, Source};
use kvferry_digest::{Digest, Program};
use kvferry_transport::{ByteCopy, Error, Loops, Operation, Report, Status};

use super::eventually;
use super::memory::look;

/// A transport in one process whose reads do what a test says.
#[derive(Debug)]
pub struct Held {
    /// Reads in the order in which they were asked for.
    reads: Arc<Mutex<VecDeque<Arc<HeldRead>>>>,
    /// What is connected to, each with a clone.
    connected: Arc<()>,
    /// Why others cannot connect to this rank, where they cannot.
    refuses: Option<Refusal>,
    /// Attempts to connect to a rank.
    attempts: AtomicUsize,
    /// What ends a connection waits while this is so.
    pub stuck: Arc<AtomicBool>,
    /// What looks at memory waits while this is so.
    pub busy: AtomicBool,
}

/// Why a rank cannot be connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It can never be.
    Unable,
    /// It is gone.
    Gone,
}

/// A read under a test's control.
#[derive(Debug)]
pub struct HeldRead {
    pub copies: Vec<ByteCopy>,
    pub cancelled: AtomicBool,
    status: Mutex<Status>,
}

impl Held {
    pub fn new(refuses: Option<Refusal>) -> Self {
        let (connected, attempts) = (Arc::default(), AtomicUsize::new(0));
        let stuck = Arc::default();
        let busy = AtomicBool::new(false);
        Self { reads: Arc::default(), connected, refuses, attempts, stuck, busy }
    }

    /// How often it has tried to connect to a rank.
    pub fn attempts(&self) -> usize {
        self.attempts.load(Ordering::SeqCst)
    }

    /// How many ranks it is connected to.
    pub fn connections(&self) -> usize {
        Arc::strong_count(&self.connected) - 1
    }

    /// Whether nothing was asked for that [`next`](Self::next) has not given.
    pub fn is_empty(&self) -> bool {
        self.reads.lock().unwrap().is_empty()
    }

    pub fn next(&self) -> Arc<HeldRead> {
        let taken = Mutex::new(None);
        eventually("a read", || {
            let mut taken = taken.lock().unwrap();
            *taken = self.reads.lock().unwrap().pop_front();
            taken.is_some()
        });
        taken.into_inner().unwrap().unwrap()
    }
}

impl HeldRead {
    /// Part of the bytes land: `from` to `to` of the copies.
    pub fn land(&self, from: usize, to: usize) {
        for copy in &self.copies[from..to] {
            // SAFETY: plans name only addresses of test memory, which is never freed and accessed
            // without references.
            unsafe {
                std::ptr::copy(
                    copy.source as *const u8,
                    copy.destination as *mut u8,
                    copy.bytes as usize,
                );
            }
        }
    }

    pub fn finish(&self) {
        *self.status.lock().unwrap() = Status::Done(Report::default());
    }

    pub fn settle(&self, error: Error) {
        *self.status.lock().unwrap() = Status::Failed(error);
    }
}

impl Carrier for Held {
    fn name(&self) -> &'static str {
        "held"
    }

    fn describe(&self) -> Result<Vec<u8>, Error> {
        let refuses = match self.refuses {
            None => 0,
            Some(Refusal::Unable) => 1,
            Some(Refusal::Gone) => 2,
        };
        Ok(vec![refuses])
    }

    fn connect(&self, description: &[u8], _: Instant) -> Result<Box<dyn Source>, Error> {
        self.attempts.fetch_add(1, Ordering::SeqCst);
        match description.first() {
            Some(1) => return Err(Error::Unsupported("its handle cannot be opened".to_owned())),
            Some(2) => return Err(Error::PeerLost("connection refused".to_owned())),
            _ => {}
        }
        let (reads, connected) = (self.reads.clone(), self.connected.clone());
        let stuck = self.stuck.clone();
        Ok(Box::new(HeldSource { reads, stuck, _connected: connected }))
    }

    fn digest(&self, program: &Program, deadline: Instant) -> Result<Vec<Digest>, Error> {
        while self.busy.load(Ordering::SeqCst) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        if Instant::now() >= deadline {
            return Err(Error::DeadlinePassed);
        }
        look(program, deadline)
    }
}

#[derive(Debug)]
struct HeldSource {
    reads: Arc<Mutex<VecDeque<Arc<HeldRead>>>>,
    stuck: Arc<AtomicBool>,
    _connected: Arc<()>,
}

impl Source for HeldSource {
    fn read(&self, loops: &Loops, _: Instant) -> Result<Box<dyn Operation>, Error> {
        let read = Arc::new(HeldRead {
            copies: loops.copies().collect(),
            cancelled: AtomicBool::new(false),
            status: Mutex::new(Status::InProgress),
        });
        self.reads.lock().unwrap().push_back(read.clone());
        Ok(Box::new(HeldOperation(read)))
    }

    fn disconnect(&self) {
        eventually("it may disconnect", || !self.stuck.load(Ordering::SeqCst));
    }
}

struct HeldOperation(Arc<HeldRead>);

impl fmt::Debug for HeldOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HeldOperation")
    }
}

impl Operation for HeldOperation {
    fn poll(&self) -> Status {
        self.0.status.lock().unwrap().clone()
    }

    fn wait(&self, until: Instant) -> Status {
        while !self.poll().is_safe() && Instant::now() < until {
            thread::sleep(Duration::from_micros(100));
        }
        self.poll()
    }

    /// As NIXL does it: asked to stop, it may still land.
    fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::SeqCst);
        let mut status = self.0.status.lock().unwrap();
        if !status.is_safe() {
            *status = Status::Quarantined(Error::Cancelled);
        }
    }
}
