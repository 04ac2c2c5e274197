//! The half of the agent that lives with one rank's memory.
//!
//! As a source it only makes a [`Card`]: the transport serves the memory by itself. As a destination
//! it shakes hands with the engines that requests come from, once each, compiles the plan, reads, and
//! asks for confirmation. Each request lives by the rules of [`life`](crate::life).

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvferry_layout::Manifest;
use kvferry_plan::{Area, BlockTable, Plan};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, sleep_until, timeout_at};
use tracing::{Instrument, debug, info, info_span, warn};

use crate::background::{Background, after};
use crate::carrier::{Carrier, Source};
use crate::error::{Error, Failure, Misbehaviour, PeerError};
use crate::lease::{Answer, Consumer, Loss};
use crate::life::{Action, Event, Life, Phase};
use crate::link::{Caller, Links};
use crate::message::{Card, Incarnation, Question, Reply, Ticket, Version};
use crate::metrics::{Phases, WorkerMetrics, escape};
use crate::mover::{Job, Moved, Mover};
use crate::random::random;
use crate::trust::Trust;

/// How a [`Worker`] is set up.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// How many ranks the engine has: a request is done when each of them has read it.
    pub ranks: u32,
    /// How peers prove who they are.
    pub trust: Trust,
    /// How long a handshake with a new engine may take, tries and pauses included.
    pub handshake: Duration,
    /// How many requests read at once; the others wait in the queue.
    pub concurrent: usize,
    /// A quiet connection to another engine is tried this often.
    pub keepalive: Duration,
    /// The protocol to speak.
    pub version: Version,
}

impl WorkerOptions {
    /// For an engine of so many ranks.
    pub fn new(ranks: u32) -> Self {
        Self {
            ranks,
            trust: Trust::Loopback,
            handshake: Duration::from_secs(10),
            concurrent: 64,
            keepalive: Duration::from_secs(5),
            version: Version::CURRENT,
        }
    }
}

/// A request to load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// The name that this engine gives to it.
    pub request: String,
    /// Where its blocks are.
    pub ticket: Ticket,
    /// How many tokens it has.
    pub tokens: u64,
    /// For every group of this engine: how many of the first tokens it holds already.
    pub cached: Vec<u64>,
    /// The source engine's block tables, one for every group.
    pub source: Vec<BlockTable>,
    /// This engine's block tables, one for every group.
    pub destination: Vec<BlockTable>,
    /// How long it may take in all.
    pub patience: Duration,
    /// Whether to report what is left of the request's own blocks, for engines that zero it. If so,
    /// they must: the last blocks may be read whole, which takes fewer copies.
    pub rest: bool,
}

/// What a worker tells its engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A request has ended.
    Ended(Ending),
    /// Nothing will land any more in the blocks of a request that ended in quarantine.
    Settled {
        /// The request.
        request: String,
    },
}

/// How a request ended on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// The request.
    pub request: String,
    /// How.
    pub outcome: Outcome,
    /// Whether bytes may still land in its blocks: if so, they must not be put to another use before
    /// the [`Notice::Settled`] that follows.
    pub quarantined: bool,
    /// Bytes read.
    pub bytes: u64,
    /// Copies that took.
    pub copies: u64,
    /// Where the time went.
    pub phases: Phases,
    /// What is left of the request's own blocks, where it was asked for.
    pub rest: Vec<Area>,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// All bytes are here, and good.
    Done,
    /// Something broke: the blocks' content is undefined.
    Failed(Failure),
    /// The engine did not want it any more.
    Aborted,
    /// The lease did not hold: the bytes must not be used.
    Expired(Loss),
}

impl Outcome {
    fn of(phase: &Phase) -> Self {
        match phase {
            Phase::Done => Self::Done,
            Phase::Failed(failure) => Self::Failed(failure.clone()),
            Phase::Expired(loss) => Self::Expired(*loss),
            _ => Self::Aborted,
        }
    }
}

/// The worker half of an agent. Dropping it cancels what is under way and ends its threads.
#[derive(Debug)]
pub struct Worker {
    core: Arc<Core>,
    background: Background,
}

