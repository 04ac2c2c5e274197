//! The one thread of a worker that hands what is to be read to the transport and watches it arrive.

use std::fmt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TryRecvError, unbounded};
use kvferry_plan::lowering::{Choice, Way, lower};
use kvferry_plan::{Area, BlockTable, LoopsError, Plan, Request, RequestError, Table};
use kvferry_transport::{Operation, Status};

use super::load::{Lowerings, Portion};
use crate::carrier::Source;
use crate::error::Error;
use crate::panics::caught;
use crate::rules::failure::Failure;
use crate::rules::life::Stage;

/// How long the thread waits for one read before it looks at the others.
const GLANCE: Duration = Duration::from_micros(500);

/// What to read, from whom.
pub(super) struct Job {
    /// Names it, so that it can be cancelled.
    pub(super) attempt: u64,
    pub(super) portion: Portion,
    pub(super) plan: Arc<Plan>,
    /// For every source of the plan; `None` where nothing is read.
    pub(super) sources: Arc<Vec<Option<Box<dyn Source>>>>,
    pub(super) deadline: Instant,
    /// Hears how it goes.
    pub(super) tell: Box<dyn Fn(Progress) + Send>,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("attempt", &self.attempt).finish_non_exhaustive()
    }
}

/// How a job goes.
#[derive(Debug)]
pub(super) enum Progress {
    /// Every byte is at its place, and nothing more will land.
    Arrived(Moved),
    /// It broke. Bytes may still land, unless `Settled` came before.
    Failed(Failure),
    /// Nothing will land any more.
    Settled,
}

/// What was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Moved {
    pub(super) bytes: u64,
    pub(super) copies: u64,
    pub(super) plan: Duration,
    pub(super) post: Duration,
    pub(super) wire: Duration,
    pub(super) rest: Vec<Area>,
    /// Of the bytes, those that were packed.
    pub(super) packed: u64,
    /// How it was read.
    pub(super) lowerings: Lowerings,
}

#[derive(Debug)]
enum Command {
    Read(Job),
    /// By its attempt.
    Cancel(u64),
}

/// The thread. It ends when this is dropped; what is under way is cancelled.
#[derive(Debug)]
pub(super) struct Mover {
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
}

impl Mover {
    /// `choice` says who chooses how sources are read.
    pub(super) fn start(choice: Choice) -> Result<Self, Error> {
        let (commands, received) = unbounded();
        let thread = thread::Builder::new().name("kvferry-mover".to_owned());
        let thread = thread.spawn(move || live(&received, choice)).map_err(|error| Error::Io {
            what: "starting the agent's thread".to_owned(),
            kind: error.kind(),
        })?;
        Ok(Self { commands: Some(commands), thread: Some(thread) })
    }

    pub(super) fn read(&self, job: Job) {
        self.command(Command::Read(job));
    }

    pub(super) fn cancel(&self, attempt: u64) {
        self.command(Command::Cancel(attempt));
    }

