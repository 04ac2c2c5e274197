//! Memory of our own for what comes on a connection and belongs on a card: slots that the card reads.

use std::sync::Arc;
use std::time::Duration;

use kvferry_layout::Place;
use parking_lot::Mutex;

use super::state::{Orphan, Room};
use crate::shared::packing_area::PackingAreas;
use crate::shared::staging::{Full, Use};

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

    /// A slot, as soon as there is one. `None` where our memory is the host's: bytes are put into it as they arrive.
    pub(super) fn take(
        &self,
        patience: Duration,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Option<Room>, Full> {
        let Some((gpu, area)) = self.areas.card() else { return Ok(None) };
        let slot = area.staging.take_while(Use::Own, patience, is_wanted)?;
        Ok(Some(Room { slot, areas: self.areas.clone(), place: Place::Gpu(gpu) }))
    }

    pub(super) fn adopt(&self, orphan: Orphan) {
        let mut orphans = self.orphans.lock();
        orphans.retain(|orphan| !orphan.is_over());
        orphans.push(orphan);
    }
}