#[derive(Debug)]
struct Core {
    engine: String,
    rank: u32,
    options: WorkerOptions,
    manifest: Arc<Manifest>,
    manifest_bytes: Vec<u8>,
    carrier: Arc<dyn Carrier>,
    links: Links,
    peers: Mutex<HashMap<String, Arc<tokio::sync::Mutex<Slot>>>>,
    turns: Arc<Semaphore>,
    mover: Mutex<Option<Mover>>,
    loads: Mutex<HashMap<String, Arc<Running>>>,
    notices: Mutex<VecDeque<Notice>>,
    something: Condvar,
    next: AtomicU64,
    metrics: WorkerMetrics,
}

/// A load under way, as others see it.
#[derive(Debug)]
struct Running {
    abort: Notify,
    phase: Mutex<&'static str>,
}

/// What is known of the engine at one address.
#[derive(Debug, Default)]
struct Slot {
    peer: Option<Arc<Peer>>,
    /// Earlier lives of it: tickets of theirs are void.
    former: HashSet<Incarnation>,
    /// That it does not fit, which is not asked again at once.
    refused: Option<(Incarnation, String, Instant)>,
}

/// An engine that requests can be read from.
#[derive(Debug)]
struct Peer {
    address: String,
    incarnation: Incarnation,
    plan: Arc<Plan>,
    sources: Arc<Vec<Option<Box<dyn Source>>>>,
}

/// What happens to a load, with what comes with it.
pub(crate) enum Step {
    Admitted(OwnedSemaphorePermit),
    Known(Arc<KnownPeer>),
    Failed(Failure),
    Arrived(Moved),
    Settled,
    Grown,
    Answered(Answer),
}

/// A peer, as a step carries it.
pub(crate) struct KnownPeer(Arc<Peer>);

impl Worker {
    /// Starts the worker of the rank that `manifest` describes. The manifest's regions must be
    /// registered with the transport.
    pub fn start(
        options: WorkerOptions,
        manifest: Manifest,
        carrier: Arc<dyn Carrier>,
    ) -> Result<Self, Error> {
        if manifest.rank() >= options.ranks {
            return Err(Error::Options(format!(
                "rank {} of an engine of {} ranks",
                manifest.rank(),
                options.ranks
            )));
        }
        let caller = Caller {
            who: format!("{}/{} ({})", manifest.engine(), manifest.rank(), manifest.label()),
            trust: options.trust.clone(),
            version: options.version,
            keepalive: options.keepalive,
        };
        let core = Core {
            engine: manifest.engine().to_owned(),
            rank: manifest.rank(),
            manifest_bytes: manifest.to_bytes(),
            manifest: Arc::new(manifest),
            carrier,
            links: Links::new(caller),
            peers: Mutex::default(),
            turns: Arc::new(Semaphore::new(options.concurrent.clamp(1, Semaphore::MAX_PERMITS))),
            mover: Mutex::new(Some(Mover::start()?)),
            loads: Mutex::default(),
            notices: Mutex::default(),
            something: Condvar::new(),
            next: AtomicU64::new(random()?),
            metrics: WorkerMetrics::default(),
            options,
        };
        Ok(Self { core: Arc::new(core), background: Background::start("kvferry-worker")? })
    }

    /// What this rank makes known to other engines, through its scheduler.
    pub fn card(&self) -> Result<Card, Error> {
        Ok(Card {
            rank: self.core.rank,
            manifest: self.core.manifest_bytes.clone(),
            transport: self.core.carrier.name().to_owned(),
            description: self.core.carrier.describe()?,
        })
    }

    /// Starts to load a request. How it ends is told by [`notices`](Self::notices).
    pub fn load(&self, load: Load) -> Result<(), Error> {
        let running =
            Arc::new(Running { abort: Notify::new(), phase: Mutex::new(Phase::Waiting.name()) });
        {
            let mut loads = lock(&self.core.loads);
            if loads.contains_key(&load.request) {
                return Err(Error::Duplicate(load.request));
            }
            loads.insert(load.request.clone(), running.clone());
        }
        self.core.metrics.loads.add(1);
        let span = info_span!("load", request = load.request, from = load.ticket.engine);
        self.background.spawn(drive(self.core.clone(), Arc::new(load), running).instrument(span));
        Ok(())
    }

    /// The request is not wanted any more. Its end is reported as any other.
    pub fn abort(&self, request: &str) {
        if let Some(running) = lock(&self.core.loads).get(request) {
            running.abort.notify_one();
        }
    }

