//! What peers are told at the engine's one address.

use kvferry_layout::Manifest;
use kvferry_plan::Plan;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::core::{Core, Published};
use super::notes::Did;
use super::watchers::Of;
use crate::rules::grant::{Claim, Fingerprint, Grant};
use crate::rules::lease::{Answer, Consumer, LeaseKey, Loss};
use crate::wire::listener::Host;
use crate::wire::message::{Card, Question, Reply, ServiceCard, Welcome};
use crate::wire::news::{Known, News, Sought};
use crate::wire::task::{Task, TaskReply};
use crate::wire::ticket::Incarnation;

impl Host for Core {
    fn welcome(&self) -> Welcome {
        Welcome {
            engine: self.options.engine.clone(),
            incarnation: self.incarnation(),
            term_ms: self.term_ms(),
        }
    }

    async fn answer(&self, who: &str, question: Question) -> Reply {
        match question {
            Question::Fit { manifest, transport } => {
                let Some(published) = self.published() else { return Reply::NotReady };
                let incarnation = published.incarnation;
                let fitted =
                    tokio::task::spawn_blocking(move || fit(&published, &manifest, &transport));
                match fitted.await {
                    Ok(Ok(cards)) => {
                        info!(who, cards = cards.len(), "shook hands");
                        Reply::Cards { incarnation, cards }
                    }
                    Ok(Err(reason)) => {
                        self.metrics.refused.add(1);
                        warn!(who, reason, "refused a peer");
                        Reply::Refused(reason)
                    }
                    Err(_) => Reply::Refused("the engine could not compile the plan".to_owned()),
                }
            }
            Question::Extend { incarnation, keys } => {
                let restarted = incarnation != self.incarnation();
                let now = self.now();
                let mut leases = self.leases();
                let answers = keys.iter().map(|key| match restarted {
                    true => Answer::NotHeld(Loss::Restarted),
                    false => leases.extend(key, now),
                });
                Reply::Leases(answers.collect())
            }
            Question::Confirm { incarnation, key, consumer, claim } => {
                self.confirm(who, incarnation, &key, &consumer, claim)
            }
            Question::Abandon { incarnation, keys } => {
                if incarnation == self.incarnation() {
                    for key in keys {
                        if self.leases().abandon(&key, self.now()) {
                            debug!(who, %key, "abandoned");
                            self.watchers.wake(&Of::Request(key.request));
                        }
                    }
                    self.collect();
                }
                Reply::Done
            }
            Question::Ping => Reply::Done,
            // That has a question of its own, which nobody waits for as long as a peer says.
            Question::Ask { task: Task::Written { .. }, .. } => {
                Reply::Task(TaskReply::Refused("what a step writes is no task".to_owned()))
            }
            Question::Ask { incarnation, key, read_by, rank, patience_ms, task } => {
                debug!(who, %key, rank, "asked for a task");
                let asked = self.granted(who, incarnation, &key, read_by);
                let asked = asked.and_then(|grant| Ok((self.service(rank)?, grant)));
                Reply::Task(match asked {
                    Ok((service, grant)) => {
                        self.relay.pass(&service, grant, patience_ms, task).await
                    }
                    Err(reply) => reply,
                })
            }
            Question::Written { incarnation, key, rank, step, known } => Reply::Task(
                self.written(incarnation, &key, rank, Task::Written { step, known }).await,
            ),
            Question::Do { .. } => {
                Reply::Refused("this is a scheduler: it takes no tasks itself".to_owned())
            }
            Question::Status => {
                Reply::Status(self.told.lock().tell(std::time::Instant::now(), || self.status()))
            }
            Question::Drain { on } => {
                match on {
                    true => self.drain(),
                    false => self.resume(),
                };
                debug!(who, on, "told to drain, or not to");
                Reply::Left(self.left())
            }
            Question::Follow { sought, known } => self.follow(who, sought, &known).await,
        }
    }
}

impl Core {
    /// Tells how far a request is, as soon as that is more than is known.
    async fn follow(&self, who: &str, sought: Sought, known: &Known) -> Reply {
        let until = Instant::now() + self.options.limits.poll;
        let (incarnation, key) = match sought {
            Sought::Lease { incarnation, key } => (incarnation, key),
            Sought::Name(name) => {
                let named = || {
                    let incarnation = self.incarnation();
                    self.leases().named(&name).map(|key| (incarnation, key))
                };
                // What an engine that drains has not heard of by now it will not hand over.
                let found = || named().map(Some).or_else(|| self.draining().then_some(None));
                match self.watchers.look(Of::Name(name.clone()), until, found).await {
                    Some(Some(found)) => found,
                    Some(None) => return Reply::Lease(Answer::NotHeld(Loss::Draining)),
                    None => return Reply::NotReady,
                }
            }
        };
        let more = || match self.tell(incarnation, &key, known) {
            Reply::Frontier(news) => known.lacks(&news).then_some(Reply::Frontier(news)),
            other => Some(other),
        };
        let told = self.watchers.look(Of::Request(key.request.clone()), until, more).await;
        // That there is nothing new is an answer, too.
        let told = told.unwrap_or_else(|| self.tell(incarnation, &key, known));
        if matches!(told, Reply::Frontier(_)) && known.nonce != Some(key.nonce) {
            self.notes.put(Did::Followed, &key.request, who);
        }
        told
    }

