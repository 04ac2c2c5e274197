//! What the processes say, and what follows from it.

use std::time::{Duration, Instant};

use super::Show;
use super::request::Stage;
use crate::crew::MemberId;
use crate::words::{Command, Reply};

/// How long a supervisor takes to notice that a process has ended.
const NOTICE: Duration = Duration::from_millis(250);

impl Show<'_> {
    /// Hears what the processes say until `until`, or a little longer.
    pub(super) fn listen(&mut self, until: Instant) -> Result<(), String> {
        while let Some((member, reply)) = self.crew.hear(until) {
            // Of a life that is over.
            let Some(&number) = self.members.get(&member) else { continue };
            match reply {
                Some(Reply::Problem(problem)) => {
                    return Err(format!("{}: {problem}", self.engines[number].name));
                }
                Some(reply) => self.heard(member, number, reply),
                None => {
                    let engine = &mut self.engines[number];
                    if !self.demo.chaos {
                        return Err(format!("a process of {} ended", engine.name));
                    }
                    if let Some(chaos) = &mut self.report.chaos
                        && !self.killed.contains(&member)
                    {
                        chaos.crashed += 1;
                    }
                    engine.up = false;
                    engine.restart_at.get_or_insert(Instant::now() + NOTICE);
                }
            }
            if Instant::now() >= until {
                break;
            }
        }
        Ok(())
    }

    fn heard(&mut self, member: MemberId, number: usize, reply: Reply) {
        let engine = &mut self.engines[number];
        match reply {
            Reply::Card(card) => _ = engine.cards.insert(member, card),
            Reply::Address(_) => engine.listening = true,
            Reply::Published => engine.up = engine.restart_at.is_none(),
            Reply::Audited { wrong, bytes } => {
                self.report.wrong_bytes += wrong;
                self.report.audited_bytes += bytes;
            }
            Reply::Filled { request } => self.on(&request, |show, number| {
                let request = &mut show.requests[number];
                if let Stage::Filling(waits) = &mut request.stage {
                    waits.remove(&member);
                    if waits.is_empty() {
                        request.stage = Stage::Granting;
                        if let Some(scheduler) = show.engines[0].scheduler {
                            let (request, grant) = (request.name.clone(), request.grant());
                            show.crew.tell(scheduler, &Command::Grant { request, grant });
                        }
                    }
                }
            }),
            Reply::Granted { request, ticket } => {
                self.on(&request, |show, number| show.granted(number, ticket));
            }
            Reply::Released { request, why } => self.on(&request, |show, number| {
                if let (Some(chaos), "expired") = (&mut show.report.chaos, why.as_str()) {
                    chaos.leases_expired += 1;
                }
                let request = &mut show.requests[number];
                request.scrubbing = show.engines[0].ranks.iter().copied().collect();
                for rank in &request.scrubbing {
                    let (request, tables) = (request.name.clone(), request.source.clone());
                    show.crew.tell(*rank, &Command::Scrub { request, tables });
                }
            }),
            Reply::Scrubbed { request } => self.on(&request, |show, number| {
                let request = &mut show.requests[number];
                request.scrubbing.remove(&member);
                if request.scrubbing.is_empty() && request.kept {
                    request.kept = false;
                    show.engines[0].give_back(&request.source);
                }
            }),
            Reply::Ended(end) => {
                let request = end.request.clone();
                self.on(&request, |show, number| {
                    if let Stage::Loading { waits, ends, .. } = &mut show.requests[number].stage {
                        if !end.quarantined {
                            waits.remove(&member);
                        }
                        ends.push(*end);
                        show.conclude(number);
                    }
                });
            }
            Reply::Settled { request } => self.on(&request, |show, number| {
                if let Stage::Loading { waits, .. } = &mut show.requests[number].stage {
                    waits.remove(&member);
                    show.conclude(number);
                }
            }),
            Reply::Lost { request: _ } | Reply::Problem(_) => {}
        }
        let engine = &mut self.engines[number];
        if engine.listening && !engine.up && engine.cards.len() == engine.ranks.len() {
            engine.listening = false;
            let cards = engine.ranks.iter().map(|rank| engine.cards[rank].clone()).collect();
            if let Some(scheduler) = engine.scheduler {
                self.crew.tell(scheduler, &Command::Publish { cards });
            }
        }
    }

    fn on(&mut self, request: &str, then: impl FnOnce(&mut Self, usize)) {
        if let Some(number) = self.names.get(request).copied() {
            then(self, number);
        }
    }
}
