//! The thread that makes the calls that move bytes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::capi::{Code, Prepared, Request};
use super::context::Context;
use super::job::Job;
use super::peer::NixlPeer;
use super::state::{Posted, State};
use kvferry_transport::Error;
use kvferry_transport::shared::custody::Part;
use kvferry_transport::shared::thread::outlive;

/// How long closing waits for operations to end of their own accord.
const LAST_PATIENCE: Duration = Duration::from_secs(1);
/// Operations posted between two looks at those under way.
const BATCH: usize = 16;

pub(super) struct Driver {
    state: Arc<State>,
    active: Vec<Active>,
    /// The GPU whose context this thread works in.
    gpu: Option<u32>,
    context: Option<Context>,
}

/// An operation that NIXL was given.
struct Active {
    part: Part,
    peer: NixlPeer,
    bytes: u64,
    /// Requests that NIXL has not ended.
    requests: Vec<Request>,
    /// The first error of the others.
    error: Option<Error>,
    /// The lists the requests were made from.
    lists: Vec<Arc<Prepared>>,
}

impl Driver {
    pub(super) fn new(state: Arc<State>) -> Self {
        Self { state, active: Vec::new(), gpu: None, context: None }
    }

    pub(super) fn run(mut self) {
        outlive("the driver of NIXL", || self.drive());
        self.close();
    }

    /// Until the transport closes.
    fn drive(&mut self) {
        let mut pause = Pause::default();
        while let Some(batch) = self.next(&mut pause) {
            if !batch.is_empty() {
                pause = Pause::default();
            }
            for posted in batch {
                self.post(posted);
            }
            if self.look_after() {
                pause = Pause::default();
                self.state.settle_orphans();
            }
            self.dismiss();
        }
    }

    /// What is to be posted next: at once if there is something, with nothing after a pause while
    /// there is something to look after. `None` when the transport closes.
    fn next(&self, pause: &mut Pause) -> Option<Vec<Posted>> {
        let mut queue = self.state.queue.lock();
        let ready = |posted: &Posted| !posted.peer.0.paused.load(Ordering::SeqCst);
        while !queue.closing && !queue.posted.iter().any(ready) {
            let idle =
                self.active.is_empty() && queue.posted.is_empty() && queue.leaving.is_empty();
            if !idle {
                self.state.changed.wait_for(&mut queue, pause.next());
                break;
            }
            self.state.changed.wait(&mut queue);
        }
        if queue.closing {
            return None;
        }
        let mut batch = Vec::new();
        while batch.len() < BATCH
            && let Some(at) = queue.posted.iter().position(ready)
            && let Some(posted) = queue.posted.remove(at)
        {
            // Under the lock: whoever pauses the peer now waits for this one.
            *posted.peer.0.under_way.lock() += 1;
            batch.push(posted);
        }
        Some(batch)
    }

    fn post(&mut self, posted: Posted) {
        let Posted { custody, peer, job, bytes } = posted;
        if peer.0.closed.load(Ordering::SeqCst) {
            custody.stop(Error::Disconnected);
        }
        let Some(part) = custody.take() else {
            *peer.0.under_way.lock() -= 1;
            return;
        };
        let gpu = self.state.queue.lock().gpu;
        if gpu != self.gpu {
            self.gpu = gpu;
            self.context = gpu.and_then(Context::enter);
        }
        let mut lists = Vec::new();
        let made = self.make(&peer, job, &mut lists);
        let mut active = Active { part, peer, bytes, requests: Vec::new(), error: None, lists };
        match made {
            Ok(requests) => {
                for mut request in requests {
                    match request.post() {
                        Ok(true) => {}
                        Ok(false) => active.requests.push(request),
                        Err(code) => {
                            active.error = Some(lost(code));
                            break;
                        }
                    }
                }
            }
            Err(code) => active.error = Some(lost(code)),
        }
        self.active.push(active);
    }

