//! What reads from a peer take, by reading a little of its memory when it is connected to: it may be on the same
//! card, or behind NVLink or PCIe.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_layout::Price;
use parking_lot::Mutex;

use super::driver::Card;
use super::errand::Errand;
use super::line::{Extent, Line};
use super::peer::{Table, USUAL};
use super::program::Program;
use super::staging::OnCard;
use super::watch::Watch;
use crate::shared::trial;

/// What a card moves in about the time that a launch takes.
const LONG: u64 = 8 << 20;
/// A card that takes longer than this has too much else to do to be measured.
const PATIENCE: Duration = Duration::from_millis(100);

/// Memory to read into: taken when it is first needed, and kept, because to free it would wait for whatever the
/// card is doing.
#[derive(Default)]
pub(super) struct Scratch(Mutex<Option<OnCard>>);

impl Scratch {
    /// What reads from a peer take. A kernel that does not end in time is left to the watch, with all that it touches.
    pub(super) fn price(
        &self,
        (card, line, watch): (&Card, &Mutex<Line>, &Watch),
        extent: Extent,
        theirs: &Arc<Table>,
        deadline: Instant,
    ) -> Price {
        let mut kept = self.0.lock();
        if kept.is_none() {
            *kept = OnCard::new(card, LONG as usize).ok();
        }
        let until = deadline.min(Instant::now() + PATIENCE);
        measure((line, watch), extent, theirs, &mut kept, until).unwrap_or(USUAL)
    }
}

/// `None` where there is no memory, no region is long enough, or the card does not answer in time.
fn measure(
    (line, watch): (&Mutex<Line>, &Watch),
    extent: Extent,
    theirs: &Arc<Table>,
    memory: &mut Option<OnCard>,
    until: Instant,
) -> Option<Price> {
    let regions = theirs.spans.0.iter().zip(&theirs.shifts);
    let (region, &shift) = regions.max_by_key(|(region, _)| region.bytes)?;
    let places = region.bytes / LONG;
    if places == 0 {
        return None;
    }
    let mut round = 0;
    trial::price(LONG, |count, bytes| {
        let destination = memory.as_ref()?.address();
        // Each time from another place, as far as there are some: what was read just now is in the card's cache.
        let source = region.base + round % places * LONG;
        round += 1;
        let loops = trial::loops((source, destination), count, bytes)?;
        let program = Program::new(&loops, extent.batch_bytes(loops.bytes()), |_| shift);
        let began = Instant::now();
        // SAFETY: what is read lies in a region of the peer's, which is open as long as its table; what is written,
        // in memory that nobody else knows and nobody looks into. Both are kept until the errand has ended.
        let errand = unsafe { Errand::start(line, &program, extent).ok()? };
        match errand.wait(until) {
            Some(outcome) => outcome.ok().map(|()| began.elapsed().as_nanos() as f64),
            None => {
                watch.keep(errand, Box::new((theirs.clone(), memory.take())));
                None
            }
        }
    })
}
