//! What the engine decides before it knows a rank.

use super::group::SpecGroup;
use crate::model::Model;
use crate::rules::topology::{Conv, Layout};

/// Groups, block sizes, and the layout: the same on every rank.
#[derive(Clone, Debug)]
pub struct Pools {
    /// The groups of the whole model.
    pub groups: Vec<PoolGroup>,
    /// The order of a cache's axes.
    pub layout: Layout,
    /// The order of a convolution state's axes.
    pub conv: Conv,
    /// Blocks in the pool.
    pub blocks: u32,
    /// The first decoder layer of every pipeline stage, and the end.
    pub stages: Vec<u32>,
    pub(super) specs: Vec<SpecGroup>,
}

/// A group of the whole model: what shares a block table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolGroup {
    /// Its name in messages.
    pub name: String,
    /// Indices of its members among the model's caches.
    pub caches: Vec<usize>,
    /// Tokens in a block; `None` for states of a fixed size.
    pub block: Option<u64>,
    /// Tokens in a kernel block; `None` for states of a fixed size.
    pub kernel: Option<u64>,
    /// Bytes of a block of each member, padding included.
    pub pages: Vec<u64>,
}

impl Pools {
    /// Whether a cache lives on a pipeline stage.
    pub(super) fn lives(&self, model: &Model, cache: usize, stage: usize) -> bool {
        let layer = model.caches[cache].layer;
        self.stages[stage] <= layer && layer < self.stages[stage + 1]
    }
}
