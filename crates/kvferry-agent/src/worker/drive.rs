//! Lives one load by the rules of [`life`](crate::rules::life): turns what happens into events, and
//! does what the rules ask for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::AbortHandle;
use tokio::time::sleep_until;
use tracing::{Instrument, debug};

use super::audit::{Audited, audit};
use super::core::{Core, QUARANTINED, Running};
use super::growth::{Growing, Heard, follow};
use super::load::{Load, Moments, Notice, Outcome};
use super::mover::{Job, Moved, Progress};
use super::options::Times;
use super::source_engine::SourceEngine;
use crate::background::after;
use crate::metrics::Timings;
use crate::panics::{Watched, broken, caught};
use crate::rules::failure::Failure;
use crate::rules::grant::Claim;
use crate::rules::lease::{Answer, Loss};
use crate::rules::life::{Action, Event, Life, Stage};

/// Lives one load, from the queue until nothing can land in its blocks any more.
pub(super) async fn drive(core: Arc<Core>, load: Arc<Load>, running: Arc<Running>, times: Times) {
    let began = Instant::now();
    let deadline = after(load.deadline);
    let (steps, mut happened) = unbounded_channel();
    let mut one = Drive {
        attempt: core.attempt(),
        core: core.clone(),
        load,
        running: running.clone(),
        steps,
        life: Life::default(),
        times,
        deadline,
        turn: None,
        queued: false,
        asked: None,
        engine: None,
        growing: None,
        following: None,
        enclosed: vec![],
        lost: None,
        moved: Moved::default(),
        ahead: 0,
        timings: Timings::default(),
        moments: Moments::now(),
        began,
        since: began,
        task: None,
        quarantined: false,
        told: false,
    };
    one.shake_hands();
    loop {
        let alive = !one.life.stage().is_end();
        if !alive && !one.life.landing() {
            break;
        }
        let step = tokio::select! {
            step = happened.recv() => match step {
                Some(step) => step,
                None => break,
            },
            () = running.abort.notified(), if alive => Step::Abort,
            () = sleep_until(one.deadline.into()), if alive => Step::Deadline,
        };
        if let Err(failure) = caught("a load's own life", || one.step(step)) {
            one.break_off(failure);
        }
    }
}

/// What happens to a load, with what comes with it.
enum Step {
    Admitted(OwnedSemaphorePermit),
    Known(Arc<SourceEngine>),
    /// The handshake broke, or another part of the load did.
    Failed(Failure),
    /// Something was heard of a lease that is followed.
    Heard(Heard),
    Moving(Progress),
    Audited(Audited),
    Answered(Answer),
    Abort,
    Deadline,
}

pub(super) struct Drive {
    /// Names the reads and the confirmation.
    attempt: u64,
    pub(super) core: Arc<Core>,
    pub(super) load: Arc<Load>,
    pub(super) running: Arc<Running>,
    steps: UnboundedSender<Step>,
    pub(super) life: Life,
    times: Times,
    deadline: Instant,
    pub(super) turn: Option<OwnedSemaphorePermit>,
    /// It waits for its turn.
    queued: bool,
    /// When what is read now was asked for.
    asked: Option<Instant>,
    pub(super) engine: Option<Arc<SourceEngine>>,
    /// What is known and read of the request; as soon as the engine is known.
    growing: Option<Growing>,
    /// The task that follows the lease.
    pub(super) following: Option<AbortHandle>,
    /// What the engine gives with the blocks.
    pub(super) enclosed: Vec<u8>,
    /// That it is lost, until what is read has settled.
    lost: Option<Event>,
    pub(super) moved: Moved,
    /// Of those bytes, the ones of layers that were read before others.
    pub(super) ahead: u64,
    pub(super) timings: Timings,
    pub(super) moments: Moments,
    pub(super) began: Instant,
    since: Instant,
    /// What the present stage waits for.
    pub(super) task: Option<AbortHandle>,
    /// It was reported as such.
    pub(super) quarantined: bool,
    /// How it ended was told.
    pub(super) told: bool,
}

impl Drive {
    fn spawn<F>(&mut self, task: F)
    where
        F: Future<Output = Option<Step>> + Send + 'static,
    {
        let (steps, broken) = (self.steps.clone(), self.watched("a part of a load"));
        let task = async move {
            let _broken = broken;
            if let Some(step) = task.await {
                _ = steps.send(step);
            }
        };
        self.task = Some(tokio::spawn(task.in_current_span()).abort_handle());
    }

    /// Whoever holds it and panics fails the load.
    fn watched(&self, what: &'static str) -> Watched<impl FnMut(Failure) + Send + use<>> {
        let steps = self.steps.clone();
        Watched::new(what, move |failure| _ = steps.send(Step::Failed(failure)))
    }

