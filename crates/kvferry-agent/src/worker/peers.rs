//! The engines that requests are read from: what is known of them, and what they are asked.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use kvferry_plan::LayerPlan;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::time::{sleep, sleep_until, timeout_at};
use tracing::{debug, info, warn};

use super::departures::{Arrival, Departures, Whose};
use super::introduced::{Introduced, IntroducedRank};
use super::load::ReadBy;
use super::opening::{Readable, open};
use super::peer_entry::{Answered, PeerEntry};
use super::places::Places;
use super::rank::Rank;
use super::source_engine::SourceEngine;
use crate::background::after;
use crate::carrier::{Chosen, Source};
use crate::error::{Error, Misbehaviour, PeerError};
use crate::metrics::WorkerMetrics;
use crate::rules::audit::Trial;
use crate::rules::failure::Failure;
use crate::rules::grant::Claim;
use crate::rules::lease::{Answer, Consumer, Loss};
use crate::wire::link::{Caller, Links, PATIENT_ANSWER, Told, is_final};
use crate::wire::message::{Card, Question, Reply};
use crate::wire::news::{Known, Sought};
use crate::wire::task::TaskReply;
use crate::wire::ticket::{Incarnation, Ticket};

/// Whether engines are still there is looked at so often.
const LOOK: Duration = Duration::from_secs(2);
/// What audits have found is remembered of so many lives, and more where they are in use or refused.
const TRIALS: usize = 64;

/// All engines that this rank reads from.
#[derive(Debug)]
pub(super) struct Peers {
    pub(super) rank: Rank,
    links: Links,
    /// A connection of their own: answers to audits take a while, and others would wait behind them.
    pub(super) audits: Links,
    /// What is known of the pairs that this rank is part of, by the life of the other engine.
    trials: Mutex<HashMap<Incarnation, Arc<Mutex<Trial>>>>,
    known: Mutex<HashMap<String, Arc<PeerEntry>>>,
    places: Places,
    departures: Arc<Departures>,
    metrics: Arc<WorkerMetrics>,
    /// Those of them that cannot be asked.
    pub(super) introduced: Introduced,
}

impl Peers {
    /// What must wait, waits on threads of `aside`.
    pub(super) fn new(
        rank: Rank,
        caller: Caller,
        metrics: Arc<WorkerMetrics>,
        aside: Handle,
    ) -> Self {
        Self {
            rank,
            audits: Links::new(caller.clone()),
            links: Links::new(caller),
            trials: Mutex::default(),
            known: Mutex::default(),
            places: Places::default(),
            departures: Departures::new(aside),
            metrics,
            introduced: Introduced::default(),
        }
    }

    /// The engine of a ticket, shaken hands with if need be.
    pub(super) async fn known(
        &self,
        ticket: &Ticket,
        deadline: Instant,
    ) -> Result<Arc<SourceEngine>, Failure> {
        let entry = self.known.lock().entry(ticket.address.clone()).or_default().clone();
        let met = timeout_at(deadline.into(), self.meet(&entry, ticket, deadline)).await;
        let met = met
            .unwrap_or_else(|_| Err(Failure::PeerGone("the handshake takes too long".to_owned())));
        let met = met.and_then(|engine| {
            let refused = engine.trial.lock().refused().map(str::to_owned);
            refused.map_or(Ok(engine), |reason| Err(Failure::Refused(reason)))
        });
        if met.is_err() {
            self.drop_if_unknown(&ticket.address, &entry);
        }
        met
    }

    /// An engine that is gone is forgotten, once nobody waits for it. As long as there is a connection to it, it can be
    /// told that a lease is not wanted any more.
    fn drop_if_unknown(&self, address: &str, entry: &Arc<PeerEntry>) {
        let mut known = self.known.lock();
        // The map, and the caller.
        let unused = Arc::strong_count(entry) <= 2 && entry.is_empty();
        if unused && !self.links.is_open(address) {
            known.remove(address);
            self.links.forget(address);
        }
    }

