//! How what the peer has gathered gets here: on the connection, or by another transport; and the memory that it comes to on
//! its way to where it belongs.

use std::sync::Arc;
use std::time::Instant;

use kvferry_layout::{ByteCopy, Loops, Place};
use parking_lot::Mutex;

use crate::contract::{Error, InvalidFrame, Operation};
use crate::shared::Transfer;
use crate::shared::chunks::Chunk;
use crate::shared::packing_area::{Moving, PackingAreas};
use crate::shared::staging::{Full, Slot, Use, Waiting};

/// How what the peer has gathered gets here.
#[derive(Clone, Debug)]
pub enum Arrival {
    /// On the connection; what belongs on a card, to slots.
    Sent(Arc<Rooms>),
    /// It is fetched by another transport.
    Fetched(Arc<dyn Fetch>),
}

/// Another transport, which moves what the peer has gathered.
pub trait Fetch: std::fmt::Debug + Send + Sync {
    /// Takes memory of our own for what the peer is to gather of the loops, if there is some now.
    fn room(&self, loops: &Loops, waiting: &mut Waiting) -> Result<Option<Room>, Full>;
    /// Starts to read to it what the peer has gathered of the loops at an address.
    fn begin(
        &self,
        room: Room,
        loops: &Loops,
        address: u64,
        deadline: Instant,
    ) -> Result<Fetched, Error>;
    /// Starts to read copies that were not gathered, straight to where they belong.
    fn direct(&self, copies: &[ByteCopy], deadline: Instant) -> Result<Transfer, Error>;
    /// Keeps what is not wanted any more until nothing touches it.
    fn adopt(&self, orphan: Orphan);
}

/// Memory of our own for a part that is to come. It is taken before the peer is asked, so that nothing is
/// gathered in vain, and nobody waits with a slot of the peer's in hand.
#[derive(Debug)]
pub struct Room {
    /// The memory.
    pub slot: Slot,
    /// Where it is from.
    pub areas: Arc<PackingAreas>,
    /// Of the slot, and of where it belongs.
    pub place: Place,
}

/// What is being fetched, and where to.
#[derive(Debug)]
pub struct Fetched {
    /// The read.
    pub operation: Transfer,
    /// Where it is read to.
    pub room: Room,
}

impl Fetched {
    /// Starts to put it where it belongs. `None` where nobody can, and nothing runs.
    ///
    /// # Safety
    ///
    /// It has been fetched, the slot is as long as both halves of the loops say, and what they write is
    /// registered memory of the place, which stays so until the answer has ended.
    pub(super) unsafe fn scatter(&self, loops: &Loops) -> Result<Option<Moving>, Error> {
        // SAFETY: the caller's promise.
        Ok(unsafe { self.room.scatter(loops)? }.and_then(Result::ok))
    }
}

impl Room {
    /// The same of what has come to it; otherwise why nothing runs.
    ///
    /// # Safety
    ///
    /// As of [`Fetched::scatter`].
    pub(super) unsafe fn scatter(
        &self,
        loops: &Loops,
    ) -> Result<Option<Result<Moving, Error>>, Error> {
        let Self { slot, areas, place } = self;
        let scatter = loops.scatter(slot.address());
        let scatter = scatter.map_err(|e| Error::PeerMisbehaved(InvalidFrame::Loops(e)))?;
        let Some(area) = areas.of(*place) else { return Ok(None) };
        // SAFETY: the caller's promise.
        Ok(Some(unsafe { area.start(&scatter) }))
    }
}

/// What nobody waits for any more, and what it may still touch. Dropping it gives that back: only where
/// nothing runs any more.
#[derive(Debug)]
pub struct Orphan {
    operation: Option<Transfer>,
    moving: Option<Moving>,
    slot: Option<Slot>,
    chunk: Option<Chunk>,
}

impl Orphan {
    /// What was being fetched to a slot.
    pub fn fetched(operation: Transfer, slot: Slot) -> Self {
        Self { operation: Some(operation), moving: None, slot: Some(slot), chunk: None }
    }

    /// A chunk that was being read straight to where it belongs. Its operation has ended.
    pub(super) fn read(operation: Transfer, chunk: Chunk) -> Self {
        Self { operation: Some(operation), moving: None, slot: None, chunk: Some(chunk) }
    }

    /// A chunk that was being put where it belongs, from a slot. Its operation has ended.
    pub(super) fn scattered(moving: Moving, slot: Slot, chunk: Chunk) -> Self {
        Self { operation: None, moving: Some(moving), slot: Some(slot), chunk: Some(chunk) }
    }

    /// Whether nothing touches it any more.
    pub fn is_over(&self) -> bool {
        self.operation.as_ref().is_none_or(|operation| operation.poll().is_safe())
            && self.moving.as_ref().is_none_or(|moving| moving.outcome().is_some())
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        let ended = self.moving.as_ref().is_none_or(|moving| moving.outcome().is_some());
        match (self.chunk.take(), ended) {
            // Its operation has ended already.
            (Some(chunk), true) => chunk.fail(Error::Disconnected),
            // Better a region lost than a byte in somebody else's block.
            (chunk, false) => std::mem::forget((chunk, self.slot.take())),
            (None, true) => {}
        }
    }
}

/// Slots for what arrives, where our memory is a card's.
#[derive(Debug)]
pub struct Rooms {
    areas: Arc<PackingAreas>,
    /// What a card was still at when nobody waited for it any more.
    orphans: Mutex<Vec<Orphan>>,
}

impl Rooms {
    /// Slots of these areas.
    pub fn new(areas: Arc<PackingAreas>) -> Arc<Self> {
        Arc::new(Self { areas, orphans: Mutex::default() })
    }

    /// Whether bytes go to slots first: where our memory is a card's.
    pub(super) fn are_needed(&self) -> bool {
        self.areas.card().is_some()
    }

    /// A slot, if there is one now.
    pub(super) fn take(&self, waiting: &mut Waiting) -> Result<Option<Room>, Full> {
        let Some((gpu, area)) = self.areas.card() else { return Err(Full::Stalled) };
        let slot = area.staging.take_now(Use::Own, waiting)?;
        let room = |slot| Room { slot, areas: self.areas.clone(), place: Place::Gpu(gpu) };
        Ok(slot.map(room))
    }

    pub(super) fn adopt(&self, orphan: Orphan) {
        let mut orphans = self.orphans.lock();
        orphans.retain(|orphan| !orphan.is_over());
        orphans.push(orphan);
    }
}
