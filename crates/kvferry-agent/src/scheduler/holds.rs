//! The leases of other engines that this one keeps alive, because it wants to read what they keep.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::sleep_until;
use tracing::warn;

use super::status::{HoldStatus, milliseconds};
use crate::background::after;
use crate::error::{Misbehaviour, PeerError};
use crate::mailbox::Mailbox;
use crate::metrics::SchedulerMetrics;
use crate::rules::lease::{Answer, Ended, LeaseKey, Loss};
use crate::wire::link::{Caller, Links};
use crate::wire::message::{Question, Reply};
use crate::wire::ticket::{Incarnation, Ticket};

/// A request of this engine whose blocks elsewhere are gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The ticket that was held; `None` where the other engine never heard of the request.
    pub ticket: Option<Ticket>,
    /// The name by which this engine followed the request, if it did.
    pub follows: Option<String>,
    /// Why.
    pub why: LostWhy,
}

/// Why blocks elsewhere are gone.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LostWhy {
    /// The engine says that the lease is not held.
    ///
    /// What to do: compute the request here. If leases expire often, let them last longer, or find
    /// out why requests wait so long.
    #[error("{0}")]
    NotHeld(Loss),
    /// The engine cannot be asked.
    ///
    /// What to do: check that the other engine runs and can be reached; compute the request here.
    #[error("{0}")]
    Unreachable(PeerError),
    /// The request has waited for as long as it may.
    ///
    /// What to do: raise `patience`, or give this engine fewer requests.
    #[error("it has waited for too long")]
    Patience,
    /// The engine never heard of the request that was to be followed by its name.
    ///
    /// What to do: compute the request here. If it happens often, check that the router sends the request
    /// to both engines under the same name, or raise `patience`.
    #[error("the engine never heard of it")]
    NeverHeardOf,
}

/// All leases that are kept alive. A ticket names a lease: engines choose the names of their requests
/// by themselves, and two of them may choose the same.
#[derive(Debug)]
pub(super) struct Holds {
    held: Mutex<HashMap<Ticket, Hold>>,
    changed: Notify,
    lost: Mailbox<Lost>,
    pub(super) links: Links,
    metrics: Arc<SchedulerMetrics>,
}

#[derive(Clone, Debug)]
struct Hold {
    /// The name by which this engine follows the request, if it does.
    follows: Option<String>,
    since: Instant,
    reading: bool,
    until: Instant,
    next_beat: Instant,
    last_answer: Instant,
    beating: bool,
}

impl Holds {
    pub(super) fn new(caller: Caller, metrics: Arc<SchedulerMetrics>) -> Self {
        Self {
            held: Mutex::default(),
            changed: Notify::new(),
            lost: Mailbox::default(),
            links: Links::new(caller),
            metrics,
        }
    }

    pub(super) fn hold(&self, ticket: &Ticket, patience: Duration) {
        self.insert(ticket, patience, None);
    }

    /// The same, for a request that is followed by this name.
    pub(super) fn hold_followed(&self, ticket: &Ticket, patience: Duration, request: &str) {
        self.insert(ticket, patience, Some(request.to_owned()));
    }

    fn insert(&self, ticket: &Ticket, patience: Duration, follows: Option<String>) {
        let now = Instant::now();
        let hold = Hold {
            follows,
            since: now,
            reading: false,
            until: after(patience),
            next_beat: now,
            last_answer: now,
            beating: false,
        };
        let mut held = self.held.lock();
        let before = held.insert(ticket.clone(), hold);
        if let (Some(before), Some(now)) = (before, held.get_mut(ticket)) {
            // Who holds what it follows goes on following it.
            now.follows = now.follows.take().or(before.follows);
        }
        drop(held);
        self.changed.notify_one();
    }

    /// There is news: from here on it waits for as long again.
    pub(super) fn wait_on(&self, ticket: &Ticket, patience: Duration) {
        if let Some(hold) = self.held.lock().get_mut(ticket) {
            hold.until = after(patience);
        }
    }

    pub(super) fn holds(&self, ticket: &Ticket) -> bool {
        self.held.lock().contains_key(ticket)
    }

    pub(super) fn reading(&self, ticket: &Ticket) {
        if let Some(hold) = self.held.lock().get_mut(ticket) {
            hold.reading = true;
        }
    }

    /// Whether it was held, and its engine was not asked yet.
    pub(super) fn let_go(&self, ticket: &Ticket) -> bool {
        let hold = self.held.lock().remove(ticket);
        hold.is_some_and(|hold| hold.next_beat == hold.since)
    }

    /// Tells the engine that holds the blocks that they are not wanted any more, unless nobody has ever answered there.
    /// `unasked` is what letting it go answered.
    pub(super) async fn abandon(&self, ticket: &Ticket, unasked: bool) {
        if let Err(error) = self.links.abandon(ticket, unasked).await {
            warn!(from = ticket.engine, theirs = ticket.request, %error, "cannot give up the lease: it will expire");
        }
    }

    /// What was lost since the last call.
    pub(super) fn lost(&self) -> Vec<Lost> {
        self.lost.take()
    }

    pub(super) fn len(&self) -> usize {
        self.held.lock().len()
    }

    pub(super) fn status(&self) -> Vec<HoldStatus> {
        let mut holds: Vec<HoldStatus> = {
            let holds = self.held.lock();
            let holds = holds.iter().map(|(ticket, hold)| HoldStatus {
                request: ticket.request.clone(),
                engine: ticket.engine.clone(),
                address: ticket.address.clone(),
                age_ms: milliseconds(hold.since.elapsed()),
                reading: hold.reading,
            });
            holds.collect()
        };
        holds.sort_by(|a, b| (&a.request, &a.engine).cmp(&(&b.request, &b.engine)));
        holds
    }

