//! Chunks that another transport moves while a lane waits: what the peer has gathered, and copies as they are.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvferry_layout::Loops;

use super::arrival::{Fetch, Orphan, Room};
use super::state::{Lane, State};
use crate::contract::{Error, Operation, Status};
use crate::shared::chunks::{Chunk, Chunked};
use crate::shared::custody::Custody;
use crate::shared::io::Pauses;
use crate::shared::packing_area::Moving;
use crate::shared::staging::Slot;

/// How long a card may take to put a part where it belongs.
pub(super) const SCATTER_PATIENCE: Duration = Duration::from_secs(10);

/// A chunk that has come to a slot and is being put where it belongs.
pub(super) struct Landing {
    pub(super) operation: Arc<Chunked>,
    pub(super) chunk: Chunk,
    pub(super) moving: Moving,
    pub(super) slot: Slot,
}

impl Landing {
    /// Waits until it is where it belongs, and how that ended. `None` where that takes too long: then its
    /// operation has failed, and all that may still be touched is kept.
    pub(super) async fn wait(
        self,
        state: &State,
        lane: &Lane,
    ) -> Option<(Arc<Chunked>, Chunk, Result<(), Error>)> {
        let Self { operation, chunk, moving, slot } = self;
        lane.forget(operation.custody().id());
        let until = Instant::now() + SCATTER_PATIENCE;
        let mut pauses = Pauses::default();
        while Instant::now() < until {
            if let Some(outcome) = moving.outcome() {
                return Some((operation, chunk, outcome));
            }
            pauses.pause().await;
        }
        let late = format!("a kernel has not ended within {} s", SCATTER_PATIENCE.as_secs());
        operation.custody().stop(Error::Library(late));
        let orphan = Orphan::scattered(moving, slot, chunk);
        state.adopt(orphan);
        None
    }
}

/// Fetches what the peer has gathered at an address, and starts to put it where it belongs. `None` where there is
/// nobody to do that.
pub(super) async fn fetch(
    state: &State,
    lane: &Lane,
    fetch: &dyn Fetch,
    custody: &Custody,
    loops: &Loops,
    (address, room): (u64, Room),
) -> Result<Option<(Moving, Slot)>, Error> {
    let fetched = fetch.begin(room, loops, address, custody.deadline())?;
    let mut pauses = Pauses::default();
    loop {
        match fetched.operation.poll() {
            Status::Done(_) => break,
            Status::Failed(error) => return Err(error),
            Status::InProgress if !custody.is_stopped() && !state.queue.lock().closing => {
                pauses.pause().await;
            }
            status @ (Status::InProgress | Status::Quarantined(_)) => {
                if custody.is_stopped() {
                    // Whatever else is on the way here is none the worse for it.
                    lane.cut_by_us.store(true, Ordering::SeqCst);
                }
                fetched.operation.cancel();
                fetch.adopt(Orphan::fetched(fetched.operation, fetched.room.slot));
                return Err(match status {
                    Status::Quarantined(error) => error,
                    _ => Error::Disconnected,
                });
            }
        }
    }
    if custody.is_stopped() {
        return Ok(Some((Moving::nothing(), fetched.room.slot)));
    }
    // SAFETY: what is read lies in the slot, which is ours and at least as long as both halves say
    // (`Fetch::begin`). What is written lies in registered regions (`Regions::hold`) of the place that
    // `begin` found, which may be written at any time and which the operation holds until its chunks
    // are settled: this one, when the bytes have been moved.
    let moving = unsafe { fetched.scatter(loops)? };
    Ok(moving.map(|moving| (moving, fetched.room.slot)))
}

/// Reads a chunk by the other transport, straight to where it belongs.
pub(super) async fn read_otherwise(
    state: &State,
    lane: &Lane,
    fetch: &dyn Fetch,
    operation: &Chunked,
    chunk: Chunk,
) {
    let custody = operation.custody();
    let inner = match fetch.direct(chunk.copies(), custody.deadline()) {
        Ok(inner) => inner,
        Err(error) => {
            lane.forget(custody.id());
            chunk.fail(error);
            return;
        }
    };
    let mut pauses = Pauses::default();
    let error = loop {
        match inner.poll() {
            Status::Done(_) => break None,
            Status::Failed(error) => break Some(error),
            Status::InProgress if !custody.is_stopped() && !state.queue.lock().closing => {
                pauses.pause().await;
            }
            status @ (Status::InProgress | Status::Quarantined(_)) => {
                custody.stop(match status {
                    Status::Quarantined(error) => error,
                    _ => Error::Disconnected,
                });
                inner.cancel();
                lane.forget(custody.id());
                fetch.adopt(Orphan::read(inner, chunk));
                return;
            }
        }
    };
    lane.forget(custody.id());
    match error {
        None => chunk.in_place(),
        Some(error) => chunk.fail(error),
    }
}
