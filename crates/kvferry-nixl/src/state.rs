//! What callers and the driver share.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvferry_layout::{ByteCopy, Place, Region};
use parking_lot::{Condvar, Mutex};

use super::capi::Agent;
use super::job::Job;
use super::options::{CardPacking, NixlOptions};
use super::peer::NixlPeer;
use super::prepared::PreparedLists;
use kvferry_cuda::digest::DigestLaunchers;
use kvferry_cuda::{CardPacker, CudaOptions};
use kvferry_transport::shared::Transfer;
use kvferry_transport::shared::admission::{Admission, Opened};
use kvferry_transport::shared::custody::{Custody, Part};
use kvferry_transport::shared::packing_area::{PackingArea, PackingAreas};
use kvferry_transport::shared::spans::Spans;
use kvferry_transport::shared::staging::Staging;
use kvferry_transport::tcp::Orphan;
use kvferry_transport::{Error, Instance, RegionId};

#[derive(Debug)]
pub(super) struct State {
    pub(super) agent: Arc<Agent>,
    pub(super) instance: Instance,
    pub(super) admission: Admission,
    pub(super) lookers: DigestLaunchers,
    pub(super) peers: Mutex<Vec<NixlPeer>>,
    pub(super) prepared: PreparedLists,
    pub(super) queue: Mutex<Queue>,
    /// There is something for the driver, or it has done something others may wait for.
    pub(super) changed: Condvar,
    /// After the agent: dropped when it is gone.
    pub(super) abandoned: Abandoned,
    /// Likewise: what was read for nobody, and the memory it is read to.
    pub(super) orphans: Mutex<Vec<Orphan>>,
    pub(super) areas: Arc<PackingAreas>,
    pub(super) options: NixlOptions,
}

impl State {
    /// Registers memory here and with NIXL.
    ///
    /// # Safety
    ///
    /// As of [`Transport::register`](kvferry_transport::Transport::register).
    pub(super) unsafe fn register(&self, region: Region) -> Result<RegionId, Error> {
        let regions = &self.admission.regions;
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

    /// Gets ready to pack the memory of a card, and to put packed bytes in their place there. Where it
    /// cannot, its runs are read one by one.
    pub(super) fn pack_on(&self, gpu: u32) {
        let card = &self.options.card;
        let make = || -> Result<PackingArea, Error> {
            let packer = CardPacker::new(&CudaOptions {
                gpu,
                sms: card.sms,
                kernel: card.kernel.clone(),
                site_packages: self.options.site_packages.clone(),
            })?;
            let free = packer.free_memory()?;
            let (bytes, slot) = card.fitted(free).ok_or_else(|| {
                let CardPacking { staging, slot, .. } = card;
                Error::Unsupported(format!(
                    "an eighth of the {free} bytes that are free there, of which {staging} may be taken in \
                     slots of {slot}, is too little"
                ))
            })?;
            let (base, memory) = packer.allocate(bytes)?;
            let region = Region { base, bytes, place: Place::Gpu(gpu) };
            let staging = Staging::over(region, slot, Some(memory));
            // SAFETY: the memory is kept by the state for longer than the agent, and only touched
            // through its address.
            unsafe { self.register(region)? };
            tracing::info!(
                bytes,
                slots = bytes / slot,
                "memory of GPU {gpu} is taken to pack short runs into"
            );
            Ok(PackingArea::new(staging, Some(Arc::new(packer))))
        };
        self.areas.open(|| {
            if card.staging == 0 || card.slot == 0 {
                return None;
            }
            let made = make().inspect_err(|error| {
                tracing::warn!(
                    "short runs of the memory of GPU {gpu} are read one by one, because they cannot \
                     be packed: {error}"
                );
            });
            made.ok().map(|area| (gpu, area))
        });
    }

    /// Gives back what was read for nobody, once nothing can land in it.
    pub(super) fn settle_orphans(&self) {
        self.orphans.lock().retain(|orphan| !orphan.is_over());
    }

    /// Whether memory of a card is registered here.
    pub(super) fn has_gpu(&self) -> bool {
        self.queue.lock().gpu.is_some()
    }

    /// Posts a read that is a part of another operation, which is counted by itself.
    pub(super) fn read_uncounted(
        &self,
        peer: &NixlPeer,
        copies: &[ByteCopy],
        deadline: Instant,
    ) -> Result<Transfer, Error> {
        let theirs = peer.spans();
        let opened = self.admission.open_uncounted(copies, &theirs, deadline, &peer.0.rate)?;
        self.post(peer, copies.iter().copied(), opened, &theirs)
    }

    /// Hands an operation to the driver: `runs` are its copies before merging.
    pub(super) fn post(
        &self,
        peer: &NixlPeer,
        runs: impl Iterator<Item = ByteCopy>,
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
                job: Job::new(runs, &opened.copies, &self.admission.regions.spans(), theirs),
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
