//! An engine that is about to go: it promises nothing new, keeps what it has promised, and says when
//! nothing is left.

use std::time::Duration;

use tracing::info;

use super::core::Core;
use super::status::ask;
use crate::error::{Misbehaviour, PeerError};
use crate::wire::message::{Left, Question, Reply};
use crate::wire::trust::Trust;

/// How far a drain is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Drain {
    /// The engine promises what it is asked to.
    #[default]
    Off,
    /// Nothing new; something is left.
    Draining,
    /// Nothing is left, and that has been said.
    Drained,
}

impl Core {
    /// From now on nothing new is promised. Answers whether that is news.
    pub(super) fn drain(&self) -> bool {
        // Under the lock of the leases: none begins after this.
        let leases = self.leases();
        let mut drain = self.drain.lock();
        let news = *drain == Drain::Off;
        if news {
            *drain = Drain::Draining;
        }
        drop((drain, leases));
        if news {
            let Left { leases, holds } = self.left();
            info!(leases, holds, "drains: nothing new is handed over, what was promised is kept");
            // Whoever waits for what will not come is told so.
            self.bells.ring_all();
            self.note_drained();
        }
        news
    }

    /// New promises are made again. Answers whether that is news.
    pub(super) fn resume(&self) -> bool {
        let before = std::mem::take(&mut *self.drain.lock());
        if before != Drain::Off {
            info!("does not drain any more: requests are handed over again");
        }
        before != Drain::Off
    }

    pub(super) fn draining(&self) -> bool {
        *self.drain.lock() != Drain::Off
    }

    pub(super) fn left(&self) -> Left {
        let leases = self.leases().open();
        Left { leases: leases as u32, holds: self.holds.len() as u32 }
    }

    /// Says that nothing is left, once.
    pub(super) fn note_drained(&self) {
        // One lock at a time: the leases' is never taken after this one's.
        let left = self.left();
        let mut drain = self.drain.lock();
        if *drain == Drain::Draining && left.is_empty() {
            *drain = Drain::Drained;
            info!("drained: nothing is kept for others, nor by others for this engine");
        }
    }
}

/// Tells a running agent to drain, or to stop draining, and learns what is left. It may be told as often
/// as one likes.
pub fn ask_drain(
    address: &str,
    trust: &Trust,
    patience: Duration,
    on: bool,
) -> Result<Left, PeerError> {
    match ask(address, trust, patience, "kvferry drain", Question::Drain { on })? {
        Reply::Left(left) => Ok(left),
        Reply::Refused(reason) => Err(PeerError::Refused(reason)),
        _ => Err(PeerError::Misbehaved(Misbehaviour::Answer)),
    }
}
