//! The one thread of a worker that hands what is to be read to the transport and watches it arrive.
//! How it is read is chosen in [`lowering`].

mod lessons;
mod lowering;

use std::fmt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TryRecvError, unbounded};
use kvferry_plan::cost::Choice;
use kvferry_plan::{Area, Plan};
use kvferry_transport::{Operation, Status};

use self::lessons::{Lesson, Lessons, Taught};
use self::lowering::{Lowered, Reads};
use super::load::{Lowerings, Portion};
use crate::carrier::Source;
use crate::error::Error;
use crate::rules::failure::Failure;
use crate::rules::life::Stage;

/// How long the thread waits for one read before it looks at the others.
const GLANCE: Duration = Duration::from_micros(500);

/// What to read, from whom.
pub(super) struct Job {
    /// Names it, so that it can be cancelled.
    pub(super) attempt: u64,
    pub(super) load: Portion,
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
        let thread = thread.spawn(move || run(&received, choice)).map_err(|error| Error::Io {
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
        // The thread lives as long as this.
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

fn run(commands: &Receiver<Command>, choice: Choice) {
    let mut readings: Vec<Reading> = vec![];
    let mut lessons = Lessons::default();
    loop {
        if readings.is_empty() {
            lessons.conclude();
        }
        let command = match readings.is_empty() {
            true => commands.recv().map_err(|_| TryRecvError::Disconnected),
            false => commands.try_recv(),
        };
        match command {
            // More may wait: post them before looking at what has arrived.
            Ok(Command::Read(job)) => {
                readings.extend(Reading::post(job, choice, &mut lessons));
            }
            Ok(Command::Cancel(attempt)) => {
                let cancelled = readings.iter_mut().filter(|reading| reading.attempt == attempt);
                cancelled.for_each(Reading::cancel);
            }
            Err(TryRecvError::Disconnected) => return,
            Err(TryRecvError::Empty) => {
                readings.retain_mut(|reading| !reading.look(&mut lessons));
                let pending = readings.first().and_then(|reading| {
                    reading.operations.iter().find(|operation| !operation.poll().is_safe())
                });
                if let Some(operation) = pending {
                    operation.wait(Instant::now() + GLANCE);
                }
            }
        }
    }
}

/// A job under way.
struct Reading {
    attempt: u64,
    operations: Vec<Box<dyn Operation>>,
    moved: Moved,
    posted: Instant,
    failed: bool,
    tell: Box<dyn Fn(Progress) + Send>,
    /// For every operation: what is learnt from it once it has ended.
    lessons: Vec<Option<Lesson<Taught>>>,
    /// Keeps the connections for as long as bytes move on them.
    _sources: Arc<Vec<Option<Box<dyn Source>>>>,
}

impl Reading {
    /// Hands what a job reads to the transport, source by source. `None`: there is nothing to wait for.
    fn post(job: Job, choice: Choice, others: &mut Lessons<Taught>) -> Option<Self> {
        let mut began = Instant::now();
        let mut lap = || {
            let lap = began.elapsed();
            began += lap;
            lap
        };
        let lowered = match lower(&job, choice) {
            Ok(lowered) => lowered,
            Err(reason) => {
                (job.tell)(Progress::Settled);
                (job.tell)(Progress::Failed(Failure::BadRequest(reason)));
                return None;
            }
        };
        let mut moved = Moved::default();
        if job.load.rest {
            moved.rest = lowered.rest();
        }
        moved.plan += lap();
        let (mut operations, mut lessons, mut failure) = (vec![], vec![], None);
        'sources: for (index, source) in job.sources.iter().enumerate() {
            let all = match lowered.reads(index) {
                Ok(all) => all,
                Err(error) => {
                    failure = Some(Failure::Transport(format!(
                        "the plan cannot be carried out: {error}"
                    )));
                    break;
                }
            };
            moved.lowerings.merge(lowered.lowerings(index));
            moved.plan += lap();
            for reads in all {
                moved.bytes += reads.bytes();
                moved.copies += reads.copies();
                let lesson = (reads.copies(), reads.bytes(), Instant::now());
                let posted = match source {
                    Some(source) => match &reads {
                        Reads::List(copies) => source.read(copies, job.deadline),
                        Reads::Loops(loops) => source.read_loops(loops, job.deadline),
                        Reads::Packed(loops) => source.read_packed(loops, job.deadline),
                    }
                    .map_err(|error| transport_failure(&error)),
                    None => {
                        let message = "the plan reads a rank that it should not";
                        Err(Failure::Transport(message.to_owned()))
                    }
                };
                moved.post += lap();
                match posted {
                    Ok(operation) => {
                        operations.push(operation);
                        let sources = Arc::downgrade(&job.sources);
                        let pupil = Taught { sources, source: index, way: reads.way() };
                        let (copies, bytes, began) = lesson;
                        lessons.push(Some(Lesson { pupil, copies, bytes, began }));
                        others.begin();
                    }
                    Err(error) => {
                        failure = Some(error);
                        break 'sources;
                    }
                }
            }
        }
        drop(lowered);
        let mut reading = Self {
            attempt: job.attempt,
            operations,
            moved,
            posted: Instant::now(),
            failed: false,
            tell: job.tell,
            lessons,
            _sources: job.sources,
        };
        let over = match failure {
            Some(failure) => reading.fail(failure),
            None => reading.look(others),
        };
        (!over).then_some(reading)
    }

    /// Nobody waits for the bytes any more; what remains to be told is when nothing more lands.
    fn cancel(&mut self) {
        self.failed = true;
        self.operations.iter().for_each(|operation| operation.cancel());
    }

    /// Tells what has changed. Answers whether it is over: nothing will land any more.
    fn look(&mut self, lessons: &mut Lessons<Taught>) -> bool {
        let mut safe = true;
        let mut failure = None;
        self.moved.packed = 0;
        for (operation, lesson) in self.operations.iter().zip(&mut self.lessons) {
            let status = operation.poll();
            safe &= status.is_safe();
            if let Status::Done(report) = &status {
                // What was asked for packed may have come otherwise.
                self.moved.packed += report.packed;
            }
            if let Status::Done(report) = &status
                && let Some(lesson) = lesson.take()
            {
                lessons.end(lesson, report.time_to_post + report.time_on_wire);
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
        (self.tell)(last);
        true
    }

    /// Answers whether nothing will land any more.
    fn fail(&mut self, failure: Failure) -> bool {
        self.cancel();
        let safe = self.operations.iter().all(|operation| operation.poll().is_safe());
        if safe {
            (self.tell)(Progress::Settled);
        }
        (self.tell)(Progress::Failed(failure));
        safe
    }
}

/// What a job reads, or why it cannot be read by what it was given.
fn lower(job: &Job, choice: Choice) -> Result<Lowered<'_>, String> {
    let Portion { tokens, grant, .. } = &job.load;
    if *tokens > grant.tokens {
        // Their blocks may be there; what is in them is not theirs.
        return Err(format!("{tokens} tokens are to be read, but {} were granted", grant.tokens));
    }
    Lowered::new(&job.plan, &job.load, &job.sources, choice).map_err(|error| error.to_string())
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