    /// The engines that this one is connected to.
    pub(super) fn connected_to(&self) -> Vec<String> {
        let mut addresses = self.links.addresses();
        addresses.sort();
        addresses
    }

    /// Keeps them alive, for as long as this is polled: one message to each engine for all of its.
    pub(super) async fn beat(self: Arc<Self>) {
        loop {
            let next = {
                let holds = self.held.lock();
                let next = holds.values().map(|hold| match hold.beating {
                    true => hold.until,
                    false => hold.until.min(hold.next_beat),
                });
                next.min()
            };
            match next {
                Some(next) => tokio::select! {
                    () = sleep_until(next.into()) => {}
                    () = self.changed.notified() => continue,
                },
                None => {
                    self.changed.notified().await;
                    continue;
                }
            }
            let now = Instant::now();
            for ticket in self.out_of_patience(now) {
                self.lose(&ticket, LostWhy::Patience);
            }
            let (due, deadline) = self.due(now);
            for (address, tickets) in due {
                let holds = self.clone();
                tokio::spawn(async move {
                    holds.extend(&address, tickets, deadline.into()).await;
                    holds.changed.notify_one();
                });
            }
        }
    }

    /// Those that have waited for as long as they may.
    fn out_of_patience(&self, now: Instant) -> Vec<Ticket> {
        let held = self.held.lock();
        let tired = held.iter().filter(|(_, hold)| now >= hold.until);
        tired.map(|(ticket, _)| ticket.clone()).collect()
    }

    /// Those whose turn it is, by address, and until when the answers must be there.
    fn due(&self, now: Instant) -> (HashMap<String, Vec<Ticket>>, Instant) {
        let mut due: HashMap<String, Vec<Ticket>> = HashMap::new();
        let mut shortest = Duration::from_secs(3600);
        for (ticket, hold) in &mut *self.held.lock() {
            if hold.beating || hold.next_beat > now {
                continue;
            }
            hold.beating = true;
            shortest = shortest.min(ticket.term());
            due.entry(ticket.address.clone()).or_default().push(ticket.clone());
        }
        (due, now + shortest / 3)
    }

    /// Extends the leases of one engine.
    async fn extend(&self, address: &str, tickets: Vec<Ticket>, deadline: tokio::time::Instant) {
        let mut lives: BTreeMap<Incarnation, Vec<Ticket>> = BTreeMap::new();
        for ticket in tickets {
            lives.entry(ticket.incarnation).or_default().push(ticket);
        }
        for (incarnation, tickets) in lives {
            let keys: Vec<LeaseKey> = tickets.iter().map(Ticket::key).collect();
            let answer = async {
                let link = self.links.get(address, deadline).await?;
                link.ask(Question::Extend { incarnation, keys }, deadline).await
            };
            let answer = match answer.await {
                Ok(Reply::Leases(answers)) if answers.len() == tickets.len() => Ok(answers),
                Ok(_) => Err(PeerError::Misbehaved(Misbehaviour::Answer)),
                Err(error) => Err(error),
            };
            for (i, ticket) in tickets.into_iter().enumerate() {
                let answer = answer.as_ref().map(|answers| answers[i]);
                if let Some(why) = self.answered(&ticket, answer) {
                    self.lose(&ticket, why);
                }
            }
        }
    }

    /// Takes note of an answer. Says why the lease is lost, if it is.
    fn answered(&self, ticket: &Ticket, answer: Result<Answer, &PeerError>) -> Option<LostWhy> {
        let now = Instant::now();
        let mut holds = self.held.lock();
        let hold = holds.get_mut(ticket)?;
        hold.beating = false;
        let why = match answer {
            Ok(Answer::Held) => {
                self.metrics.heartbeats.add(1);
                hold.last_answer = now;
                hold.next_beat = now + ticket.term() / 3;
                return None;
            }
            // Every rank has read it: the engine has only not heard of it yet.
            Ok(Answer::NotHeld(Loss::Ended(Ended::Confirmed))) => {
                holds.remove(ticket);
                return None;
            }
            Ok(Answer::NotHeld(loss)) => LostWhy::NotHeld(loss),
            Err(error) => {
                hold.next_beat = now + ticket.term() / 6;
                // Once a whole term has passed without an answer the lease may be gone. Whoever
                // waits for it need not wait any longer.
                if now.duration_since(hold.last_answer) < ticket.term() {
                    return None;
                }
                LostWhy::Unreachable(error.clone())
            }
        };
        Some(why)
    }

    /// A lease is lost, unless nobody holds it any more.
    pub(super) fn lose(&self, ticket: &Ticket, why: LostWhy) {
        let Some(hold) = self.held.lock().remove(ticket) else { return };
        self.report(Lost { ticket: Some(ticket.clone()), follows: hold.follows, why });
    }

    pub(super) fn report(&self, lost: Lost) {
        let Lost { ticket, follows, why } = &lost;
        let from = ticket.as_ref().map(|ticket| &ticket.engine);
        let theirs = ticket.as_ref().map(|ticket| &ticket.request);
        warn!(request = follows, from, theirs, %why, "what another engine was to keep is lost");
        self.metrics.lost.add(1);
        self.lost.put(lost);
    }
}
