//! What a load reads next while the engine that it reads from still computes the request, and how it hears
//! of that.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_plan::{Growth, LayerPlan, Plan};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tracing::{Instrument, debug};

use super::load::{Load, Portion};
use super::peers::Peers;
use super::source_engine::SourceEngine;
use super::words::{Word, Words, listen};
use crate::rules::failure::Failure;
use crate::rules::follow::{Contradiction, Follower, Pace, Part};
use crate::rules::grant::{Fingerprint, Grant, InFlight};
use crate::rules::lease::{Loss, MOST_ENCLOSED};
use crate::wire::link::{Told, is_final};
use crate::wire::news::Known;
use crate::wire::ticket::Ticket;

/// However quickly an engine answers, it is not asked more often than this without news.
const PAUSE: Duration = Duration::from_millis(10);

/// What is known and read of one request.
#[derive(Debug)]
pub(super) struct Growing {
    growth: Growth,
    follower: Follower,
    /// What the engine has said since the last part was read: nothing may be in flight when it counts.
    heard: Option<(Arc<Grant>, Vec<InFlight>, bool)>,
    /// What its ranks have said, once it is read by layers.
    words: Option<Words>,
    part: Option<Part>,
    /// Tokens that it is all about.
    all: u64,
    /// What its reads have taken so far.
    spent: Spent,
    /// Seconds that a token takes, of all layers, as far as is known.
    each: Option<f64>,
}

/// Seconds, and the tokens of all layers that they went into. The last read of a request brings few tokens and
/// takes no less time for that: so all of them count together.
#[derive(Debug, Default)]
struct Spent {
    seconds: f64,
    tokens: f64,
}

impl Spent {
    fn add(&mut self, took: Duration, tokens: f64) {
        self.seconds += took.as_secs_f64();
        self.tokens += tokens;
    }

    /// Seconds for a token, once there was one.
    fn each(&self) -> Option<f64> {
        (self.tokens > 0.0).then(|| self.seconds / self.tokens)
    }
}

impl Growing {
    /// Of a load from an engine.
    pub(super) fn new(load: &Load, engine: &SourceEngine) -> Self {
        let growth = engine.plan.growth();
        let held = growth.groups.iter().zip(&load.cached).filter(|(grows, _)| **grows);
        // The group that has least decides: each is asked for what it does not have.
        let from = held.map(|(_, cached)| *cached).min().unwrap_or(0);
        let pace = Pace { from, to: load.tokens, step: growth.step };
        let follower = Follower::of(load.grant.clone().map(Arc::new), pace);
        let (all, each) = (load.tokens.saturating_sub(from), *engine.each.lock());
        let spent = Spent::default();
        Self { growth, follower, heard: None, words: None, part: None, all, spent, each }
    }

    /// Whether all of it takes so long that some of it is worth reading ahead, by what was read last.
    pub(super) fn is_worth_it(&self, least_ahead: Duration) -> bool {
        self.each.is_none_or(|each| each * self.all as f64 >= least_ahead.as_secs_f64())
    }

    /// Takes note of what the engine says, for when nothing is in flight.
    pub(super) fn hear(&mut self, grant: Arc<Grant>, in_flight: Vec<InFlight>, sealed: bool) {
        self.heard = Some((grant, in_flight, sealed));
    }

    /// From now on it can be read by layers.
    pub(super) fn by_layer(&mut self, plan: Arc<LayerPlan>) {
        self.follower.by_layer(plan.layers().len());
        self.words = Some(Words::new(plan));
    }

    /// Takes note of what a rank has written. That is so, whatever is in flight.
    pub(super) fn hear_word(&mut self, word: Word) {
        if let Some(words) = &mut self.words {
            let (step, layers) = words.hear(word);
            self.follower.written(step, layers);
        }
    }