    /// What has happened since the last call.
    pub fn notices(&self) -> Vec<Notice> {
        lock(&self.core.notices).drain(..).collect()
    }

    /// Like [`notices`](Self::notices), but waits for the first of them until `until`.
    pub fn wait(&self, until: Instant) -> Vec<Notice> {
        let mut notices = lock(&self.core.notices);
        while notices.is_empty() {
            let Some(left) = until.checked_duration_since(Instant::now()) else { break };
            let waited = self.core.something.wait_timeout(notices, left);
            notices = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        notices.drain(..).collect()
    }

    /// The loads under way, and what each is doing.
    pub fn loads(&self) -> Vec<(String, &'static str)> {
        let loads = lock(&self.core.loads);
        loads.iter().map(|(request, running)| (request.clone(), *lock(&running.phase))).collect()
    }

    /// Counters and histograms as Prometheus text.
    pub fn metrics(&self) -> String {
        let core = &self.core;
        let labels = format!("engine=\"{}\",rank=\"{}\"", escape(&core.engine), core.rank);
        let loads = self.loads();
        let quarantined = loads.iter().filter(|(_, phase)| *phase == QUARANTINED).count();
        core.metrics.text(&labels, loads.len() - quarantined, quarantined)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // First no task can start to read, then what is read is cancelled.
        self.background.stop();
        let mover = lock(&self.core.mover).take();
        drop(mover);
    }
}

const QUARANTINED: &str = "quarantined";

/// Lives one load.
async fn drive(core: Arc<Core>, load: Arc<Load>, running: Arc<Running>) {
    let began = Instant::now();
    let deadline = after(load.patience);
    let (steps, mut happened) = unbounded_channel();
    let mut one = Drive {
        id: core.next.fetch_add(1, Ordering::Relaxed),
        core: core.clone(),
        load,
        running: running.clone(),
        steps,
        life: Life::default(),
        deadline,
        turn: None,
        peer: None,
        moved: Moved::default(),
        phases: Phases::default(),
        since: began,
        task: None,
        quarantined: false,
    };
    one.spawn({
        let turns = core.turns.clone();
        async move { turns.acquire_owned().await.ok().map(Step::Admitted) }
    });
    loop {
        let alive = !one.life.phase().is_end();
        if !alive && !one.life.landing() {
            break;
        }
        tokio::select! {
            step = happened.recv() => match step {
                Some(step) => one.step(step),
                None => break,
            },
            () = running.abort.notified(), if alive => one.happen(Event::Abort),
            () = sleep_until(deadline.into()), if alive => one.happen(Event::Deadline),
        }
    }
}

struct Drive {
    id: u64,
    core: Arc<Core>,
    load: Arc<Load>,
    running: Arc<Running>,
    steps: UnboundedSender<Step>,
    life: Life,
    deadline: Instant,
    turn: Option<OwnedSemaphorePermit>,
    peer: Option<Arc<Peer>>,
    moved: Moved,
    phases: Phases,
    since: Instant,
    /// What the present phase waits for.
    task: Option<AbortHandle>,
    /// It was reported as such.
    quarantined: bool,
}

impl Drive {
    fn spawn<F>(&mut self, task: F)
    where
        F: Future<Output = Option<Step>> + Send + 'static,
    {
        let steps = self.steps.clone();
        let task = async move {
            if let Some(step) = task.await {
                _ = steps.send(step);
            }
        };
        self.task = Some(tokio::spawn(task.in_current_span()).abort_handle());
    }

    /// The time since the last such call.
    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        let lap = now - self.since;
        self.since = now;
        lap
    }

