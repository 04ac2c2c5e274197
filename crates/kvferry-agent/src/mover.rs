//! The one thread of a worker that hands copies to the transport and watches them arrive.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kvferry_plan::{Area, Plan, Request, Table};
use kvferry_transport::{ByteCopy, Operation, Status};
use tokio::sync::mpsc::UnboundedSender;

use crate::carrier::Source;
use crate::error::{Error, Failure};
use crate::worker::{Load, Step};

/// How long the thread waits for one read before it looks at the others.
const GLANCE: Duration = Duration::from_micros(500);

/// What to read, from whom.
pub(crate) struct Job {
    pub(crate) id: u64,
    pub(crate) load: Arc<Load>,
    pub(crate) plan: Arc<Plan>,
    /// For every source of the plan; `None` where nothing is read.
    pub(crate) sources: Arc<Vec<Option<Box<dyn Source>>>>,
    pub(crate) deadline: Instant,
    pub(crate) steps: UnboundedSender<Step>,
}

/// What was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    pub(crate) bytes: u64,
    pub(crate) copies: u64,
    pub(crate) plan: Duration,
    pub(crate) post: Duration,
    pub(crate) wire: Duration,
    pub(crate) rest: Vec<Area>,
}

enum Command {
    Read(Job),
    Cancel(u64),
}

/// The thread. It ends when this is dropped; what is under way is cancelled.
#[derive(Debug)]
pub(crate) struct Mover {
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
}

impl Mover {
    pub(crate) fn start() -> Result<Self, Error> {
        let (commands, received) = mpsc::channel();
        let thread = thread::Builder::new().name("kvferry-mover".to_owned());
        let thread = thread.spawn(move || run(&received)).map_err(|error| Error::Io {
            what: "starting the agent's thread".to_owned(),
            kind: error.kind(),
        })?;
        Ok(Self { commands: Some(commands), thread: Some(thread) })
    }

    pub(crate) fn read(&self, job: Job) {
        self.command(Command::Read(job));
    }

    pub(crate) fn cancel(&self, id: u64) {
        self.command(Command::Cancel(id));
    }

    fn command(&self, command: Command) {
        // The thread lives as long as this.
        if let Some(commands) = &self.commands {
            _ = commands.send(command);
        }
    }