    /// Lets go of engines that this rank has no connection to any more, as soon as nothing is read from them.
    /// Some transports read a dead engine's memory as if nothing had happened: as long as it is mapped here, it is
    /// not free, and the engine may find no room to start again.
    pub(super) async fn look_after(&self) {
        loop {
            sleep(LOOK).await;
            self.let_go_of_ended();
        }
    }

    fn let_go_of_ended(&self) {
        let known: Vec<_> =
            self.known.lock().iter().map(|(a, known)| (a.clone(), known.clone())).collect();
        let mut idle = vec![];
        // Under another address it may be there, or somebody may shake hands with it. What transports have of it is
        // the same for all of them.
        let mut there: HashSet<Incarnation> = HashSet::new();
        for (address, entry) in &known {
            let hands = entry.hands.try_lock();
            let here = self.links.is_open(address) || self.introduced.knows(address);
            match hands {
                Ok(hands) if !here => idle.push((address, entry, hands)),
                _ => there.extend(entry.lives()),
            }
        }
        for (address, entry, hands) in idle {
            // Only this one knows it: whoever wants to read from it asks for it first.
            let ended = entry.take_if(|engine| {
                Arc::strong_count(engine) == 1 && !there.contains(&engine.incarnation)
            });
            drop(hands);
            if ended.is_some() {
                info!(address, "the connection has ended: the engine is let go");
            }
            drop(ended);
        }
        for (address, entry) in &known {
            self.drop_if_unknown(address, entry);
        }
    }

    async fn meet(
        &self,
        entry: &PeerEntry,
        ticket: &Ticket,
        deadline: Instant,
    ) -> Result<Arc<SourceEngine>, Failure> {
        let (life, came) = (ticket.incarnation, Instant::now());
        // Where the connection has ended, the engine may have as well.
        let connected = || self.links.opened(&ticket.address).is_some();
        if let Some(known) = entry.look(life, came, connected) {
            return known;
        }
        let _hands = entry.hands.lock().await;
        if let Some(known) = entry.look(life, came, connected) {
            return known;
        }
        if let Some(moment) = entry.not_before()
            && connected()
        {
            sleep_until(moment.into()).await;
        }
        let asked = Instant::now();
        match self.shake_hands(entry, &ticket.address, asked, deadline).await {
            Ok(Some(engine)) => entry.meet(Arc::new(engine), asked),
            Ok(None) => {}
            Err(failure) => {
                if let Failure::Refused(reason) = &failure {
                    warn!(engine = ticket.engine, reason, "the engine does not fit");
                    entry.refuse(life, reason.clone(), asked);
                }
                return Err(failure);
            }
        }
        // It has been asked since: there is an answer, unless it was forgotten again.
        entry.look(life, came, connected).unwrap_or(Err(Failure::Restarted))
    }

    /// Shakes hands with whoever is at an address; `None`: it is the engine that is known.
    async fn shake_hands(
        &self,
        entry: &PeerEntry,
        address: &str,
        asked: Instant,
        deadline: Instant,
    ) -> Result<Option<SourceEngine>, Failure> {
        let known = entry.is_known();
        let (incarnation, cards) = self.ask_for_cards(address, known, deadline).await?;
        let _meeting = match entry.is_in(incarnation, asked) {
            Answered::Known => return Ok(None),
            Answered::New { old, meeting } => {
                if let Some(old) = old {
                    info!(address, "the engine has restarted: repeating the handshake");
                    // Whatever is known is about another life. Nothing is read at its addresses any more.
                    old.leave();
                }
                meeting
            }
        };
        let whose: Whose = (address.into(), incarnation);
        self.departures.over(&whose).await;
        let Readable { plan, manifests, ranks, sources } =
            open(&self.rank, &whose, cards, deadline, &self.departures).await?;
        let sources: Vec<_> = sources.into_iter().map(|one| one.and_then(Arrival::take)).collect();
        self.metrics.handshakes.add(1);
        let encrypted = sources.iter().flatten().filter(|source| source.is_encrypted()).count();
        info!(address, %incarnation, sources = sources.len(), encrypted, "shook hands");
        let read_by = self.read_by(&ranks, &sources);
        let (plan, sources, trial) = (Arc::new(plan), Arc::new(sources), self.trial(incarnation));
        let manifests = Arc::new(manifests);
        Ok(Some(SourceEngine {
            whose,
            incarnation,
            plan,
            layers: tokio::sync::OnceCell::new(),
            manifests,
            sources,
            ranks,
            read_by,
            trial,
            each: Mutex::default(),
            arrived: Mutex::default(),
            departures: self.departures.clone(),
            left: AtomicBool::new(false),
        }))
    }

