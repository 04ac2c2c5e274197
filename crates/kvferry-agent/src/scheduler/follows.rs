//! The requests that other engines compute for this one, and how far they are.
//!
//! Each is asked after by a task of its own: by its ticket or, where there is none, by its name, until the
//! engine has heard of it. From then on its lease is also held ([`holds`](super::holds)), which goes on when
//! all of it is computed.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout_at};
use tracing::{debug, info};

use super::holds::{Holds, Lost, LostWhy};
use crate::background::after;
use crate::error::{Error, Misbehaviour, PeerError};
use crate::rules::lease::{Ended, Loss};
use crate::wire::link::{Told, is_final};
use crate::wire::message::Welcome;
use crate::wire::news::{Known, News, Sought};
use crate::wire::ticket::Ticket;

/// A request that another engine computes for this one: where to ask for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Following {
    /// Its ticket is known.
    Ticket(Ticket),
    /// Only a name is known, which the engine there has given to it, or will.
    Name {
        /// The engine that was there last: one that has restarted may have another name. Empty where nobody knows.
        engine: String,
        /// Where it listens: `host:port`.
        address: String,
        /// The name.
        name: String,
    },
}

/// How far a request is that another engine computes for this one.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// Its ticket, to load it by.
    pub ticket: Ticket,
    /// How often the engine has started it over.
    pub epoch: u32,
    /// How many tokens are complete.
    pub tokens: u64,
    /// Whether the engine has begun to compute it, as far as it says so.
    pub begun: bool,
    /// Whether that is all.
    pub sealed: bool,
    /// How many tokens are completed in a second, as far as that is known.
    pub speed: Option<f64>,
}

/// All requests that are followed, by the names that this engine gives to them.
#[derive(Debug)]
pub(super) struct Follows {
    holds: Arc<Holds>,
    followed: Mutex<HashMap<String, Followed>>,
}

#[derive(Debug)]
struct Followed {
    /// The one that it is followed by, where it is not followed by a name.
    ticket: Option<Ticket>,
    progress: Option<Progress>,
    /// When how many tokens were complete, of this epoch.
    seen: VecDeque<(Instant, u64)>,
    task: Option<AbortHandle>,
}

impl Followed {
    /// As soon as it is known.
    fn ticket(&self) -> Option<&Ticket> {
        self.progress.as_ref().map(|progress| &progress.ticket).or(self.ticket.as_ref())
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// The speed is that of so many news.
const SEEN: usize = 8;
/// An engine that cannot be reached for so long is gone.
const UNREACHABLE: Duration = Duration::from_secs(10);
/// Whatever an engine answers, it is not asked more often than this without need.
const PAUSE: Duration = Duration::from_millis(20);

impl Follows {
    pub(super) fn new(holds: Arc<Holds>) -> Self {
        Self { holds, followed: Mutex::default() }
    }

    /// Follows a request until all of it is computed. It is lost when there is nothing new for
    /// `patience`.
    pub(super) fn follow(
        self: &Arc<Self>,
        request: &str,
        following: Following,
        patience: Duration,
        on: &Handle,
    ) -> Result<(), Error> {
        let mut followed = self.followed.lock();
        let Entry::Vacant(entry) = followed.entry(request.to_owned()) else {
            return Err(Error::Duplicate(request.to_owned()));
        };
        let ticket = match &following {
            Following::Ticket(ticket) => Some(ticket.clone()),
            Following::Name { .. } => None,
        };
        if let Some(ticket) = &ticket {
            // Before anybody can forget it.
            self.holds.hold_followed(ticket, patience, request);
        }
        let (progress, seen, task) = Default::default();
        let entry = entry.insert(Followed { ticket, progress, seen, task });
        // It waits for the map, so it does not end before it is in there.
        let task = self.clone().run(request.to_owned(), following, patience);
        entry.task = Some(on.spawn(task).abort_handle());
        Ok(())
    }

    /// How far a request is; `None` while the engine has not heard of it, and when it is lost or not
    /// followed.
    pub(super) fn progress(&self, request: &str) -> Option<Progress> {
        let progress = self.followed.lock().get(request)?.progress.clone()?;
        self.holds.holds(&progress.ticket).then_some(progress)
    }

    /// Stops to follow a request. Its ticket, if that is known, and whether its engine was not asked yet.
    pub(super) fn forget(&self, request: &str) -> Option<(Ticket, bool)> {
        let forgotten = self.followed.lock().remove(request)?;
        let ticket = forgotten.ticket()?.clone();
        let unasked = self.holds.let_go(&ticket);
        Some((ticket, unasked))
    }

    /// Stops to follow a request whose lease another one has, which goes on holding it.
    pub(super) fn leave(&self, request: &str) {
        self.followed.lock().remove(request);
    }

    /// Stops to follow the request of a ticket.
    pub(super) fn forget_ticket(&self, ticket: &Ticket) {
        self.followed.lock().retain(|_, one| one.ticket() != Some(ticket));
    }

    async fn run(self: Arc<Self>, request: String, following: Following, patience: Duration) {
        // Not before it is in the map.
        drop(self.followed.lock());
        let mut one = Run { all: &self, request, following, ticket: None, patience };
        let why = one.follow().await;
        if let Some(why) = why {
            one.lose(why);
        }
    }
}

/// One request on its way.
struct Run<'a> {
    all: &'a Follows,
    request: String,
    following: Following,
    /// Once it is known.
    ticket: Option<Ticket>,
    patience: Duration,
}

impl Run<'_> {
    /// Asks until all of it is computed, or says why it is lost.
    async fn follow(&mut self) -> Option<LostWhy> {
        if let Following::Ticket(ticket) = &self.following {
            self.ticket = Some(ticket.clone());
        }
        let mut known = Known::default();
        let mut news_until = after(self.patience);
        let mut last_answer = Instant::now();
        let mut trouble = None;
        loop {
            let asked = Instant::now();
            let Ok(answer) = timeout_at(news_until.into(), self.ask(&known)).await else {
                return Some(match (trouble, &self.ticket) {
                    (Some(error), _) => LostWhy::Unreachable(error),
                    (None, None) => LostWhy::NeverHeardOf,
                    (None, Some(_)) => LostWhy::Patience,
                });
            };
            if answer.is_ok() {
                (last_answer, trouble) = (Instant::now(), None);
            }
            match answer {
                Ok((Told::News(news), welcome)) => {
                    if known.lacks(&news) {
                        known.nonce = Some(news.key.nonce);
                        (known.epoch, known.tokens) = (news.epoch, news.tokens);
                        known.step = known.step.max(news.last_step());
                        news_until = after(self.patience);
                        if !self.hear(&news, &welcome) || news.sealed {
                            return None;
                        }
                    }
                }
                Ok((Told::NotHeardOf, _)) => {}
                // Every rank has read it: the engine has only not heard of it yet.
                Ok((Told::Lost(Loss::Ended(Ended::Confirmed)), _)) => return None,
                Ok((Told::Lost(loss), _)) => return Some(LostWhy::NotHeld(loss)),
                Err(error) => {
                    debug!(request = self.request, %error, "cannot be followed for now");
                    if is_final(&error) || last_answer.elapsed() > UNREACHABLE {
                        return Some(LostWhy::Unreachable(error));
                    }
                    trouble = Some(error);
                }
            }
            if asked.elapsed() < PAUSE {
                sleep(PAUSE - asked.elapsed().min(PAUSE)).await;
            }
        }
    }