    /// Chooses what to read next. Nothing is in flight. Answers whether there is anything that is worth it:
    /// before the end, what takes less than so long waits for more.
    pub(super) fn next(&mut self, least_ahead: Duration) -> Result<bool, Contradiction> {
        if let Some((grant, in_flight, sealed)) = self.heard.take() {
            self.follower.hear(grant, in_flight, sealed)?;
        }
        self.part = self.follower.next().filter(|part| {
            let takes = self.each.map(|each| each * self.tokens(part));
            let worth_it = takes.is_none_or(|takes| takes >= least_ahead.as_secs_f64());
            worth_it || !self.follower.may_grow(part)
        });
        Ok(self.part.is_some())
    }

    /// As many tokens of all layers as there is to read in a part.
    fn tokens(&self, part: &Part) -> f64 {
        let all = self.words.as_ref().map_or(0, |words| words.plan.layers().len());
        let share = match &part.layers {
            Some(layers) if all > 0 => layers.len() as f64 / all as f64,
            _ => 1.0,
        };
        part.tokens.saturating_sub(part.held) as f64 * share
    }

    /// Whether what is to be read is all that is left.
    pub(super) fn last(&self) -> bool {
        self.part.as_ref().is_some_and(|part| part.last)
    }

    /// Whether what is to be read are some layers, before the others are complete.
    pub(super) fn ahead(&self) -> bool {
        self.part.as_ref().is_some_and(|part| part.layers.is_some())
    }

    /// The plan by which to read what was chosen, where that is not the usual one.
    pub(super) fn plan(&self) -> Option<Plan> {
        let layers = self.part.as_ref()?.layers.as_ref()?;
        Some(self.words.as_ref()?.plan.of(|layer| layers.contains(&layer)))
    }

    /// What was chosen has arrived from its engine, after so long.
    pub(super) fn arrived(&mut self, engine: &SourceEngine, took: Duration) {
        if let Some(part) = self.part.take() {
            self.spent.add(took, self.tokens(&part));
            if let Some(each) = self.spent.each() {
                self.each = Some(each);
                *engine.each.lock() = self.each;
            }
            self.follower.arrived(&part);
        }
    }

    /// What all was read by.
    pub(super) fn read_by(&self) -> Fingerprint {
        self.follower.grant().fingerprint()
    }

    /// What was chosen, as a request of its own.
    pub(super) fn portion(&self, load: &Arc<Load>) -> Option<Portion> {
        let Part { tokens, held, last, .. } = *self.part.as_ref()?;
        let groups = self.growth.groups.iter().zip(&load.cached);
        let cached = groups.map(|(grows, cached)| match (grows, last) {
            (true, false) => (*cached).max(held).min(tokens),
            (true, true) => (*cached).max(held),
            (false, true) => *cached,
            // It waits for the end.
            (false, false) => tokens,
        });
        let cached: Vec<u64> = match self.growth.groups.len() == load.cached.len() {
            true => cached.collect(),
            // That they do not fit is said by whoever checks the request.
            false => load.cached.clone(),
        };
        let grant = self.follower.grant().clone();
        // Layers that are read ahead have been written, if not granted yet.
        let written = if self.ahead() { grant.tokens.max(tokens) } else { grant.tokens };
        Some(Portion {
            load: load.clone(),
            grant,
            written,
            tokens,
            cached,
            rest: load.rest && last,
        })
    }
}

/// What is heard of a lease that is followed.
#[derive(Debug)]
pub(super) enum Heard {
    /// How far it has come, what is in flight beyond that, and whether that is all.
    Grown(Arc<Grant>, Vec<InFlight>, bool),
    /// What goes with the blocks: before it is said that they are all.
    Enclosed(Vec<u8>),
    /// It can be read by layers.
    ByLayer(Arc<LayerPlan>),
    /// What a rank has written.
    Word(Word),
    Lost(Loss),
    Failed(Failure),
}

