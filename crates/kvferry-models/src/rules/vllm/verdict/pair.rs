//! What the rules ask about a pair of engines.

use crate::model::{Model, Packing, Sort};
use crate::rules::topology::Topology;
use crate::rules::vllm::pools::Pools;
use crate::rules::vllm::quantised::resolved;

/// One side of a pair.
#[derive(Clone, Copy, Debug)]
pub struct EngineSide<'a> {
    /// How it is run.
    pub topology: &'a Topology,
    /// What it decides.
    pub pools: &'a Pools,
}

/// A pair of engines.
pub(super) struct Pair<'a> {
    pub(super) model: &'a Model,
    pub(super) prefill: EngineSide<'a>,
    pub(super) decode: EngineSide<'a>,
    pub(super) cached: u64,
}

/// The recurrent kinds that its connector knows how to split, or moves whole.
const SPLIT: [&str; 5] = ["mamba1", "mamba2", "gdn", "kda", "ring"];

/// Kinds with groups of which its connector takes an equal share for each rank, even where there is
/// one group alone and every rank has a copy of it.
const SHARES_ONE_GROUP: [&str; 1] = ["mamba2"];

impl<'a> EngineSide<'a> {
    /// The kernel block that its connector works with: the one that all attention layers have, or the
    /// one that all of theirs divide.
    pub(super) fn kernel(&self) -> Option<u64> {
        let mut kernels = self.pools.groups.iter().filter_map(|group| group.kernel);
        kernels.next().map(|first| kernels.fold(first, least_common_multiple))
    }

    pub(super) fn kernels_per_block(&self) -> u64 {
        let blocks =
            self.pools.groups.iter().filter_map(|group| Some(group.block? / group.kernel?));
        blocks.max().unwrap_or(1)
    }
}

impl Pair<'_> {
    /// The name of a side's cache data type, which the two must share.
    pub(super) fn cache_type(&self, side: EngineSide<'_>) -> &'static str {
        resolved(self.model, side.topology.kv).map_or("auto", |kv| kv.name())
    }

    pub(super) fn sides(&self) -> impl Iterator<Item = EngineSide<'_>> {
        [self.prefill, self.decode].into_iter()
    }

    pub(super) fn tp(&self) -> (u32, u32) {
        (self.prefill.topology.tp, self.decode.topology.tp)
    }

    /// A recurrent kind that its connector does not know.
    pub(super) fn without_split(&self) -> Option<&str> {
        self.model.caches.iter().find_map(|cache| match &cache.sort {
            Sort::Recurrent(kind) if !SPLIT.contains(&kind.word()) => Some(kind.word()),
            _ => None,
        })
    }

    pub(super) fn is_recurrent(&self) -> bool {
        self.model.caches.iter().any(|cache| cache.sort.is_recurrent())
    }

    /// Whether attention keeps latents and nothing else.
    pub(super) fn is_latent(&self) -> bool {
        let mut attention = self.model.caches.iter().filter(|cache| !cache.sort.is_recurrent());
        attention.clone().count() > 0
            && attention.all(|cache| matches!(cache.sort, Sort::Latent { .. } | Sort::Indexer))
    }

    /// KV heads of all layers that have any.
    pub(super) fn kv_heads(&self) -> impl Iterator<Item = u64> {
        let caches = self.model.caches.iter();
        caches
            .filter(|cache| matches!(cache.sort, Sort::Attention { .. }))
            .filter_map(|cache| cache.states().next()?.split.map(|split| split.units))
    }

    fn convolutions(&self) -> impl Iterator<Item = bool> {
        let tensors = self.model.caches.iter().flat_map(|cache| &cache.tensors);
        tensors.filter_map(|tensor| match tensor.packing {
            Packing::Convolution { grows } => Some(grows),
            Packing::Plain | Packing::Planes => None,
        })
    }

    pub(super) fn has_convolution(&self) -> bool {
        self.convolutions().next().is_some()
    }

    /// Whether a convolution state has columns for speculative tokens.
    pub(super) fn grows(&self) -> bool {
        self.convolutions().any(|grows| grows)
    }

    pub(super) fn has_one_mamba_group(&self) -> bool {
        self.model.caches.iter().any(|cache| {
            matches!(&cache.sort, Sort::Recurrent(kind) if SHARES_ONE_GROUP.contains(&kind.word()))
                && cache.states().any(|state| state.split.is_some_and(|split| split.units == 1))
        })
    }
}

fn least_common_multiple(one: u64, other: u64) -> u64 {
    let (mut a, mut b) = (one, other);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    one / a * other
}