    fn read_by(&self, ranks: &[u32], sources: &[Option<Box<dyn Source>>]) -> Arc<[ReadBy]> {
        let only = Chosen { transport: self.rank.carrier.name(), not_by: String::new() };
        let read = ranks.iter().zip(sources).filter_map(|(rank, source)| {
            let chosen = source.as_ref()?.chosen().unwrap_or(&only).clone();
            Some(ReadBy { rank: *rank, chosen })
        });
        read.collect()
    }

    /// What audits have found of this life of an engine, also over an earlier handshake.
    fn trial(&self, incarnation: Incarnation) -> Arc<Mutex<Trial>> {
        let mut trials = self.trials.lock();
        if trials.len() >= TRIALS && !trials.contains_key(&incarnation) {
            // What was refused stays so, and what is in use is its owners' as well.
            trials.retain(|_, trial| {
                Arc::strong_count(trial) > 1 || trial.lock().refused().is_some()
            });
        }
        trials.entry(incarnation).or_default().clone()
    }

    /// Whether the two sides fit: the cards of the ranks to read.
    async fn ask_for_cards(
        &self,
        address: &str,
        known: bool,
        deadline: Instant,
    ) -> Result<(Incarnation, Vec<Card>), Failure> {
        if let Some((incarnation, cards)) = self.introduced.get(address) {
            return Ok((incarnation, cards));
        }
        let until = deadline.into();
        let mut pause = Duration::from_millis(10);
        loop {
            let link = match known {
                true => self.links.get(address, until).await,
                false => self.places.connect(&self.links, address, until).await,
            };
            let link = link.map_err(|error| peer_failure(&error))?;
            let place = match known {
                true => None,
                false => Some(self.places.asked.acquire().await),
            };
            let question = Question::Fit {
                manifest: self.rank.manifest_bytes.clone(),
                transport: self.rank.carrier.name().to_owned(),
            };
            let answer = link.ask(question, until).await;
            drop(place);
            match answer {
                Ok(Reply::Cards { incarnation, cards }) => {
                    return Ok((incarnation, cards));
                }
                Ok(Reply::Refused(reason)) => return Err(Failure::Refused(reason)),
                // It starts, or has just gone: try again until the deadline.
                Ok(Reply::NotReady) | Err(PeerError::Io { .. } | PeerError::Closed) => {
                    sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(1));
                }
                Ok(_) => return Err(peer_failure(&PeerError::Misbehaved(Misbehaviour::Answer))),
                Err(error) => return Err(peer_failure(&error)),
            }
        }
    }

    /// Asks whether the lease held until now for what was read by and for, until there is an answer. The
    /// deadline is the caller's.
    pub(super) async fn confirm(
        &self,
        ticket: &Ticket,
        attempt: u64,
        claim: Claim,
        deadline: Instant,
    ) -> Option<Answer> {
        if self.introduced.knows(&ticket.address) {
            // Nobody there can be asked: how long the blocks stay as they are is known by the clock alone.
            return (Instant::now() < deadline).then_some(Answer::Held);
        }
        let consumer = Consumer {
            engine: self.rank.engine.clone(),
            rank: self.rank.number,
            ranks: self.rank.ranks,
            attempt,
        };
        loop {
            let asked = async {
                let link = self.links.get(&ticket.address, deadline.into()).await?;
                let (incarnation, key) = (ticket.incarnation, ticket.key());
                let consumer = consumer.clone();
                let question = Question::Confirm { incarnation, key, consumer, claim };
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

    /// Asks once how far the request of a ticket is.
    pub(super) async fn ask_how_far(
        &self,
        ticket: &Ticket,
        known: Known,
    ) -> Result<Told, PeerError> {
        let sought = Sought::Lease { incarnation: ticket.incarnation, key: ticket.key() };
        let (_, told) = self.links.follow(&ticket.address, sought, known).await?;
        Ok(told)
    }

    /// Asks once what a rank has written in a step that is in flight, beyond so many states.
    pub(super) async fn ask_what_is_written(
        &self,
        ticket: &Ticket,
        rank: u32,
        step: u64,
        known: u32,
    ) -> Result<TaskReply, PeerError> {
        let deadline = after(PATIENT_ANSWER).into();
        let link = self.links.get(&ticket.address, deadline).await?;
        let (incarnation, key) = (ticket.incarnation, ticket.key());
        let question = Question::Written { incarnation, key, rank, step, known };
        match link.ask(question, deadline).await? {
            Reply::Task(reply) => Ok(reply),
            _ => Err(PeerError::Misbehaved(Misbehaviour::Answer)),
        }
    }

    /// The plan for an engine, layer by layer; `None` where there is none.
    pub(super) async fn by_layer(&self, engine: &SourceEngine) -> Option<Arc<LayerPlan>> {
        let compile = || async {
            let (own, theirs) = (self.rank.manifest.clone(), engine.manifests.clone());
            let how = self.rank.spread();
            let compiled = tokio::task::spawn_blocking(move || {
                LayerPlan::compile(&own, &theirs.iter().collect::<Vec<_>>(), how)
            });
            match compiled.await {
                Ok(Ok(plan)) if !plan.layers().is_empty() => Some(Arc::new(plan)),
                Ok(Ok(_)) | Err(_) => None,
                Ok(Err(error)) => {
                    warn!(%error, "requests are not read layer by layer");
                    None
                }
            }
        };
        engine.layers.get_or_init(compile).await.clone()
    }

    /// Makes an engine known that runs no agent.
    pub(super) fn introduce(
        &self,
        address: &str,
        incarnation: Incarnation,
        ranks: Vec<IntroducedRank>,
    ) -> Result<(), Error> {
        self.introduced.add(&self.rank, address, incarnation, ranks)
    }

    /// Tells P that it need not keep the blocks for this rank's engine; not where nobody has ever answered.
    pub(super) async fn abandon(&self, ticket: &Ticket) {
        if self.introduced.knows(&ticket.address) {
            return;
        }
        if let Err(error) = self.links.abandon(ticket, false).await {
            debug!(%error, "cannot give up the lease: it will expire");
        }
    }

    /// Never reads from this engine again: the next request repeats the handshake.
    pub(super) fn forget(&self, engine: &Arc<SourceEngine>) {
        let entry = self.known.lock().get(&*engine.whose.0).cloned();
        let known = entry.and_then(|one| one.take_if(|known| Arc::ptr_eq(known, engine)));
        if known.is_some() {
            info!(address = &*engine.whose.0, "the engine is forgotten");
        }
        engine.leave();
    }
}

fn peer_failure(error: &PeerError) -> Failure {
    match error {
        error if is_final(error) => Failure::Refused(error.to_string()),
        PeerError::Misbehaved(_) => Failure::PeerMisbehaved(error.to_string()),
        error => Failure::PeerGone(error.to_string()),
    }
}
