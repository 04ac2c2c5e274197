//! What a worker and the loads under way share.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvferry_plan::lowering::Choice;
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};

use super::load::Notice;
use super::mover::{Job, Mover};
use super::peers::Peers;
use crate::error::Error;
use crate::mailbox::Mailbox;
use crate::metrics::{Served, WorkerMetrics, escape};
use crate::rules::audit::Audit;
use crate::rules::life::Stage;

/// What a load that has ended does while bytes may still land.
pub(super) const QUARANTINED: &str = "quarantined";

#[derive(Debug)]
pub(super) struct Core {
    pub(super) peers: Arc<Peers>,
    /// Who may read now; the others wait in the queue.
    pub(super) turns: Arc<Semaphore>,
    /// How many loads are audited.
    pub(super) audit: Audit,
    pub(super) notices: Mailbox<Notice>,
    pub(super) metrics: Arc<WorkerMetrics>,
    mover: Mutex<Option<Mover>>,
    loads: Mutex<HashMap<String, Arc<Running>>>,
    next: AtomicU64,
}

/// A load under way, as others see it.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) abort: Notify,
    pub(super) doing: Mutex<&'static str>,
}

impl Core {
    pub(super) fn new(
        peers: Peers,
        concurrent: usize,
        audit: Audit,
        lowering: Choice,
        metrics: Arc<WorkerMetrics>,
    ) -> Result<Self, Error> {
        Ok(Self {
            peers: Arc::new(peers),
            turns: Arc::new(Semaphore::new(concurrent.clamp(1, Semaphore::MAX_PERMITS))),
            audit,
            notices: Mailbox::default(),
            metrics,
            mover: Mutex::new(Some(Mover::start(lowering)?)),
            loads: Mutex::default(),
            next: AtomicU64::new(getrandom::u64()?),
        })
    }

    /// A number that no other attempt to read has, here or in an earlier life of this rank.
    pub(super) fn attempt(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Takes a request's name for a load.
    pub(super) fn begin(&self, request: &str) -> Result<Arc<Running>, Error> {
        let mut loads = self.loads.lock();
        if loads.contains_key(request) {
            return Err(Error::Duplicate(request.to_owned()));
        }
        let doing = Mutex::new(Stage::ShakingHands.name());
        let running = Arc::new(Running { abort: Notify::new(), doing });
        loads.insert(request.to_owned(), running.clone());
        Ok(running)
    }

    /// The name is free again, unless another load has it by now.
    pub(super) fn end(&self, request: &str, running: &Arc<Running>) {
        let mut loads = self.loads.lock();
        if loads.get(request).is_some_and(|now| Arc::ptr_eq(now, running)) {
            loads.remove(request);
        }
    }

    pub(super) fn abort(&self, request: &str) {
        if let Some(running) = self.loads.lock().get(request) {
            running.abort.notify_one();
        }
    }

    /// The loads under way, and what each is doing.
    pub(super) fn loads(&self) -> Vec<(String, &'static str)> {
        let loads = self.loads.lock();
        loads.iter().map(|(request, running)| (request.clone(), *running.doing.lock())).collect()
    }

    pub(super) fn read(&self, job: Job) {
        if let Some(mover) = &*self.mover.lock() {
            mover.read(job);
        }
    }

    pub(super) fn cancel(&self, attempt: u64) {
        if let Some(mover) = &*self.mover.lock() {
            mover.cancel(attempt);
        }
    }

    /// Cancels what is read, and waits for the thread that reads.
    pub(super) fn stop_reading(&self) {
        let mover = self.mover.lock().take();
        drop(mover);
    }

    /// The counters by name.
    pub(super) fn counts(&self) -> Vec<(String, u64)> {
        self.metrics.counts(&Served::by(&*self.peers.rank.carrier))
    }

    /// As Prometheus text.
    pub(super) fn metrics_text(&self) -> String {
        let rank = &self.peers.rank;
        let labels = format!("engine=\"{}\",rank=\"{}\"", escape(&rank.engine), rank.number);
        let loads = self.loads();
        let quarantined = loads.iter().filter(|(_, doing)| *doing == QUARANTINED).count();
        let served = Served::by(&*rank.carrier);
        self.metrics.text(&labels, loads.len() - quarantined, quarantined, &served)
    }
}
