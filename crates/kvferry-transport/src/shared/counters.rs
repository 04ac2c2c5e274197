//! The sums behind [`Statistics`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::contract::{Report, Statistics};

#[derive(Debug, Default)]
pub(crate) struct Counters {
    started: AtomicU64,
    done: AtomicU64,
    failed: AtomicU64,
    quarantined: AtomicU64,
    bytes: AtomicU64,
    copies: AtomicU64,
    copies_posted: AtomicU64,
    post_nanos: AtomicU64,
    wire_nanos: AtomicU64,
}

fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

impl Counters {
    pub(crate) fn start(&self) {
        add(&self.started, 1);
    }

    pub(crate) fn done(&self, report: &Report) {
        add(&self.done, 1);
        add(&self.bytes, report.bytes);
        add(&self.copies, report.copies);
        add(&self.copies_posted, report.copies_posted);
        add(&self.post_nanos, report.time_to_post.as_nanos() as u64);
        add(&self.wire_nanos, report.time_on_wire.as_nanos() as u64);
    }

    /// An operation failed; `quarantined` when its destination is not safe yet, and then
    /// [`settle`](Self::settle) follows.
    pub(crate) fn fail(&self, quarantined: bool) {
        add(&self.failed, 1);
        add(&self.quarantined, u64::from(quarantined));
    }

    pub(crate) fn settle(&self) {
        self.quarantined.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Statistics {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Statistics {
            started: get(&self.started),
            done: get(&self.done),
            failed: get(&self.failed),
            quarantined: get(&self.quarantined),
            bytes: get(&self.bytes),
            copies: get(&self.copies),
            copies_posted: get(&self.copies_posted),
            time_to_post: Duration::from_nanos(get(&self.post_nanos)),
            time_on_wire: Duration::from_nanos(get(&self.wire_nanos)),
            // The port's own count.
            turned_away: 0,
        }
    }
}