    fn tell(&self, incarnation: Incarnation, key: &LeaseKey, known: &Known) -> Reply {
        if incarnation != self.incarnation() {
            return Reply::Lease(Answer::NotHeld(Loss::Restarted));
        }
        match self.leases().look(key) {
            Ok(frontier) => Reply::Frontier(News::of(incarnation, key.clone(), &frontier, known)),
            Err(loss) => Reply::Lease(Answer::NotHeld(loss)),
        }
    }

    fn confirm(
        &self,
        who: &str,
        incarnation: Incarnation,
        key: &LeaseKey,
        consumer: &Consumer,
        claim: Claim,
    ) -> Reply {
        if incarnation != self.incarnation() {
            return Reply::Lease(Answer::NotHeld(Loss::Restarted));
        }
        let answer = self.leases().confirm(key, consumer, claim, self.now());
        debug!(who, %key, rank = consumer.rank, ?answer, "asked for confirmation");
        if answer == Answer::Held {
            self.notes.put(Did::Read, &key.request, who);
        }
        if answer == Answer::NotHeld(Loss::NotGranted) {
            self.metrics.forged.add(1);
            warn!(who, %key, "a peer has read by tables that were not granted: they were changed on the way");
        }
        if let Answer::NotHeld(loss @ Loss::OtherOrigin { .. }) = answer {
            self.metrics.forged.add(1);
            warn!(who, %key, %loss, "a peer has read for another request than this one");
        }
        self.collect();
        Reply::Lease(answer)
    }
}

impl Core {
    /// What a lease lets be read, if that is what a reader has read by.
    fn granted(
        &self,
        who: &str,
        incarnation: Incarnation,
        key: &LeaseKey,
        read_by: Fingerprint,
    ) -> Result<Grant, TaskReply> {
        if incarnation != self.incarnation() {
            return Err(TaskReply::NotHeld(Loss::Restarted));
        }
        let mut leases = self.leases();
        // Whoever asks still wants it.
        if let Answer::NotHeld(loss) = leases.extend(key, self.now()) {
            return Err(TaskReply::NotHeld(loss));
        }
        let frontier = leases.frontier(&key.request).filter(|frontier| frontier.sealed);
        match frontier {
            Some(frontier) if frontier.grant.fingerprint() == read_by => Ok(frontier.grant.clone()),
            _ => {
                self.metrics.forged.add(1);
                warn!(who, %key, "a peer asks about tables that were not granted: refused");
                Err(TaskReply::NotHeld(Loss::NotGranted))
            }
        }
    }

    /// What a rank has written in a step, for those who read by a lease.
    async fn written(
        &self,
        incarnation: Incarnation,
        key: &LeaseKey,
        rank: u32,
        task: Task,
    ) -> TaskReply {
        let held = match incarnation == self.incarnation() {
            true => self.leases().look(key).map(|_| ()),
            false => Err(Loss::Restarted),
        };
        if let Err(loss) = held {
            return TaskReply::NotHeld(loss);
        }
        match self.service(rank) {
            Ok(service) => {
                let patience_ms = self.options.limits.poll.as_millis() as u64;
                self.relay.pass(&service, Grant::default(), patience_ms, task).await
            }
            Err(reply) => reply,
        }
    }

    /// Where a rank takes tasks.
    fn service(&self, rank: u32) -> Result<ServiceCard, TaskReply> {
        let published = self.published().ok_or(TaskReply::NotHeld(Loss::Restarted))?;
        let Some((card, _)) = published.ranks.get(rank as usize) else {
            let ranks = published.ranks.len();
            return Err(TaskReply::Refused(format!("there is no rank {rank} among {ranks}")));
        };
        card.service.clone().ok_or_else(|| TaskReply::Unable(format!("rank {rank} takes no tasks")))
    }
}

/// The cards that a destination needs, or why it cannot be served.
fn fit(published: &Published, manifest: &[u8], transport: &str) -> Result<Vec<Card>, String> {
    let destination = Manifest::from_bytes(manifest).map_err(|error| error.to_string())?;
    let other = published.ranks.iter().find(|(card, _)| card.transport != transport);
    if let Some((card, _)) = other {
        return Err(format!(
            "rank {} of the source is reached by transport '{}', the destination uses '{transport}'. \
             Set the same transport on both sides.",
            card.rank, card.transport
        ));
    }
    let sources: Vec<&Manifest> = published.ranks.iter().map(|(_, manifest)| manifest).collect();
    let plan = Plan::compile(&destination, &sources).map_err(|error| error.to_string())?;
    // By one at least a destination that needs nothing knows the source's groups. All others that hold what it
    // needs: it may not reach each of them, and knows better how it shares them with the ranks beside it.
    let nothing = !(0..published.ranks.len()).any(|rank| plan.holds(rank));
    let ranks = published.ranks.iter().enumerate();
    let useful = ranks.filter(|(rank, _)| plan.holds(*rank) || (nothing && *rank == 0));
    Ok(useful.map(|(_, (card, _))| card.clone()).collect())
}