    fn step(&mut self, step: Step) {
        let event = match step {
            Step::Admitted(turn) => {
                self.turn = Some(turn);
                self.phases.queue = self.lap();
                Event::Admitted
            }
            Step::Known(peer) => {
                self.peer = Some(peer.0.clone());
                self.phases.handshake = self.lap();
                Event::Known
            }
            Step::Arrived(moved) => {
                self.lap();
                (self.phases.plan, self.phases.post) = (moved.plan, moved.post);
                self.phases.wire = moved.wire;
                self.moved = moved;
                Event::Arrived
            }
            Step::Failed(failure) => {
                if let (Failure::PeerGone(_), Some(peer)) = (&failure, &self.peer) {
                    self.core.forget(peer);
                }
                Event::Failed(failure)
            }
            Step::Settled => Event::Settled,
            Step::Grown => Event::Grown { last: true },
            Step::Answered(answer) => {
                self.phases.confirm = self.lap();
                match answer {
                    Answer::Held => Event::Held,
                    Answer::NotHeld(loss) => {
                        if let (Loss::Restarted, Some(peer)) = (loss, &self.peer) {
                            self.core.forget(peer);
                        }
                        Event::NotHeld(loss)
                    }
                }
            }
        };
        self.happen(event);
    }

    fn happen(&mut self, event: Event) {
        for action in self.life.on(event) {
            self.act(action);
        }
        *lock(&self.running.phase) = match self.life.phase().is_end() {
            true => QUARANTINED,
            false => self.life.phase().name(),
        };
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::ShakeHands => {
                let core = self.core.clone();
                let ticket = self.load.ticket.clone();
                let deadline = self.deadline.min(after(core.options.handshake));
                // On its own, so that it goes on for others when this load ends.
                let known = tokio::spawn(async move { core.known(&ticket, deadline).await });
                self.spawn(async move {
                    match known.await {
                        Ok(Ok(peer)) => Some(Step::Known(Arc::new(KnownPeer(peer)))),
                        Ok(Err(failure)) => Some(Step::Failed(failure)),
                        Err(_) => None,
                    }
                });
            }
            Action::Follow => {
                _ = self.steps.send(Step::Grown);
            }
            Action::Read => {
                let Some(peer) = &self.peer else { return };
                let job = Job {
                    id: self.id,
                    load: self.load.clone(),
                    plan: peer.plan.clone(),
                    sources: peer.sources.clone(),
                    deadline: self.deadline,
                    steps: self.steps.clone(),
                };
                if let Some(mover) = &*lock(&self.core.mover) {
                    mover.read(job);
                }
            }
            Action::Confirm => {
                let (core, ticket, attempt) =
                    (self.core.clone(), self.load.ticket.clone(), self.id);
                let deadline = self.deadline;
                self.spawn(async move {
                    core.confirm(&ticket, attempt, deadline).await.map(Step::Answered)
                });
            }
            Action::Cancel => {
                self.core.metrics.quarantines.add(1);
                if let Some(mover) = &*lock(&self.core.mover) {
                    mover.cancel(self.id);
                }
            }
            Action::Abandon => {
                let (core, ticket) = (self.core.clone(), self.load.ticket.clone());
                tokio::spawn(async move { core.abandon(&ticket).await }.in_current_span());
            }
            Action::Report => self.report(),
            Action::HandBack => {
                let request = self.load.request.clone();
                lock(&self.core.loads).remove(&request);
                if self.quarantined {
                    debug!("nothing will land any more");
                    self.core.tell(Notice::Settled { request });
                }
            }
        }
    }

    fn report(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
        self.turn = None;
        let outcome = Outcome::of(self.life.phase());
        let metrics = &self.core.metrics;
        match &outcome {
            Outcome::Done => {
                metrics.done.add(1);
                metrics.bytes.add(self.moved.bytes);
                metrics.copies.add(self.moved.copies);
                for (histogram, time) in metrics.phases.iter().zip(self.phases.times()) {
                    histogram.observe(time);
                }
            }
            Outcome::Failed(failure) => metrics.failed(failure),
            Outcome::Aborted => metrics.aborted.add(1),
            Outcome::Expired(_) => metrics.expired.add(1),
        }
        let Phases { queue, handshake, plan, post, wire, confirm } = self.phases;
        let quarantined = self.life.landing();
        self.quarantined = quarantined;
        let (bytes, copies) = (self.moved.bytes, self.moved.copies);
        debug!(
            ?outcome,
            quarantined,
            bytes,
            copies,
            ?queue,
            ?handshake,
            ?plan,
            ?post,
            ?wire,
            ?confirm,
            "ended"
        );
        match &outcome {
            Outcome::Failed(failure) => warn!(%failure, quarantined, "the load failed"),
            Outcome::Expired(loss) => warn!(%loss, "the load came too late"),
            _ => {}
        }
        // Settled already: the name is free before the engine hears of it.
        if !quarantined {
            lock(&self.core.loads).remove(&self.load.request);
        }
        self.core.tell(Notice::Ended(Ending {
            request: self.load.request.clone(),
            outcome,
            quarantined,
            bytes,
            copies,
            phases: self.phases,
            rest: std::mem::take(&mut self.moved.rest),
        }));
    }
}