    fn make(
        &self,
        peer: &NixlPeer,
        job: Job,
        lists: &mut Vec<Arc<Prepared>>,
    ) -> Result<Vec<Request>, Code> {
        let agent = &self.state.agent;
        match job {
            Job::OnGrids { ours, theirs } => {
                let prepared = &self.state.prepared;
                // SAFETY: our region was registered when the operation was opened, which holds it;
                // the peer's is registered as far as its description says, and NIXL and the peer's
                // side check that.
                let (our_list, their_list) = unsafe {
                    (prepared.get(agent, None, ours.0)?, prepared.get(agent, Some(peer), theirs.0)?)
                };
                let request = agent.request_prepared(&our_list, &ours.1, &their_list, &theirs.1)?;
                lists.extend([our_list, their_list]);
                Ok(vec![request])
            }
            Job::OneByOne(groups) => groups
                .iter()
                .map(|group| {
                    let ours = group.iter().map(|pair| pair.0);
                    let theirs = group.iter().map(|pair| pair.1);
                    // SAFETY: the destinations lie in registered regions (`Regions::admit`), which
                    // the operation holds until NIXL has ended the request.
                    unsafe { agent.request(&peer.0.name, ours, theirs) }
                })
                .collect(),
        }
    }

    /// Asks NIXL how everything stands; whether anything has ended.
    fn look_after(&mut self) -> bool {
        let mut any = false;
        // From the last: those that have ended leave, and what panics takes nobody else with it.
        for at in (0..self.active.len()).rev() {
            let active = &mut self.active[at];
            let error = &mut active.error;
            active.requests.retain_mut(|request| match request.ended() {
                Ok(ended) => !ended,
                Err(code) => {
                    error.get_or_insert_with(|| lost(code));
                    false
                }
            });
            if !active.requests.is_empty() {
                if let Some(error) = error {
                    active.part.custody().stop(error.clone());
                }
                continue;
            }
            any = true;
            let active = self.active.swap_remove(at);
            drop(active.lists);
            *active.peer.0.under_way.lock() -= 1;
            match active.error {
                None => active.part.in_place(active.bytes),
                Some(error) => active.part.fail(error),
            }
        }
        any
    }

    /// Forgets the peers that were disconnected and of which nothing is under way any more: before
    /// that, NIXL would report their transfers as ended while they still land.
    fn dismiss(&mut self) {
        let leaving = self.state.queue.lock().leaving.clone();
        for peer in leaving {
            for active in self.active.iter().filter(|active| active.peer.is(&peer)) {
                active.part.custody().stop(Error::Disconnected);
            }
            if *peer.0.under_way.lock() == 0 {
                self.state.prepared.forget_peer(peer.instance());
                let _ = self.state.agent.forget(&peer.0.name);
                self.state.queue.lock().leaving.retain(|other| !other.is(&peer));
            }
        }
    }

    /// Ends everything, for when the agent is about to go.
    fn close(mut self) {
        let posted = std::mem::take(&mut self.state.queue.lock().posted);
        for posted in posted {
            posted.custody.stop(Error::Disconnected);
        }
        for active in &self.active {
            active.part.custody().stop(Error::Disconnected);
        }
        let until = Instant::now() + LAST_PATIENCE;
        let mut pause = Pause::default();
        while !self.active.is_empty() && Instant::now() < until {
            self.look_after();
            std::thread::sleep(pause.next());
        }
        let left = self.active.drain(..).map(|active| active.part);
        self.state.abandoned.0.lock().extend(left);
        self.state.prepared.clear();
        let leaving = std::mem::take(&mut self.state.queue.lock().leaving);
        let peers = std::mem::take(&mut *self.state.peers.lock());
        for peer in leaving.into_iter().chain(peers) {
            let _ = self.state.agent.forget(&peer.0.name);
        }
    }
}

fn lost(code: Code) -> Error {
    Error::PeerLost(code.to_string())
}

/// Longer and longer pauses between two looks.
#[derive(Debug, Default)]
struct Pause(u32);

impl Pause {
    fn next(&mut self) -> Duration {
        self.0 = self.0.saturating_add(1);
        Duration::from_micros(match self.0 {
            0..=8 => 20,
            9..=64 => 100,
            65..=512 => 500,
            _ => 2000,
        })
    }
}