    /// What the engine says, and who it is.
    async fn ask(&self, known: &Known) -> Result<(Told, Arc<Welcome>), PeerError> {
        let (address, sought) = match (&self.ticket, &self.following) {
            (Some(ticket), _) | (None, Following::Ticket(ticket)) => {
                let (incarnation, key) = (ticket.incarnation, ticket.key());
                (&ticket.address, Sought::Lease { incarnation, key })
            }
            (None, Following::Name { address, name, .. }) => (address, Sought::Name(name.clone())),
        };
        let (welcome, told) = self.all.holds.links.follow(address, sought, known.clone()).await?;
        // Whoever is at the address may have a request of this name, and what it was computed from is
        // compared in the end. A ticket is of one engine.
        if let Some(ticket) = &self.ticket
            && welcome.engine != ticket.engine
        {
            return Err(PeerError::Refused(format!(
                "the engine at {address} is '{}', not '{}'",
                welcome.engine, ticket.engine
            )));
        }
        match told {
            Told::News(news) if self.ticket.as_ref().is_some_and(|t| t.key() != news.key) => {
                Err(PeerError::Misbehaved(Misbehaviour::Answer))
            }
            told => Ok((told, welcome)),
        }
    }

    /// Takes note of how far it is. Answers whether anybody still wants to know.
    fn hear(&mut self, news: &News, welcome: &Welcome) -> bool {
        let ticket = match (&self.ticket, &self.following) {
            (Some(ticket), _) | (None, Following::Ticket(ticket)) => ticket.clone(),
            (None, Following::Name { engine, address, .. }) => {
                if !engine.is_empty() && welcome.engine != *engine {
                    let (now, before) = (&welcome.engine, engine);
                    info!(address, now, before, "another engine answers: it has restarted");
                }
                Ticket {
                    engine: welcome.engine.clone(),
                    address: address.clone(),
                    incarnation: news.incarnation,
                    request: news.key.request.clone(),
                    nonce: news.key.nonce,
                    term_ms: welcome.term_ms,
                }
            }
        };
        let mut followed = self.all.followed.lock();
        let Some(one) = followed.get_mut(&self.request) else { return false };
        let learnt = self.ticket.is_none();
        let again = one.progress.as_ref().is_some_and(|before| before.epoch != news.epoch);
        if again {
            one.seen.clear();
        }
        if news.tokens > 0 && one.seen.back().is_none_or(|(_, tokens)| *tokens < news.tokens) {
            if one.seen.len() == SEEN {
                one.seen.pop_front();
            }
            one.seen.push_back((Instant::now(), news.tokens));
        }
        one.progress = Some(Progress {
            ticket: ticket.clone(),
            epoch: news.epoch,
            tokens: news.tokens,
            begun: news.tokens > 0 || !news.in_flight.is_empty(),
            sealed: news.sealed,
            speed: speed(&one.seen),
        });
        // Under the lock: whoever sees a ticket can settle it.
        match learnt {
            true => self.all.holds.hold_followed(&ticket, self.patience, &self.request),
            false => self.all.holds.wait_on(&ticket, self.patience),
        }
        self.ticket = Some(ticket);
        true
    }

    fn lose(&self, why: LostWhy) {
        if let Some(ticket) = &self.ticket {
            return self.all.holds.lose(ticket, why);
        }
        let wanted = self.all.followed.lock().remove(&self.request);
        if let Some(mut wanted) = wanted {
            // It is this very task.
            wanted.task = None;
            self.all.holds.report(Lost { ticket: None, follows: Some(self.request.clone()), why });
        }
    }
}

fn speed(seen: &VecDeque<(Instant, u64)>) -> Option<f64> {
    let ((then, before), (now, tokens)) = (seen.front()?, seen.back()?);
    let time = now.duration_since(*then).as_secs_f64();
    (time > 0.0).then(|| (tokens - before) as f64 / time)
}
