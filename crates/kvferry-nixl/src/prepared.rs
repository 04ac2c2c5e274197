//! Lists that NIXL has looked up already, kept for the next request.

use std::collections::VecDeque;
use std::sync::Arc;

use kvferry_layout::Region;
use parking_lot::Mutex;

use super::capi::{Agent, Code, Prepared};
use super::grid::Grid;
use super::peer::NixlPeer;
use kvferry_transport::Instance;

/// Prepared lists kept at once.
const MAX_PREPARED: usize = 64;

#[derive(Debug, Default)]
pub(super) struct PreparedLists {
    /// The most recently used last.
    lists: Mutex<VecDeque<(Key, Arc<Prepared>)>>,
}

/// Which prepared list.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Key {
    /// Whose memory; `None` for our own.
    peer: Option<Instance>,
    grid: Grid,
}

impl PreparedLists {
    /// The list of a grid in a peer's memory, or in our own, made where it is not there yet.
    ///
    /// # Safety
    ///
    /// The grid's region must be registered, by the peer or by us, until it is forgotten here.
    pub(super) unsafe fn get(
        &self,
        agent: &Arc<Agent>,
        peer: Option<&NixlPeer>,
        grid: Grid,
    ) -> Result<Arc<Prepared>, Code> {
        let key = Key { peer: peer.map(NixlPeer::instance), grid };
        let mut lists = self.lists.lock();
        if let Some(at) = lists.iter().position(|(known, _)| *known == key)
            && let Some(entry) = lists.remove(at)
        {
            let list = entry.1.clone();
            lists.push_back(entry);
            return Ok(list);
        }
        let name = peer.map(|peer| &*peer.0.name);
        // SAFETY: the cells of a grid lie in its region, which is the caller's promise.
        let list = unsafe { agent.prepare(name, grid.region.place, grid.spans()) }?;
        let list = Arc::new(list);
        if lists.len() >= MAX_PREPARED {
            lists.pop_front();
        }
        lists.push_back((key, list.clone()));
        Ok(list)
    }

    pub(super) fn forget_peer(&self, peer: Instance) {
        self.lists.lock().retain(|(key, _)| key.peer != Some(peer));
    }

    /// Forgets lists over a region of our own.
    pub(super) fn forget_region(&self, region: Region) {
        self.lists.lock().retain(|(key, _)| key.peer.is_some() || key.grid.region != region);
    }

    pub(super) fn clear(&self) {
        self.lists.lock().clear();
    }
}
