//! What is decided about an engine before its memory is laid out.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::ops::Range;

use kvferry_layout::Law;

use crate::model::{Model, Sight, State, Tensor};

/// A tensor of a model: the indices of its layer and of itself.
pub type TensorAt = (usize, usize);

/// Everything that is decided about an engine before its memory is laid out.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Its name.
    pub name: String,
    /// The model that it runs.
    pub model: Model,
    /// The layers of each pipeline stage.
    pub stages: Vec<Vec<usize>>,
    /// Ranks of a stage.
    pub lanes: u64,
    /// How each tensor is spread over the lanes.
    pub spreads: BTreeMap<TensorAt, Spread>,
    /// The groups.
    pub groups: Vec<GroupRecipe>,
    /// The memory of a rank.
    pub slabs: Vec<Slab>,
    /// Columns of every convolution beyond the live ones.
    pub speculative: u64,
    /// Whether regions follow each other without a byte between them.
    pub adjacent_regions: bool,
    /// What the manifest says for strides that are never taken, because there is but one of a thing.
    pub idle_stride: Option<u64>,
}

/// How a tensor is spread over the lanes of a stage.
#[derive(Clone, Debug)]
pub struct Spread {
    /// Lanes that take turns with the entries (context parallelism): which of every `modulus` entries
    /// each of them holds.
    pub turns: Vec<Range<u64>>,
    /// See `turns`.
    pub modulus: u64,
    /// Whether neighbouring lanes differ in their turn (and not in their part).
    pub turns_first: bool,
    /// `parts[state][part]`: the ranges on the cut axis that lanes of this part hold. Empty: none.
    pub parts: Vec<Vec<Vec<Range<u64>>>>,
    /// Kernel blocks in a block.
    pub kernels: u64,
}

/// What is decided about a group.
#[derive(Clone, Debug)]
pub struct GroupRecipe {
    /// Its name.
    pub name: String,
    /// What it holds, over all stages.
    pub tensors: Vec<TensorAt>,
    /// Tokens of a block; `None` for recurrent states.
    pub tokens_per_block: Option<u64>,
    /// What it keeps live.
    pub sight: Sight,
    /// Tokens kept beyond that.
    pub extra: u64,
    /// Tensors that say how far back their layer looks, though the group may keep more.
    pub needs: BTreeSet<TensorAt>,
    /// Number of blocks.
    pub blocks: u32,
    /// The id of dead entries.
    pub null_block: Option<u32>,
    /// Groups with equal pools must not use one block id twice.
    pub pool: usize,
}

/// A stretch of memory.
#[derive(Clone, Debug)]
pub struct Slab {
    /// The region that it is part of.
    pub region: usize,
    /// Padding before it.
    pub lead: u64,
    /// Groups whose tensors lie here; several overlay each other block by block.
    pub arms: Vec<Arm>,
}

/// The tensors of one group in a slab, and their order in memory.
#[derive(Clone, Debug)]
pub struct Arm {
    /// The group.
    pub group: usize,
    /// Which of its tensors.
    pub tensors: Vec<TensorAt>,
    /// From the outermost loop to the innermost. What is not named follows in the order block, layer,
    /// kernel block, slot, section, axes.
    pub order: Vec<Step>,
    /// Padding after every turn of a loop.
    pub pads: Vec<(Step, u64)>,
    /// Padding before the arm, inside of a block where arms overlay each other.
    pub lead: u64,
    /// Bytes of every block that hold nothing to move.
    pub scratch: u64,
}

/// One level of a memory order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Layer after layer.
    Layer,
    /// Section after section: K and V, x|B|C.
    Section,
    /// Blocks.
    Block,
    /// Kernel blocks of a block.
    Kernel,
    /// Entries of a kernel block.
    Slot,
    /// An axis.
    Axis(String),
}

impl Spread {
    /// The usual split: whole units, as even as they go; fewer units than ranks are replicated.
    pub fn balanced(tensor: &Tensor, lanes: u64) -> Self {
        let parts = tensor.states.iter().map(|state| balanced_parts(state, lanes)).collect();
        Self { turns: one_turn(), modulus: 1, turns_first: false, parts, kernels: 1 }
    }

    /// The same with blocks of `kernels` kernel blocks.
    pub fn kernels(mut self, kernels: u64) -> Self {
        self.kernels = kernels;
        self
    }
}

/// The turns of a single lane: everything.
pub fn one_turn() -> Vec<Range<u64>> {
    iter::once(0..1).collect()
}

/// The turns of `lanes` lanes that take `interleave` entries each.
pub fn equal_turns(lanes: u64, interleave: u64) -> Vec<Range<u64>> {
    (0..lanes).map(|lane| lane * interleave..(lane + 1) * interleave).collect()
}

/// The ranges of the cut axis on each of `lanes` lanes: units from `r * units / lanes` on, at least one.
pub fn balanced_parts(state: &State, lanes: u64) -> Vec<Vec<Range<u64>>> {
    let Some(cut) = state.cut else { return vec![vec![]; lanes as usize] };
    let unit = state.axes[cut.axis].length / cut.units;
    let part = |lane: u64| {
        let first = lane * cut.units / lanes;
        let end = ((lane + 1) * cut.units / lanes).max(first + 1);
        iter::once(first * unit..end * unit).collect()
    };
    (0..lanes).map(part).collect()
}

impl GroupRecipe {
    /// Entries of a block on a rank that holds `turn` of every `modulus` of them.
    pub fn slots(&self, law: Law, modulus: u64, turn: &Range<u64>) -> u64 {
        let Some(tokens) = self.tokens_per_block else { return law.open.into() };
        let entries = tokens * u64::from(law.entries) / u64::from(law.tokens);
        assert_eq!(entries * u64::from(law.tokens), tokens * u64::from(law.entries));
        assert_eq!(entries % modulus, 0);
        entries / modulus * (turn.end - turn.start)
    }
}