/// Asks an engine how far a request is, and tells, until all of it is complete or nothing more can be
/// heard; asks its ranks, too, where it is to be read by layers. An engine that cannot be reached for so long is
/// gone.
pub(super) async fn follow(
    peers: Arc<Peers>,
    engine: Arc<SourceEngine>,
    ticket: Ticket,
    layers: bool,
    unreachable: Duration,
    tell: impl Fn(Heard) + Clone + Send + 'static,
) {
    // Those who listen to the ranks; they end with this.
    let mut listeners = JoinSet::new();
    let steps = watch::Sender::default();
    let mut step = 0;
    let mut grant = Arc::new(Grant::default());
    let mut last_answer = Instant::now();
    loop {
        let asked = Instant::now();
        let known = Known::of(ticket.nonce, &grant, step);
        match peers.ask_how_far(&ticket, known.clone()).await {
            Ok(Told::News(mut news)) => {
                last_answer = Instant::now();
                let new = known.lacks(&news);
                let sealed = news.sealed;
                if news.enclosed.len() > MOST_ENCLOSED {
                    let reason = "it encloses more than is allowed";
                    return tell(Heard::Failed(Failure::PeerMisbehaved(reason.to_owned())));
                }
                if sealed {
                    tell(Heard::Enclosed(std::mem::take(&mut news.enclosed)));
                }
                if new {
                    let in_flight = news.in_flight.clone();
                    if let Some(last) = in_flight.last() {
                        step = last.step;
                        steps.send_replace(in_flight.clone());
                        if layers && listeners.is_empty() {
                            let (peers, engine) = (peers.clone(), engine.clone());
                            let (ticket, steps) = (ticket.clone(), steps.subscribe());
                            let tell = tell.clone();
                            listeners.spawn(
                                by_layer(peers, engine, ticket, steps, tell).in_current_span(),
                            );
                        }
                    }
                    let Some(grown) = news.after(&grant) else {
                        let reason = "it says how its block tables go on, but not from where";
                        return tell(Heard::Failed(Failure::PeerMisbehaved(reason.to_owned())));
                    };
                    grant = Arc::new(grown);
                    tell(Heard::Grown(grant.clone(), in_flight, sealed));
                }
                if sealed {
                    return;
                }
                if new {
                    continue;
                }
            }
            Ok(Told::Lost(loss)) => return tell(Heard::Lost(loss)),
            // It is asked by ticket.
            Ok(Told::NotHeardOf) => return tell(Heard::Lost(Loss::Unknown)),
            Err(error) => {
                debug!(%error, "cannot be followed for now");
                if is_final(&error) {
                    return tell(Heard::Failed(Failure::Refused(error.to_string())));
                }
                if last_answer.elapsed() > unreachable {
                    return tell(Heard::Failed(Failure::PeerGone(error.to_string())));
                }
            }
        }
        if let Some(left) = PAUSE.checked_sub(asked.elapsed()) {
            sleep(left).await;
        }
    }
}

/// Tells what ranks have written, once it is known how to read that.
async fn by_layer(
    peers: Arc<Peers>,
    engine: Arc<SourceEngine>,
    ticket: Ticket,
    steps: watch::Receiver<Vec<InFlight>>,
    tell: impl Fn(Heard) + Clone + Send + 'static,
) {
    if let Some(plan) = peers.by_layer(&engine).await {
        tell(Heard::ByLayer(plan));
        listen(peers, engine, ticket, steps, move |word| tell(Heard::Word(word))).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A short tail must not make tokens look dear: the next request would be read ahead for nothing.
    #[test]
    fn a_token_costs_what_all_of_them_took() {
        let mut spent = Spent::default();
        spent.add(Duration::from_millis(1), 0.0);
        assert_eq!(spent.each(), None);
        spent.add(Duration::from_millis(1), 1000.0);
        spent.add(Duration::from_millis(1), 2.0);
        assert_eq!(spent.each().map(|each| (each * 1e9).round()), Some((3e6_f64 / 1002.0).round()));
    }
}
