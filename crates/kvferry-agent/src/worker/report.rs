//! What an engine is told of the end of a load.

use tracing::{debug, warn};

use super::drive::Drive;
use super::load::{Ending, Notice, Outcome};
use crate::metrics::Timings;

impl Drive {
    pub(super) fn report(&mut self) {
        for task in [self.task.take(), self.following.take()].into_iter().flatten() {
            task.abort();
        }
        self.turn = None;
        let outcome = Outcome::of(self.life.stage());
        self.count(&outcome);
        let Timings { queue, handshake, plan, post, wire, audit, confirm } = self.timings;
        let quarantined = self.life.landing();
        self.quarantined = quarantined;
        let (bytes, copies) = (self.moved.bytes, self.moved.copies);
        self.moments.ended = Some(self.began.elapsed());
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
            ?audit,
            ?confirm,
            "ended"
        );
        match &outcome {
            Outcome::Failed(failure) => warn!(%failure, quarantined, "the load failed"),
            Outcome::Expired(loss) => warn!(%loss, "what was read is not used"),
            _ => {}
        }
        // Settled already: the name is free before the engine hears of it.
        if !quarantined {
            self.core.end(&self.load.request, &self.running);
        }
        self.tell(outcome);
    }

    pub(super) fn tell(&mut self, outcome: Outcome) {
        self.told = true;
        self.core.notices.put(Notice::Ended(Ending {
            request: self.load.request.clone(),
            outcome,
            quarantined: self.quarantined,
            bytes: self.moved.bytes,
            copies: self.moved.copies,
            timings: self.timings,
            moments: Box::new(self.moments),
            lowerings: self.moved.lowerings,
            read_by: self.engine.as_ref().map(|engine| engine.read_by.clone()).unwrap_or_default(),
            rest: std::mem::take(&mut self.moved.rest),
            enclosed: std::mem::take(&mut self.enclosed),
        }));
    }

    fn count(&self, outcome: &Outcome) {
        let metrics = &self.core.metrics;
        match outcome {
            Outcome::Done => {
                metrics.done.add(1);
                metrics.bytes.add(self.moved.bytes);
                metrics.copies.add(self.moved.copies);
                metrics.packed_bytes.add(self.moved.packed);
                metrics.ahead_bytes.add(self.ahead);
                for (histogram, time) in metrics.timings.iter().zip(self.timings.times()) {
                    histogram.observe(time);
                }
            }
            Outcome::Failed(failure) => metrics.failed(failure),
            Outcome::Aborted => metrics.aborted.add(1),
            Outcome::Expired(_) => metrics.expired.add(1),
        }
    }
}