impl Core {
    fn tell(&self, notice: Notice) {
        lock(&self.notices).push_back(notice);
        self.something.notify_all();
    }

    /// The engine of a ticket, shaken hands with if need be.
    async fn known(&self, ticket: &Ticket, deadline: Instant) -> Result<Arc<Peer>, Failure> {
        let slot = lock(&self.peers).entry(ticket.address.clone()).or_default().clone();
        let shaken = async {
            let mut slot = slot.lock().await;
            if let Some(peer) = &slot.peer
                && peer.incarnation == ticket.incarnation
            {
                return Ok(peer.clone());
            }
            if slot.former.contains(&ticket.incarnation) {
                return Err(Failure::Restarted);
            }
            if let Some((incarnation, reason, until)) = &slot.refused
                && *incarnation == ticket.incarnation
                && Instant::now() < *until
            {
                return Err(Failure::Refused(reason.clone()));
            }
            // Whatever is known is about another life. Nothing is read at its addresses any more.
            if let Some(old) = slot.peer.take() {
                info!(address = old.address, "the engine has restarted: shaking hands anew");
                slot.former.insert(old.incarnation);
                old.disconnect();
            }
            let peer = match self.shake_hands(&ticket.address, deadline).await {
                Ok(peer) => Arc::new(peer),
                Err(failure) => {
                    if let Failure::Refused(reason) = &failure {
                        warn!(engine = ticket.engine, reason, "the engine does not fit");
                        let until = Instant::now() + Duration::from_secs(1);
                        slot.refused = Some((ticket.incarnation, reason.clone(), until));
                    }
                    return Err(failure);
                }
            };
            slot.refused = None;
            let current = peer.incarnation == ticket.incarnation;
            slot.former.remove(&peer.incarnation);
            slot.peer = Some(peer.clone());
            if current {
                return Ok(peer);
            }
            // Enough to remember: tickets do not live long.
            if slot.former.len() >= 64 {
                slot.former.clear();
            }
            slot.former.insert(ticket.incarnation);
            Err(Failure::Restarted)
        };
        let shaken = timeout_at(deadline.into(), shaken).await;
        let shaken = shaken
            .unwrap_or_else(|_| Err(Failure::PeerGone("the handshake takes too long".to_owned())));
        if shaken.is_err() {
            // An engine that is gone is forgotten, once nobody waits for it.
            let mut peers = lock(&self.peers);
            let unused = Arc::strong_count(&slot) <= 2;
            if unused
                && slot.try_lock().is_ok_and(|slot| slot.peer.is_none() && slot.refused.is_none())
            {
                peers.remove(&ticket.address);
            }
        }
        shaken
    }

    async fn shake_hands(&self, address: &str, deadline: Instant) -> Result<Peer, Failure> {
        let until = deadline.into();
        let mut pause = Duration::from_millis(10);
        let (incarnation, cards) = loop {
            let link =
                self.links.get(address, until).await.map_err(|error| peer_failure(&error))?;
            let question = Question::Fit {
                manifest: self.manifest_bytes.clone(),
                transport: self.carrier.name().to_owned(),
            };
            match link.ask(question, until).await {
                Ok(Reply::Cards { incarnation, cards }) => break (incarnation, cards),
                Ok(Reply::Refused(reason)) => return Err(Failure::Refused(reason)),
                // It starts, or has just gone: try again until the deadline.
                Ok(Reply::NotReady) | Err(PeerError::Io { .. } | PeerError::Closed) => {
                    sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(1));
                }
                Ok(_) => return Err(peer_failure(&PeerError::Misbehaved(Misbehaviour::Answer))),
                Err(error) => return Err(peer_failure(&error)),
            }
        };
        let manifests = cards.iter().map(|card| {
            Manifest::from_bytes(&card.manifest)
                .map_err(|error| Failure::Refused(error.to_string()))
        });
        let manifests: Vec<Manifest> = manifests.collect::<Result<_, _>>()?;
        let own = self.manifest.clone();
        // Compiled here as well: what this rank writes into its memory it proves itself.
        let plan = tokio::task::spawn_blocking(move || {
            Plan::compile(&own, &manifests.iter().collect::<Vec<_>>())
        });
        let plan =
            plan.await.map_err(|_| Failure::Refused("the plan was not compiled".to_owned()))?;
        let plan = plan.map_err(|error| Failure::Refused(error.to_string()))?;

