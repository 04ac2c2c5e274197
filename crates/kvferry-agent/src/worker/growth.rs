//! What a load reads next while the engine that it reads from still computes the request, and how it hears
//! of that.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_plan::{Growth, Plan};
use tokio::time::sleep;
use tracing::debug;

use super::load::{Load, Portion};
use super::peers::Peers;
use crate::rules::failure::Failure;
use crate::rules::follow::{Contradiction, Follower, Pace, Part};
use crate::rules::grant::{Fingerprint, Grant};
use crate::rules::lease::Loss;
use crate::wire::link::{Told, is_final};
use crate::wire::message::{Known, Ticket};

/// However quickly an engine answers, it is not asked more often than this without news.
const PAUSE: Duration = Duration::from_millis(10);

/// What is known and read of one request.
#[derive(Debug)]
pub(super) struct Growing {
    growth: Growth,
    follower: Follower,
    /// What the engine has said since the last part was read: nothing may be in flight when it counts.
    heard: Option<(Grant, bool)>,
    part: Option<Part>,
}

impl Growing {
    /// Of a load, by the plan for the engine that it reads from.
    pub(super) fn new(load: &Load, plan: &Plan) -> Self {
        let growth = plan.growth();
        let held = growth.groups.iter().zip(&load.cached).filter(|(grows, _)| **grows);
        // The group that has least decides: each is asked for what it does not have.
        let from = held.map(|(_, cached)| *cached).min().unwrap_or(0);
        let pace = Pace { from, to: load.tokens, step: growth.step };
        let follower = Follower::of(load.grant.clone(), pace);
        Self { growth, follower, heard: None, part: None }
    }

    /// Takes note of what the engine says, for when nothing is in flight.
    pub(super) fn hear(&mut self, grant: Grant, sealed: bool) {
        self.heard = Some((grant, sealed));
    }

    /// Chooses what to read next. Nothing is in flight. Answers whether there is anything.
    pub(super) fn next(&mut self) -> Result<bool, Contradiction> {
        if let Some((grant, sealed)) = self.heard.take() {
            self.follower.hear(grant, sealed)?;
        }
        self.part = self.follower.next();
        Ok(self.part.is_some())
    }

    /// Whether what is to be read is all that is left.
    pub(super) fn last(&self) -> bool {
        self.part.is_some_and(|part| part.last)
    }

    /// What was chosen has arrived.
    pub(super) fn arrived(&mut self) {
        if let Some(part) = self.part.take() {
            self.follower.arrived(&part);
        }
    }

    /// What all was read by.
    pub(super) fn read_by(&self) -> Fingerprint {
        self.follower.grant().fingerprint()
    }

    /// What was chosen, as a request of its own.
    pub(super) fn portion(&self, load: &Load) -> Option<Portion> {
        let Part { tokens, held, last } = self.part?;
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
        Some(Portion {
            grant: self.follower.grant().clone(),
            tokens,
            cached,
            before: load.cached.clone(),
            destination: load.destination.clone(),
            rest: load.rest && last,
        })
    }
}

/// What is heard of a lease that is followed.
#[derive(Debug)]
pub(super) enum Heard {
    /// How far it has come, and whether that is all.
    Grown(Grant, bool),
    Lost(Loss),
    Failed(Failure),
}

/// Asks an engine how far a request is, and tells, until all of it is complete or nothing more can be
/// heard. An engine that cannot be reached for so long is gone.
pub(super) async fn follow(
    peers: Arc<Peers>,
    ticket: Ticket,
    unreachable: Duration,
    tell: impl Fn(Heard),
) {
    let mut grant = Grant::default();
    let mut last_answer = Instant::now();
    loop {
        let asked = Instant::now();
        let known = Known::of(ticket.nonce, &grant);
        match peers.ask_how_far(&ticket, known).await {
            Ok(Told::News(news)) => {
                last_answer = Instant::now();
                let new = (news.epoch, news.tokens) != (grant.epoch, grant.tokens) || news.sealed;
                let sealed = news.sealed;
                if new {
                    let Some(grown) = news.after(&grant) else {
                        let reason = "it says how its block tables go on, but not from where";
                        return tell(Heard::Failed(Failure::PeerGone(reason.to_owned())));
                    };
                    grant = grown;
                    tell(Heard::Grown(grant.clone(), sealed));
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
