//! What callers and the driver share.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::capi::Agent;
use super::job::Job;
use super::peer::NixlPeer;
use super::prepared::PreparedLists;
use crate::contract::Instance;
use crate::shared::custody::{Custody, Part};
use crate::shared::desk::Desk;

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