    fn command(&self, command: Command) {
        // The thread lives as long as this: whatever panics on it is caught there.
        if let Some(commands) = &self.commands {
            _ = commands.send(command);
        }
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

/// The thread's life. All loads need it: what panics in it ends nothing but the read at which it did.
fn live(commands: &Receiver<Command>, choice: Choice) {
    let mut readings = vec![];
    while caught("reading", || run(commands, choice, &mut readings)).is_err() {}
}

fn run(commands: &Receiver<Command>, choice: Choice, readings: &mut Vec<Reading>) {
    loop {
        let idle = readings.iter().all(|reading| reading.broken);
        let command = match idle {
            true => commands.recv().map_err(|_| TryRecvError::Disconnected),
            false => commands.try_recv(),
        };
        match command {
            // More may wait: post them before looking at what has arrived.
            Ok(Command::Read(job)) => {
                let mut reading = Reading::new(job);
                if !reading.post(choice) {
                    readings.push(reading);
                }
            }
            Ok(Command::Cancel(attempt)) => {
                for reading in readings.iter_mut().filter(|one| one.job.attempt == attempt) {
                    reading.guarded(|one| {
                        one.cancel();
                        false
                    });
                }
            }
            Err(TryRecvError::Disconnected) => return,
            Err(TryRecvError::Empty) => {
                readings.retain_mut(|reading| !reading.guarded(Reading::look));
                if let Some(first) = readings.iter_mut().find(|reading| !reading.broken) {
                    first.guarded(Reading::glance);
                }
            }
        }
    }
}

/// A job under way.
struct Reading {
    /// Keeps the connections for as long as bytes move on them.
    job: Job,
    operations: Vec<Box<dyn Operation>>,
    moved: Moved,
    posted: Instant,
    failed: bool,
    /// The transport has panicked when it was asked how a read stands. Nobody can say any more what lands, so that its
    /// blocks stay where they are, and it is not asked again.
    broken: bool,
}

impl Reading {
    fn new(job: Job) -> Self {
        Self {
            job,
            operations: vec![],
            moved: Moved::default(),
            posted: Instant::now(),
            failed: false,
            broken: false,
        }
    }

    /// Does something that answers whether it is over: nothing will land any more.
    fn guarded(&mut self, done: impl FnOnce(&mut Self) -> bool) -> bool {
        if self.broken {
            return false;
        }
        caught("looking at a read", || done(self)).unwrap_or_else(|failure| {
            self.broken = true;
            if !self.failed {
                _ = caught("stopping a read", || self.cancel());
                (self.job.tell)(Progress::Failed(failure));
            }
            false
        })
    }

    /// Hands what a job reads to the transport. Answers whether it is over.
    fn post(&mut self, choice: Choice) -> bool {
        // A read that panics has started nothing, as `Source` promises.
        let posted = caught("starting a read", || self.hand_out(choice));
        self.posted = Instant::now();
        match posted {
            Ok(Ok(())) => self.guarded(Self::look),
            Ok(Err(failure)) | Err(failure) => self.guarded(|one| one.fail(failure)),
        }
    }

    /// Source by source.
    fn hand_out(&mut self, choice: Choice) -> Result<(), Failure> {
        let Self { job, operations, moved, .. } = self;
        let mut began = Instant::now();
        let mut lap = || {
            let lap = began.elapsed();
            began += lap;
            lap
        };
        let Portion { load, grant, written, tokens, cached, rest } = &job.portion;
        if tokens > written {
            // Their blocks may be there; what is in them is not theirs.
            let wrong = format!("{tokens} tokens are to be read, but {written} were granted");
            return Err(Failure::BadRequest(wrong));
        }
        let source: Vec<Table<'_>> = grant.tables.iter().map(BlockTable::borrow).collect();
        let destination: Vec<Table<'_>> = load.destination.iter().map(BlockTable::borrow).collect();
        let request =
            Request { tokens: *tokens, cached, source: &source, destination: &destination };
        let bad = |error: RequestError| Failure::BadRequest(error.to_string());
        let unsound = |error: LoopsError| {
            Failure::Transport(format!("the plan cannot be carried out: {error}"))
        };
        let transfer = job.plan.transfer(&request).map_err(bad)?;
        if *rest {
            // Blocks that were filled before are the request's own, too.
            let own = match load.cached != *cached {
                true => Some(
                    job.plan.transfer(&Request { cached: &load.cached, ..request }).map_err(bad)?,
                ),
                false => None,
            };
            moved.rest = own.as_ref().unwrap_or(&transfer).rest().map_err(unsound)?;
        }
        for (index, source) in job.sources.iter().enumerate() {
            let loops = transfer.loops(index).map_err(unsound)?;
            let Some(source) = source else {
                if loops.is_empty() {
                    continue;
                }
                let message = "the plan reads a rank that it should not";
                return Err(Failure::Transport(message.to_owned()));
            };
            let ways = lower(loops, source.packs_below(), choice);
            moved.plan += lap();
            for (way, loops) in ways {
                moved.lowerings.add(way);
                moved.bytes += loops.bytes();
                moved.copies += loops.runs();
                let posted = match way {
                    Way::Direct => source.read(&loops, job.deadline),
                    Way::Packed => source.read_packed(&loops, job.deadline),
                };
                moved.post += lap();
                operations.push(posted.map_err(|error| transport_failure(&error))?);
            }
        }
        Ok(())
    }

    /// Waits a moment for what has not ended.
    fn glance(&mut self) -> bool {
        let pending = self.operations.iter().find(|operation| !operation.poll().is_safe());
        if let Some(operation) = pending {
            operation.wait(Instant::now() + GLANCE);
        }
        false
    }

    /// Nobody waits for the bytes any more; what remains to be told is when nothing more lands.
    fn cancel(&mut self) {
        self.failed = true;
        self.operations.iter().for_each(|operation| operation.cancel());
    }

    /// Tells what has changed. Answers whether it is over: nothing will land any more.
    fn look(&mut self) -> bool {
        let mut safe = true;
        let mut failure = None;
        self.moved.packed = 0;
        for operation in &self.operations {
            let status = operation.poll();
            safe &= status.is_safe();
            if let Status::Done(report) = &status {
                // What was asked for packed may have come otherwise.
                self.moved.packed += report.packed;
            }
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
            Progress::Settled
        } else {
            self.moved.wire = self.posted.elapsed();
            Progress::Arrived(std::mem::take(&mut self.moved))
        };
        (self.job.tell)(last);
        true
    }

    /// Answers whether nothing will land any more.
    fn fail(&mut self, failure: Failure) -> bool {
        self.cancel();
        let safe = self.operations.iter().all(|operation| operation.poll().is_safe());
        if safe {
            (self.job.tell)(Progress::Settled);
        }
        (self.job.tell)(Progress::Failed(failure));
        safe
    }
}

fn transport_failure(error: &kvferry_transport::Error) -> Failure {
    use kvferry_transport::Error as E;
    match error {
        E::PeerLost(_) | E::Disconnected => Failure::PeerGone(error.to_string()),
        E::PeerMisbehaved(_) => Failure::PeerMisbehaved(error.to_string()),
        // The transport has the same deadline as the agent: whichever sees it first says the same.
        E::DeadlinePassed => {
            Failure::Deadline { stage: Stage::Reading { last: true }.name().to_owned() }
        }
        _ => Failure::Transport(error.to_string()),
    }
}
