//! A peer whose memory the kernel lets us read.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::process::Process;
use crate::contract::{Error, Side};
use crate::shared::chunks::Chunk;
use crate::shared::custody::Custody;
use crate::shared::spans::Spans;
use crate::tcp::{self, Client, PeerRegions};

#[derive(Debug)]
pub(super) struct Direct {
    process: Process,
    /// Answers for its regions.
    client: Arc<Client>,
    regions: Mutex<Arc<PeerRegions>>,
    closed: AtomicBool,
}

impl Direct {
    pub(super) fn new(
        process: Process,
        client: Arc<Client>,
        deadline: Instant,
    ) -> Result<Self, Error> {
        let regions = client.regions(deadline)?;
        let regions = Mutex::new(Arc::new(regions));
        Ok(Self { process, client, regions, closed: AtomicBool::new(false) })
    }

    pub(super) fn regions(&self) -> Arc<PeerRegions> {
        self.regions.lock().clone()
    }

    /// Asks the peer for its regions.
    pub(super) fn refresh(&self, deadline: Instant) -> Result<(), Error> {
        let regions = self.client.regions(deadline)?;
        *self.regions.lock() = Arc::new(regions);
        Ok(())
    }

    /// From now on nothing is read from it.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Reads a chunk, and again where the peer's regions changed under it.
    pub(super) fn read(
        &self,
        custody: &Custody,
        chunk: &Chunk,
        ours: &mut Vec<libc::iovec>,
        theirs: &mut Vec<libc::iovec>,
    ) -> Result<(), Error> {
        loop {
            let known = self.regions().generation;
            ours.clear();
            theirs.clear();
            ours.extend(chunk.copies().iter().map(|copy| tcp::entry(copy.destination, copy.bytes)));
            theirs.extend(chunk.copies().iter().map(|copy| tcp::entry(copy.source, copy.bytes)));
            // SAFETY: the destinations lie in registered regions (`Regions::admit`), which may be
            // written at any time and which the operation holds until its chunks are settled.
            let seen = unsafe { self.process.read(ours, theirs, chunk.bytes)? };
            if seen == known {
                return Ok(());
            }
            // Another worker may have asked already.
            if self.regions().generation != seen {
                self.refresh(custody.deadline())?;
            }
            check(chunk, &self.regions().spans)?;
            if custody.is_stopped() {
                return Err(Error::Cancelled);
            }
        }
    }
}

fn check(chunk: &Chunk, spans: &Spans) -> Result<(), Error> {
    for copy in chunk.copies() {
        if spans.find(copy.source, copy.bytes, 0).is_none() {
            let (address, bytes) = (copy.source, copy.bytes);
            return Err(Error::OutsideRegion { side: Side::Peer, address, bytes });
        }
    }
    Ok(())
}
