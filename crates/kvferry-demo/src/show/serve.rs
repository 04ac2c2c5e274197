//! The router: requests come in, are prefilled, granted, loaded, and end.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kvferry_agent::{Failure, Load, Outcome, Ticket};

use super::Show;
use super::engine::chance;
use super::request::{Fate, Request, Stage};
use crate::words::Command;

/// Requests under way at once.
const CONCURRENT: usize = 24;

impl Show<'_> {
    /// New requests, as long as there is room for them.
    pub(super) fn admit(&mut self) {
        let active = |request: &&Request| !matches!(request.stage, Stage::Ended) || request.kept;
        let mut active = self.requests.iter().filter(active).count();
        while active < CONCURRENT && self.requests.len() < self.demo.requests && self.engines[0].up
        {
            let dice = &mut self.dice;
            // One in ten is shorter than a block, whatever the block.
            let tokens = match chance(dice, 10) {
                true => dice.u64(1..=12.min(self.longest)),
                false => dice.u64(1..=self.longest),
            };
            let Some(source) = self.engines[0].allocate(tokens, dice) else { break };
            let number = self.requests.len();
            let fate = match dice.u64(0..=99) {
                0..3 => Fate::AbortedAfter(Duration::from_micros(dice.u64(0..=4000))),
                3..5 => Fate::DroppedInQueue,
                5..9 if self.demo.chaos => Fate::Forgotten,
                _ => Fate::Served,
            };
            let request = Request {
                name: format!("request-{number}"),
                seed: dice.u64(..),
                tokens,
                source,
                source_life: self.engines[0].life,
                kept: true,
                scrubbing: BTreeSet::new(),
                decode: 1 + dice.usize(0..self.engines.len() - 1),
                decode_life: 0,
                destination: vec![],
                cached: vec![],
                ticket: None,
                fate,
                stage: Stage::Filling(self.engines[0].ranks.iter().copied().collect()),
            };
            for rank in &self.engines[0].ranks {
                let (request, seed, tables) =
                    (request.name.clone(), request.seed, request.source.clone());
                self.crew.tell(*rank, &Command::Fill { request, seed, tokens, tables });
            }
            self.names.insert(request.name.clone(), number);
            self.requests.push(request);
            active += 1;
        }
    }

    /// Requests whose turn has come, and aborts.
    pub(super) fn load_what_waits(&mut self) {
        let now = Instant::now();
        for number in 0..self.requests.len() {
            let request = &mut self.requests[number];
            let engine = &mut self.engines[request.decode];
            if let Stage::Loading { waits, abort_at, .. } = &mut request.stage {
                if abort_at.is_some_and(|at| at <= now) {
                    *abort_at = None;
                    for rank in waits.iter() {
                        let request = request.name.clone();
                        self.crew.tell(*rank, &Command::Abort { request });
                    }
                }
                continue;
            }
            let Stage::Queued { until } = request.stage else { continue };
            if now < until || !engine.up {
                continue;
            }
            let Some(ticket) = request.ticket.clone() else { continue };
            if request.fate == Fate::DroppedInQueue {
                if let Some(scheduler) = engine.scheduler {
                    self.crew.tell(scheduler, &Command::Abandon { ticket });
                }
                request.stage = Stage::Ended;
                self.report.aborted += 1;
                self.bar.inc(1);
                continue;
            }
            let Some(destination) = engine.allocate(request.tokens, &mut self.dice) else {
                continue;
            };
            // Some of the prompt may be known there already.
            let known = match chance(&mut self.dice, 30) {
                true => self.dice.u64(0..=request.tokens - 1),
                false => 0,
            };
            let groups = engine.manifests[0].groups().iter();
            let cached =
                groups.map(|group| group.tokens_per_block.map_or(0, |block| known / block * block));
            request.cached = cached.collect();
            request.destination = destination;
            request.decode_life = engine.life;
            let tables = request.destination.clone();
            let load = Load::new(&request.name, ticket, request.tokens, tables)
                .granted(request.grant())
                .cached(request.cached.clone())
                .within(self.limits.patience, self.limits.patience);
            for rank in &engine.ranks {
                let (load, seed) = (load.clone(), request.seed);
                self.crew.tell(*rank, &Command::Load { load, seed });
            }
            let abort_at = match request.fate {
                Fate::AbortedAfter(time) => Some(now + time),
                _ => None,
            };
            let waits = engine.ranks.iter().copied().collect();
            request.stage = Stage::Loading { waits, ends: vec![], abort_at };
        }
    }

    pub(super) fn granted(&mut self, number: usize, ticket: Option<Ticket>) {
        let request = &mut self.requests[number];
        let (Stage::Granting, Some(ticket)) = (&request.stage, ticket) else { return };
        let wait = match request.fate {
            Fate::Forgotten => self.limits.term * 2,
            _ => Duration::from_millis(self.dice.u64(0..=10)),
        };
        request.stage = Stage::Queued { until: Instant::now() + wait };
        // D keeps it alive while it waits.
        if request.fate != Fate::Forgotten
            && let Some(scheduler) = self.engines[request.decode].scheduler
        {
            let patience_ms = self.limits.patience.as_millis() as u64 * 2;
            let ticket = ticket.clone();
            self.crew.tell(scheduler, &Command::Hold { ticket, patience_ms });
        }
        request.ticket = Some(ticket);
    }

    /// When every rank has ended and nothing can land any more.
    pub(super) fn conclude(&mut self, number: usize) {
        let request = &mut self.requests[number];
        let Stage::Loading { waits, ends, .. } = &request.stage else { return };
        if !waits.is_empty() {
            return;
        }
        let ends = ends.clone();
        request.stage = Stage::Ended;
        self.engines[request.decode].give_back(&request.destination);
        self.bar.inc(1);
        let scheduler = self.engines[request.decode].scheduler;
        let bad = ends.iter().find(|end| end.outcome != Outcome::Done);
        for end in ends.iter().filter(|end| end.outcome == Outcome::Done) {
            self.report.wrong_bytes += end.wrong;
            self.report.compared_bytes += end.compared;
        }
        let Some(bad) = bad else {
            let ticket = request.ticket.clone();
            self.report.exact += usize::from(ends.iter().all(|end| end.wrong == 0));
            self.report.tokens += request.tokens;
            self.report.cached_tokens += request.cached.iter().max().copied().unwrap_or(0);
            for end in &ends {
                self.report.bytes += end.bytes;
                self.report.copies += end.copies;
                self.all_times.push(end.phases);
                let moving = (end.phases.post + end.phases.wire).as_secs_f64();
                if end.bytes > 1 << 18 && moving > 0.0 {
                    self.rates.push(end.bytes as f64 / moving);
                }
            }
            if let (Some(scheduler), Some(ticket)) = (scheduler, ticket) {
                self.crew.tell(scheduler, &Command::Settle { ticket });
            }
            return;
        };
        // The ranks that were told last may have found the lease gone: the cause is the abort.
        let aborted = ends.iter().any(|end| end.outcome == Outcome::Aborted);
        let reason = match &bad.outcome {
            _ if aborted => None,
            Outcome::Failed(Failure::Deadline { .. }) => Some("past its deadline".to_owned()),
            Outcome::Failed(failure) => Some(failure.kind().replace('_', " ")),
            _ => Some("lease expired".to_owned()),
        };
        match reason {
            None => self.report.aborted += 1,
            Some(reason) => *self.report.failed.entry(reason).or_default() += 1,
        }
        if let (Some(scheduler), Some(ticket)) = (scheduler, request.ticket.clone()) {
            self.crew.tell(scheduler, &Command::Abandon { ticket });
        }
    }
}