        let mut connecting = JoinSet::new();
        let mut sources: Vec<Option<Box<dyn Source>>> = Vec::new();
        for (index, card) in cards.into_iter().enumerate() {
            sources.push(None);
            if plan.reads(index) {
                let carrier = self.carrier.clone();
                connecting.spawn_blocking(move || {
                    let connected = carrier.connect(&card.description, deadline);
                    connected.map(|source| (index, source)).map_err(|e| (card.rank, e))
                });
            }
        }
        while let Some(connected) = connecting.join_next().await {
            match connected {
                Ok(Ok((index, source))) => sources[index] = Some(source),
                Ok(Err((rank, error))) => {
                    return Err(Failure::PeerGone(format!("rank {rank}: {error}")));
                }
                Err(_) => return Err(Failure::PeerGone("the transport gave up".to_owned())),
            }
        }
        self.metrics.handshakes.add(1);
        info!(address, %incarnation, sources = sources.len(), "shook hands");
        let (plan, sources) = (Arc::new(plan), Arc::new(sources));
        Ok(Peer { address: address.to_owned(), incarnation, plan, sources })
    }

    /// Asks until there is an answer. The deadline is the caller's.
    async fn confirm(&self, ticket: &Ticket, attempt: u64, deadline: Instant) -> Option<Answer> {
        let consumer = Consumer {
            engine: self.engine.clone(),
            rank: self.rank,
            ranks: self.options.ranks,
            attempt,
        };
        loop {
            let asked = async {
                let link = self.links.get(&ticket.address, deadline.into()).await?;
                let question = Question::Confirm {
                    incarnation: ticket.incarnation,
                    key: ticket.key(),
                    consumer: consumer.clone(),
                };
                link.ask(question, deadline.into()).await
            };
            match asked.await {
                Ok(Reply::Lease(answer)) => return Some(answer),
                Ok(_) => return Some(Answer::NotHeld(Loss::Unknown)),
                Err(error) => {
                    debug!(%error, "the confirmation was not answered: asking again");
                    if Instant::now() >= deadline {
                        return None;
                    }
                    sleep(Duration::from_millis(10)).await;
                }
            }
        }
    }

    /// Tells P that it need not keep the blocks for this rank's engine.
    async fn abandon(&self, ticket: &Ticket) {
        // Later than this the lease has expired by itself, or nobody cares.
        let deadline = after(ticket.term().min(Duration::from_secs(60))).into();
        let told = async {
            let link = self.links.get(&ticket.address, deadline).await?;
            let (incarnation, keys) = (ticket.incarnation, vec![ticket.key()]);
            link.ask(Question::Abandon { incarnation, keys }, deadline).await
        };
        if let Err(error) = told.await {
            debug!(%error, "cannot give up the lease: it will expire");
        }
    }

    /// Never reads from this peer again: the next request shakes hands anew.
    fn forget(&self, peer: &Arc<Peer>) {
        let slot = lock(&self.peers).get(&peer.address).cloned();
        if let Some(slot) = slot
            && let Ok(mut slot) = slot.try_lock()
            && slot.peer.as_ref().is_some_and(|known| Arc::ptr_eq(known, peer))
        {
            info!(address = peer.address, "the engine is forgotten");
            slot.peer = None;
        }
        peer.disconnect();
    }
}

impl Peer {
    fn disconnect(&self) {
        for source in self.sources.iter().flatten() {
            source.disconnect();
        }
    }
}

fn peer_failure(error: &PeerError) -> Failure {
    match error {
        PeerError::Io { .. } | PeerError::Slow(_) | PeerError::Closed => {
            Failure::PeerGone(error.to_string())
        }
        _ => Failure::Refused(error.to_string()),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