    pub(crate) fn stop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A job under way.
struct Reading {
    id: u64,
    operations: Vec<Box<dyn Operation>>,
    moved: Moved,
    posted: Instant,
    failed: bool,
    steps: UnboundedSender<Step>,
    /// Keeps the connections for as long as bytes move on them.
    _sources: Arc<Vec<Option<Box<dyn Source>>>>,
}

fn run(commands: &Receiver<Command>) {
    let mut readings: Vec<Reading> = vec![];
    loop {
        let command = if readings.is_empty() {
            match commands.recv() {
                Ok(command) => Some(command),
                Err(_) => return,
            }
        } else {
            match commands.recv_timeout(Duration::ZERO) {
                Ok(command) => Some(command),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            }
        };
        match command {
            Some(Command::Read(job)) => {
                readings.extend(post(job));
                // More may wait: post them before looking at what has arrived.
                continue;
            }
            Some(Command::Cancel(id)) => {
                for reading in readings.iter_mut().filter(|reading| reading.id == id) {
                    reading.failed = true;
                    reading.operations.iter().for_each(|operation| operation.cancel());
                }
                continue;
            }
            None => {}
        }
        readings.retain_mut(|reading| !reading.look());
        let pending = readings.first().and_then(|reading| {
            reading.operations.iter().find(|operation| !operation.poll().is_safe())
        });
        if let Some(operation) = pending {
            operation.wait(Instant::now() + GLANCE);
        }
    }
}

/// Turns a request into copies and hands them over. `None`: there is nothing to wait for.
fn post(job: Job) -> Option<Reading> {
    let began = Instant::now();
    let fail = |failure: Failure| {
        _ = job.steps.send(Step::Settled);
        _ = job.steps.send(Step::Failed(failure));
    };
    let load = &job.load;
    let source: Vec<Table<'_>> = load.source.iter().map(|table| table.borrow()).collect();
    let destination: Vec<Table<'_>> = load.destination.iter().map(|table| table.borrow()).collect();
    let request = Request {
        tokens: load.tokens,
        cached: &load.cached,
        source: &source,
        destination: &destination,
    };
    // What the engine zeroes may be written first.
    let price = job.sources.iter().flatten().next().map(|source| source.price());
    let transfer = match price {
        Some(price) if load.rest => job.plan.over_read(&request, &price),
        _ => job.plan.transfer(&request),
    };
    let transfer = match transfer {
        Ok(transfer) => transfer,
        Err(error) => {
            fail(Failure::BadRequest(error.to_string()));
            return None;
        }
    };
    let lists = job.sources.iter().enumerate().filter_map(|(index, source)| {
        let mut copies = vec![ByteCopy::default(); transfer.summary(index).copies as usize];
        let filled = transfer.copies(index).fill(&mut copies);
        debug_assert_eq!(filled, copies.len(), "a summary counts what is yielded");
        (!copies.is_empty()).then_some((source, copies))
    });
    let lists: Vec<_> = lists.collect();
    let mut moved = Moved {
        bytes: lists.iter().flat_map(|(_, copies)| copies).map(|copy| copy.bytes).sum(),
        copies: lists.iter().map(|(_, copies)| copies.len() as u64).sum(),
        rest: if load.rest { transfer.rest().collect() } else { vec![] },
        ..Moved::default()
    };
    moved.plan = began.elapsed();
    let mut operations = Vec::with_capacity(lists.len());
    let mut failure = None;
    for (source, copies) in &lists {
        let posted = match source {
            Some(source) => source.read(copies, job.deadline).map_err(|e| transport_failure(&e)),
            None => Err(Failure::Transport("the plan reads a rank that it should not".to_owned())),
        };
        match posted {
            Ok(operation) => operations.push(operation),
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    let posted = Instant::now();
    moved.post = posted - began - moved.plan;
    let mut reading = Reading {
        id: job.id,
        operations,
        moved,
        posted,
        failed: false,
        steps: job.steps.clone(),
        _sources: job.sources.clone(),
    };
    let over = match failure {
        Some(failure) => reading.fail(failure),
        None => reading.look(),
    };
    (!over).then_some(reading)
}

impl Reading {
    /// Tells what has changed. Answers whether it is over: nothing will land any more.
    fn look(&mut self) -> bool {
        let mut safe = true;
        let mut failure = None;
        for operation in &self.operations {
            let status = operation.poll();
            safe &= status.is_safe();
            match status {
                Status::Quarantined(error) | Status::Failed(error) => {
                    failure = failure.or(Some(transport_failure(&error)));
                }
                Status::InProgress | Status::Done(_) => {}
            }
        }
        if let Some(failure) = failure
            && !self.failed
        {
            return self.fail(failure);
        }
        if !safe {
            return false;
        }
        let last = if self.failed {
            Step::Settled
        } else {
            self.moved.wire = self.posted.elapsed();
            Step::Arrived(std::mem::take(&mut self.moved))
        };
        _ = self.steps.send(last);
        true
    }

    /// Answers whether nothing will land any more.
    fn fail(&mut self, failure: Failure) -> bool {
        self.failed = true;
        self.operations.iter().for_each(|operation| operation.cancel());
        let safe = self.operations.iter().all(|operation| operation.poll().is_safe());
        if safe {
            _ = self.steps.send(Step::Settled);
        }
        _ = self.steps.send(Step::Failed(failure));
        safe
    }
}

fn transport_failure(error: &kvferry_transport::Error) -> Failure {
    use kvferry_transport::Error as E;
    match error {
        E::PeerLost(_) | E::Disconnected | E::PeerMisbehaved(_) => {
            Failure::PeerGone(error.to_string())
        }
        _ => Failure::Transport(error.to_string()),
    }
}
