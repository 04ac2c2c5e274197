//! One launch of the cuda back end: an operation whose one part is in the hands of a kernel.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::driver::{OnCard, Pinned, Stream};
use super::landing::Landing;
use super::peer::{CudaPeer, Table};
use super::program::Ends;
use super::signal::Signal;
use kvferry_transport::shared::Transfer;
use kvferry_transport::shared::custody::{Custody, Part};
use kvferry_transport::{Error, Operation, Status};

/// What a caller holds of an operation. Dropping it cancels the operation.
#[derive(Debug)]
pub struct CudaTransfer {
    transfer: Transfer,
    posted: Instant,
    /// `None` where there was nothing to launch.
    launch: Option<Arc<ReadLaunch>>,
}

impl CudaTransfer {
    /// The call that started the operation returns now.
    pub(super) fn posted(custody: Arc<Custody>, launch: Option<Arc<ReadLaunch>>) -> Self {
        Self { transfer: Transfer::posted(custody), posted: Instant::now(), launch }
    }
}

impl Operation for CudaTransfer {
    fn poll(&self) -> Status {
        if let Some(launch) = &self.launch {
            launch.landed();
        }
        self.transfer.poll()
    }

    fn wait(&self, until: Instant) -> Status {
        // Most requests take less than this, however often they are waited for: worth staying awake for. A
        // sleep is never shorter than some 60 µs. Short ones are not worth a call of the system either.
        let busy = self.posted + Duration::from_micros(50);
        let awake = self.posted + Duration::from_millis(10);
        loop {
            let status = self.poll();
            let now = Instant::now();
            if status.is_safe() || now >= until {
                return status;
            }
            if now < busy {
                std::hint::spin_loop();
            } else if now < awake {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(100).min(until - now));
            }
        }
    }

    fn cancel(&self) {
        self.transfer.cancel();
    }
}

pub(super) struct ReadLaunch {
    peer: CudaPeer,
    custody: Arc<Custody>,
    bytes: u64,
    /// The signal's, which is there while this is aloft.
    ends: Ends,
    /// `None` once nothing of it can land any more.
    aloft: Mutex<Option<Aloft>>,
}

/// What a kernel touches, kept until it has ended.
struct Aloft {
    part: Part,
    signal: Signal,
    /// What the kernel was started in.
    stream: Arc<Stream>,
    /// The peer's memory, open.
    table: Arc<Table>,
    kept: Option<(Pinned, OnCard)>,
}

impl ReadLaunch {
    pub(super) fn new(
        peer: CudaPeer,
        table: Arc<Table>,
        part: Part,
        bytes: u64,
        (signal, stream): (Signal, Arc<Stream>),
    ) -> Arc<Self> {
        let (custody, ends) = (part.custody().clone(), signal.ends());
        let aloft = Mutex::new(Some(Aloft { part, signal, stream, table, kept: None }));
        Arc::new(Self { peer, custody, bytes, ends, aloft })
    }

    pub(super) fn is_of(&self, peer: &CudaPeer) -> bool {
        self.peer.is(peer)
    }

    /// Like [`landed`](Landing::landed), and asks the card whether anything went wrong: a kernel that was
    /// ended by an error says nothing.
    pub(super) fn landed_or_lost(&self) -> bool {
        if self.landed() {
            return true;
        }
        let Some(stream) = self.aloft.lock().as_ref().map(|aloft| aloft.stream.clone()) else {
            return true;
        };
        let error = match stream.has_ended() {
            Ok(false) => return false,
            Ok(true) if self.landed() => return true,
            Ok(true) => Error::Library("a kernel ended without saying so".to_owned()),
            // The context is broken: nothing of it runs any more.
            Err(error) => error,
        };
        self.refused(error);
        true
    }

    /// Ends the operation with an error, unless it has ended already. The kernel ends by itself.
    pub(super) fn stop(&self, error: Error) {
        self.custody.stop(error);
    }
}

impl Landing for ReadLaunch {
    fn ends(&self) -> Ends {
        self.ends
    }

    fn keep(&self, kept: (Pinned, OnCard)) {
        if let Some(aloft) = &mut *self.aloft.lock() {
            aloft.kept = Some(kept);
        }
    }

    fn refused(&self, error: Error) {
        if let Some(aloft) = self.aloft.lock().take() {
            aloft.clear().fail(error);
        }
    }

    fn landed(&self) -> bool {
        let mut slot = self.aloft.lock();
        match slot.take_if(|aloft| aloft.signal.is_set()) {
            Some(aloft) => aloft.clear().in_place(self.bytes),
            None => return slot.is_none(),
        }
        true
    }
}

impl Aloft {
    /// Gives everything back but the part, which is to be settled last.
    fn clear(self) -> Part {
        let Self { part, signal, stream, table, kept } = self;
        drop((signal, stream, table, kept));
        part
    }
}

impl fmt::Debug for ReadLaunch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadLaunch")
            .field("peer", &self.peer)
            .field("custody", &self.custody)
            .finish_non_exhaustive()
    }
}
