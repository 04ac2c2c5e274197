//! A bad day: processes that are killed or stand still, and engines that start over.

use std::time::{Duration, Instant};

use super::Show;
use super::engine::chance;
use super::request::Stage;
use crate::crew::MemberId;

impl Show<'_> {
    pub(super) fn chaos(&mut self) {
        let now = Instant::now();
        let due = |(_, until): &(MemberId, Instant)| *until <= now;
        for (member, _) in self.stopped.extract_if(.., |one| due(one)) {
            self.crew.signal(member, libc::SIGCONT);
        }
        let Some(report) = &mut self.report.chaos else { return };
        let all_admitted = self.requests.len() == self.demo.requests;
        if now < self.next_chaos || all_admitted {
            return;
        }
        self.next_chaos = now + Duration::from_millis(self.dice.u64(150..=600));
        let number = self.dice.usize(0..self.engines.len());
        let engine = &self.engines[number];
        if !engine.up {
            return;
        }
        let mut members = engine.ranks.clone();
        members.extend(engine.scheduler);
        let victim = members[self.dice.usize(0..members.len())];
        if chance(&mut self.dice, 40) && report.killed < 6 {
            report.killed += 1;
            self.killed.insert(victim);
            self.crew.signal(victim, libc::SIGKILL);
        } else if report.stopped < 12 && !self.stopped.iter().any(|(member, _)| *member == victim) {
            report.stopped += 1;
            self.crew.signal(victim, libc::SIGSTOP);
            let while_ms = self.dice.u64(50..=1200);
            self.stopped.push((victim, now + Duration::from_millis(while_ms)));
        }
    }

    /// What a supervisor does when a process of its engine has ended: the engine starts over.
    pub(super) fn restart_what_died(&mut self) -> Result<(), String> {
        for number in 0..self.engines.len() {
            if self.engines[number].restart_at.is_none_or(|at| Instant::now() < at) {
                continue;
            }
            let engine = &self.engines[number];
            let life = engine.life;
            let members = engine.ranks.iter().chain(&engine.scheduler).copied();
            for member in members.collect::<Vec<_>>() {
                self.stopped.retain(|(stopped, _)| *stopped != member);
                self.members.remove(&member);
                self.crew.kill(member);
            }
            for request in &mut self.requests {
                let source_died = number == 0 && request.source_life == life;
                if source_died {
                    request.kept = false;
                    request.scrubbing.clear();
                }
                let fails = match request.stage {
                    Stage::Filling(_) | Stage::Granting => source_died,
                    Stage::Loading { .. } => {
                        request.decode == number && request.decode_life == life
                    }
                    Stage::Queued { .. } | Stage::Ended => false,
                };
                if fails {
                    request.stage = Stage::Ended;
                    *self.report.failed.entry("engine died".to_owned()).or_default() += 1;
                    self.bar.inc(1);
                }
            }
            if let Some(chaos) = &mut self.report.chaos {
                chaos.restarts += 1;
            }
            self.start(number)?;
        }
        Ok(())
    }
}