    /// The time since the last such call.
    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        let lap = now - self.since;
        self.since = now;
        lap
    }

    /// The last lap ended now: since the load began.
    fn moment(&self) -> Duration {
        self.since - self.began
    }

    fn step(&mut self, step: Step) {
        #[cfg(test)]
        assert_ne!(self.load.request, super::tests::PANICS, "as a test wants it");
        let event = match step {
            Step::Admitted(turn) => {
                self.turn = Some(turn);
                self.queued = false;
                if self.life.stage() == &Stage::Following {
                    return self.follow();
                }
                self.timings.queue = self.lap();
                self.moments.admitted = Some(self.moment());
                Event::Admitted
            }
            Step::Known(engine) => {
                self.growing = Some(Growing::new(&self.load, &engine));
                self.engine = Some(engine);
                self.timings.handshake = self.lap();
                self.moments.known = Some(self.moment());
                if self.load.grant.is_none() {
                    self.hear_of_growth();
                }
                Event::Known
            }
            Step::Failed(failure) => Event::Failed(failure),
            Step::Heard(heard) => return self.heard(heard),
            Step::Moving(Progress::Arrived(moved)) => {
                self.lap();
                self.moments.arrived = Some(self.moment());
                self.timings.plan += moved.plan;
                self.timings.post += moved.post;
                self.timings.wire += moved.wire;
                self.moved.bytes += moved.bytes;
                self.moved.packed += moved.packed;
                self.moved.lowerings.merge(moved.lowerings);
                self.moved.copies += moved.copies;
                self.moved.rest = moved.rest;
                if self.growing.as_ref().is_some_and(Growing::ahead) {
                    self.ahead += moved.bytes;
                }
                let took = moved.post + moved.wire;
                if let (Some(growing), Some(engine)) = (&mut self.growing, &self.engine) {
                    growing.arrived(engine, took);
                    *engine.arrived.lock() = Some(self.since);
                }
                self.asked = None;
                Event::Arrived
            }
            Step::Moving(Progress::Failed(failure)) => {
                let broken = matches!(failure, Failure::PeerGone(_) | Failure::PeerMisbehaved(_));
                if let (true, Some(engine)) = (broken, &self.engine) {
                    self.core.peers.forget(engine);
                }
                if let Failure::Deadline { .. } = failure {
                    self.give_up_on_silence();
                }
                Event::Failed(failure)
            }
            Step::Moving(Progress::Settled) => Event::Settled,
            Step::Audited(audited) => {
                self.timings.audit = self.lap();
                match audited {
                    Audited::Passed => {
                        self.moments.audited = Some(self.moment());
                        Event::Passed
                    }
                    Audited::NotHeld(loss) => Event::NotHeld(loss),
                    Audited::Failed(failure) => Event::Failed(failure),
                }
            }
            Step::Answered(answer) => {
                self.timings.confirm = self.lap();
                match answer {
                    Answer::Held => {
                        self.moments.confirmed = Some(self.moment());
                        Event::Held
                    }
                    Answer::NotHeld(loss) => self.not_held(loss),
                }
            }
            Step::Abort => Event::Abort,
            Step::Deadline => {
                self.give_up_on_silence();
                Event::Deadline
            }
        };
        self.happen(event);
    }

    /// Something of this has panicked: the engine hears of the end all the same, and gets the name back, and the blocks
    /// as soon as nothing can land in them.
    fn break_off(&mut self, failure: Failure) {
        let event = Event::Failed(failure.clone());
        _ = caught("the end of a load", || self.happen(event));
        let landing = self.life.landing();
        match landing {
            true => self.core.cancel(self.attempt),
            false => self.core.end(&self.load.request, &self.running),
        }
        if !self.told {
            self.quarantined = landing;
            self.tell(Outcome::Failed(failure));
        }
    }

    /// A read has not ended in time, and nothing else has come from its engine meanwhile, either: the connection may
    /// be dead without anybody having said so. The next load makes another.
    fn give_up_on_silence(&mut self) {
        if let (Some(asked), Some(engine)) = (self.asked.take(), &self.engine)
            && engine.arrived.lock().is_none_or(|arrived| arrived < asked)
        {
            self.core.peers.forget(engine);
        }
    }

    fn not_held(&self, loss: Loss) -> Event {
        if let (Loss::Restarted, Some(engine)) = (loss, &self.engine) {
            self.core.peers.forget(engine);
        }
        Event::NotHeld(loss)
    }

    /// Something was heard of a lease that is followed, whatever this load does at the moment.
    fn heard(&mut self, heard: Heard) {
        let following = self.life.stage() == &Stage::Following;
        match heard {
            Heard::ByLayer(plan) => {
                if let Some(growing) = &mut self.growing {
                    growing.by_layer(plan);
                }
            }
            Heard::Word(word) => {
                self.deadline = after(self.load.deadline);
                if let Some(growing) = &mut self.growing {
                    growing.hear_word(word);
                }
                if following {
                    self.follow();
                }
            }
            Heard::Grown(grant, in_flight, sealed) => {
                self.deadline = after(self.load.deadline);
                if let Some(growing) = &mut self.growing {
                    growing.hear(grant, in_flight, sealed);
                }
                // While a part is read it waits.
                if following {
                    self.follow();
                }
            }
            Heard::Enclosed(bytes) => self.enclosed = bytes,
            Heard::Lost(loss) => {
                let event = self.not_held(loss);
                match following {
                    true => self.happen(event),
                    // What is read must settle first; then there is nothing to follow.
                    false => self.lost = Some(event),
                }
            }
            Heard::Failed(failure) => self.happen(Event::Failed(failure)),
        }
    }

    /// Reads what is new, or waits for it.
    fn follow(&mut self) {
        if let Some(event) = self.lost.take() {
            return self.happen(event);
        }
        let Some(growing) = &mut self.growing else { return };
        match growing.next(self.times.least_ahead) {
            Ok(true) if self.turn.is_none() => self.wait_for_turn(),
            Ok(true) => {
                let last = growing.last();
                self.happen(Event::Grown { last });
            }
            Ok(false) => {
                // Others may read meanwhile.
                self.turn = None;
                self.deadline = after(self.load.patience);
            }
            Err(contradiction) => {
                let failure = Failure::PeerMisbehaved(contradiction.to_string());
                self.happen(Event::Failed(failure));
            }
        }
    }

    fn wait_for_turn(&mut self) {
        if std::mem::replace(&mut self.queued, true) {
            return;
        }
        let turns = self.core.turns.clone();
        self.spawn(async move { turns.acquire_owned().await.ok().map(Step::Admitted) });
    }

    /// Follows the lease, for as long as the load lives.
    fn hear_of_growth(&mut self) {
        let Some(engine) = self.engine.clone() else { return };
        let (peers, ticket) = (self.core.peers.clone(), self.load.ticket.clone());
        let (steps, unreachable) = (self.steps.clone(), self.times.handshake);
        let worth_it = |growing: &Growing| growing.is_worth_it(self.times.least_ahead);
        let layers = self.growing.as_ref().is_some_and(worth_it);
        let task = follow(peers, engine, ticket, layers, unreachable, move |heard| {
            _ = steps.send(Step::Heard(heard));
        });
        let broken = self.watched("following a request");
        let task = async move {
            let _broken = broken;
            task.await;
        };
        self.following = Some(tokio::spawn(task.in_current_span()).abort_handle());
    }

    fn happen(&mut self, event: Event) {
        for action in self.life.on(event) {
            self.act(action);
        }
        *self.running.doing.lock() = match self.life.stage().is_end() {
            true => QUARANTINED,
            false => self.life.stage().name(),
        };
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Queue => self.wait_for_turn(),
            Action::Read => self.read(),
            Action::Follow => self.follow(),
            Action::Audit => {
                let Some(engine) = self.engine.clone() else { return };
                let Some(read_by) = self.growing.as_ref().map(Growing::read_by) else { return };
                let (core, load) = (self.core.clone(), self.load.clone());
                let audited = audit(core, load, engine, read_by, self.deadline);
                self.spawn(async move { Some(Step::Audited(audited.await)) });
            }
            Action::Confirm => {
                let (core, load) = (self.core.clone(), self.load.clone());
                let (attempt, deadline) = (self.attempt, self.deadline);
                let origin = load.origin;
                let Some(read_by) = self.growing.as_ref().map(Growing::read_by) else { return };
                self.spawn(async move {
                    let claim = Claim { read_by, origin };
                    let answer = core.peers.confirm(&load.ticket, attempt, claim, deadline).await;
                    answer.map(Step::Answered)
                });
            }
            Action::Cancel => {
                self.core.metrics.quarantines.add(1);
                self.core.cancel(self.attempt);
            }
            Action::Abandon => {
                let (core, ticket) = (self.core.clone(), self.load.ticket.clone());
                tokio::spawn(async move { core.peers.abandon(&ticket).await }.in_current_span());
            }
            Action::Report => self.report(),
            Action::HandBack => {
                self.core.end(&self.load.request, &self.running);
                if self.quarantined {
                    debug!("nothing will land any more");
                    let request = self.load.request.clone();
                    self.core.notices.put(Notice::Settled { request });
                }
            }
        }
    }

    fn shake_hands(&mut self) {
        let (core, ticket) = (self.core.clone(), self.load.ticket.clone());
        // In its own time and on its own: it goes on for others when this load ends.
        let deadline = after(self.times.handshake);
        let known = tokio::spawn(async move { core.peers.known(&ticket, deadline).await });
        self.spawn(async move {
            match known.await {
                Ok(Ok(engine)) => Some(Step::Known(engine)),
                Ok(Err(failure)) => Some(Step::Failed(failure)),
                Err(error) => error.is_panic().then(|| Step::Failed(broken("a handshake"))),
            }
        });
    }

    fn read(&mut self) {
        let Some(engine) = &self.engine else { return };
        let Some(growing) = &self.growing else { return };
        let Some(portion) = growing.portion(&self.load) else { return };
        let plan = growing.plan().map_or_else(|| engine.plan.clone(), Arc::new);
        self.moments.reads.get_or_insert(self.began.elapsed());
        // Of an earlier part.
        self.moments.arrived = None;
        self.asked = Some(Instant::now());
        let steps = self.steps.clone();
        self.core.read(Job {
            attempt: self.attempt,
            portion,
            plan,
            sources: engine.sources.clone(),
            deadline: self.deadline,
            tell: Box::new(move |progress| _ = steps.send(Step::Moving(progress))),
        });
    }
}
