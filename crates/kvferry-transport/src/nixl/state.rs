//! What callers and the driver share.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvferry_layout::{ByteCopy, Region};
use parking_lot::{Condvar, Mutex};

use super::capi::Agent;
use super::job::Job;
use super::peer::NixlPeer;
use super::prepared::PreparedLists;
use crate::contract::{Error, Instance, Operation, RegionId};
use crate::shared::Transfer;
use crate::shared::custody::{Custody, Part};
use crate::shared::desk::{Desk, Opened};
use crate::shared::spans::Spans;
use crate::shared::staging::Staging;
use crate::tcp::Fetched;

#[derive(Debug)]
pub(super) struct State {
    pub(super) agent: Arc<Agent>,
    pub(super) instance: Instance,
    pub(super) desk: Desk,
    pub(super) peers: Mutex<Vec<NixlPeer>>,
    pub(super) prepared: PreparedLists,
    pub(super) queue: Mutex<Queue>,
    /// There is something for the driver, or it has done something others may wait for.
    pub(super) changed: Condvar,
    /// After the agent: dropped when it is gone.
    pub(super) abandoned: Abandoned,
    /// Likewise: what was fetched for nobody, and the memory it is fetched to.
    pub(super) forsaken: Mutex<Vec<Fetched>>,
    pub(super) staging: Arc<Staging>,
}

impl State {
    /// Registers memory here and with NIXL.
    ///
    /// # Safety
    ///
    /// As of [`Transport::register`](crate::Transport::register).
    pub(super) unsafe fn register(&self, region: Region) -> Result<RegionId, Error> {
        let regions = &self.desk.regions;
        let id = regions.insert(region)?;
        let span = (region.base, region.bytes, region.place);
        // SAFETY: the caller's promise is the same.
        if let Err(code) = unsafe { self.agent.register(span) } {
            let _ = regions.remove(id, Instant::now(), || (), || ());
            return Err(Error::Unsupported(format!(
                "NIXL does not take {} bytes at {:#x} ({:?}): {code}",
                region.bytes, region.base, region.place
            )));
        }
        Ok(id)
    }

    /// Gives back the memory of what was fetched for nobody, once nothing can land in it.
    pub(super) fn settle_forsaken(&self) {
        self.forsaken.lock().retain(|fetched| !fetched.operation.poll().is_safe());
    }

    /// Posts a read that is a part of another operation, which is counted by itself.
    pub(super) fn read_uncounted(
        &self,
        peer: &NixlPeer,
        copies: &[ByteCopy],
        deadline: Instant,
    ) -> Result<Transfer, Error> {
        let theirs = peer.spans();
        let opened = self.desk.open_uncounted(copies, &theirs, deadline, &peer.0.rate)?;
        self.post(peer, copies, opened, &theirs)
    }

    /// Hands an operation to the driver.
    pub(super) fn post(
        &self,
        peer: &NixlPeer,
        copies: &[ByteCopy],
        opened: Opened,
        theirs: &Spans,
    ) -> Result<Transfer, Error> {
        if peer.0.closed.load(Ordering::SeqCst) {
            opened.custody.stop(Error::Disconnected);
            return Err(Error::Disconnected);
        }
        if opened.on_gpu {
            peer.0.rate.gpu();
        }
        if !opened.custody.is_empty() {
            let posted = Posted {
                custody: opened.custody.clone(),
                peer: peer.clone(),
                bytes: opened.copies.iter().map(|copy| copy.bytes).sum(),
                job: Job::new(copies, &opened.copies, &self.desk.regions.spans(), theirs),
            };
            self.queue.lock().posted.push_back(posted);
            self.changed.notify_all();
        }
        Ok(Transfer::posted(opened.custody))
    }
}

/// What the driver is to do.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) posted: VecDeque<Posted>,
    /// Peers to forget as soon as nothing of theirs is under way.
    pub(super) leaving: Vec<NixlPeer>,
    /// The GPU whose memory was registered last.
    pub(super) gpu: Option<u32>,
    pub(super) closing: bool,
}

/// An operation that the driver has not taken yet.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) custody: Arc<Custody>,
    pub(super) peer: NixlPeer,
    pub(super) job: Job,
    pub(super) bytes: u64,
}

/// Operations whose requests were released although NIXL had not ended them. They are safe when the
/// agent is no more.
#[derive(Debug, Default)]
pub(super) struct Abandoned(pub(super) Mutex<Vec<Part>>);

impl Drop for Abandoned {
    fn drop(&mut self) {
        for part in self.0.get_mut().drain(..) {
            part.give_back();
        }
    }
}
