//! At which bytes a rank's states lie.

use kvferry_layout::{Group, Kernel, Kind, Phase, Piece, Scratch, Span, View};

use super::error::cannot_run;
use super::group::SpecGroup;
use super::pools::Pools;
use super::spec::{Kernels, Spec};
use crate::error::RulesError;
use crate::model::{Model, Packing, Sort, State};
use crate::rules::topology::{Conv, Layout, Topology};

const BLOCK: usize = 1;
const HEAD: usize = 2;
const TOKEN: usize = 3;

/// What a pipeline stage allocates.
pub(super) struct Placed {
    /// Bytes of the pool.
    pub(super) bytes: u64,
    /// The layers of every group that live on the stage.
    pub(super) groups: Vec<Vec<PlacedLayer>>,
}

/// One layer's page in the pool.
pub(super) struct PlacedLayer {
    /// Index among the model's caches.
    cache: usize,
    /// Bytes from the pool's start to block 0.
    offset: u64,
    /// Bytes from block to block.
    block: u64,
    /// Bytes from kernel block to kernel block.
    kernel: Option<Kernel>,
    /// Bytes from head to head, and from token to token.
    head: u64,
    token: u64,
}

/// Whether the layout can express the pages at all.
pub(super) fn check_layout(model: &Model, pools: &Pools) -> Result<(), RulesError> {
    let refuse = |reason| Err(cannot_run(model, format!("layout={}", pools.layout), reason));
    let specs = || pools.specs.iter().flat_map(|group| &group.members);
    let first = &pools.specs[0].members[0];
    let shape = |spec: &Spec| (spec.class.heads, spec.entries(), spec.page());
    if !pools.layout.is_block_compact() && specs().any(|spec| shape(spec) != shape(first)) {
        return refuse(
            "layers with different pages need a layout whose blocks lie together".into(),
        );
    }
    let in_slots = |spec: &Spec| {
        let cache = &model.caches[spec.cache];
        matches!(cache.sort, Sort::Attention { .. })
            && cache.tensors.iter().any(|tensor| tensor.packing == Packing::Planes)
    };
    if specs().any(in_slots) && !pools.layout.is_block_contiguous() {
        return refuse("4-bit pages need a layout that keeps each head in one piece".into());
    }
    let mixed = specs().any(|spec| spec.page() != first.page());
    if mixed && pools.groups.len() > 1 && !pools.layout.is_block_outermost() {
        return refuse(
            "layers with pages of different sizes need a layout with blocks outermost".into(),
        );
    }
    for stage in 0..pools.stages.len() - 1 {
        let here = |group: &SpecGroup| {
            group.members.iter().filter(|spec| pools.lives(model, spec.cache, stage)).count()
        };
        let setting = || format!("pp={}", pools.stages.len() - 1);
        if pools.specs.iter().all(|group| here(group) == 0) {
            let reason = format!("stage {stage} has no layer that keeps anything");
            return Err(cannot_run(model, setting(), reason));
        }
        if pools.specs.iter().any(|group| group.by_layer && here(group) == 0) {
            let reason = format!("stage {stage} has no layer of a group with different pages");
            return Err(cannot_run(model, setting(), reason));
        }
    }
    Ok(())
}

/// Tokens in a kernel block of a group; `None` for states of a fixed size.
pub(super) fn kernel(
    model: &Model,
    pools: &Pools,
    number: usize,
    kernels: &Kernels,
) -> Result<Option<u64>, RulesError> {
    let group = &pools.specs[number];
    let Some(block) = group.block() else { return Ok(None) };
    let Kernels::Fixed(size) = *kernels else { return Ok(Some(block)) };
    // A module that decides its blocks itself has kernels that take them.
    let own = |spec: &Spec| model.caches[spec.cache].block == Some(block);
    if size == block || group.members.iter().all(own) {
        return Ok(Some(block));
    }
    let refuse = |reason: &str| {
        Err(cannot_run(model, format!("block={block},kernel={size}"), reason.to_owned()))
    };
    if !block.is_multiple_of(size) {
        return refuse(&format!(
            "the block size ({block}) is not a multiple of the kernel's block size ({size})"
        ));
    }
    if group.members.iter().any(|spec| spec.class.padded.is_some()) {
        return refuse("padded pages cannot be split into kernel blocks");
    }
    let alone = pools.groups.len() == 1 && group.members.len() == 1;
    if pools.layout.is_block_outermost() && !alone {
        return refuse("blocks cannot be split where other layers' pages lie between them");
    }
    if pools.layout == Layout::Lhbnc && group.members.iter().any(|spec| spec.class.heads > 1) {
        return refuse("blocks cannot be split where the heads of a block lie apart");
    }
    Ok(Some(size))
}

/// Places the layers of one pipeline stage.
pub(super) fn stage(model: &Model, pools: &Pools, stage: u32) -> Result<Placed, RulesError> {
    let stage = stage as usize;
    let here: Vec<Vec<&Spec>> = pools
        .specs
        .iter()
        .map(|group| {
            let lives = |spec: &&Spec| pools.lives(model, spec.cache, stage);
            group.members.iter().filter(lives).collect()
        })
        .collect();
    let blocks = u64::from(pools.blocks);
    let pages = |specs: &Vec<&Spec>| specs.iter().map(|spec| spec.page()).sum::<u64>();
    let block_bytes = here.iter().map(pages).max().unwrap_or(0);
    let Some(bytes) = block_bytes.checked_mul(blocks).filter(|bytes| *bytes < 1 << 47) else {
        let reason = "the pool would be larger than any machine's memory".to_owned();
        return Err(cannot_run(model, format!("blocks={blocks}"), reason));
    };
    let outermost = pools.layout.is_block_outermost();
    let mut groups = vec![];
    for (number, specs) in here.iter().enumerate() {
        let mut placed = vec![];
        let mut base = 0;
        // Layers of one spec lie in a row; where a group has several, in the order of appearance.
        let mut runs: Vec<Vec<&Spec>> = vec![];
        for spec in specs {
            match runs.iter_mut().find(|run| run[0].class == spec.class) {
                Some(run) => run.push(spec),
                None => runs.push(vec![spec]),
            }
        }
        for run in runs {
            let (spec, layers) = (run[0], run.len() as u64);
            let fixed = outermost.then_some(block_bytes);
            let [layer, block, ..] = strides(spec, pools.layout, layers, blocks, 1, [None, fixed]);
            let ratio = match (pools.groups[number].block, pools.groups[number].kernel) {
                (Some(block), Some(kernel)) => block / kernel,
                _ => 1,
            };
            let inner = strides(
                spec,
                pools.layout,
                layers,
                blocks,
                ratio,
                [Some(layer), Some(block / ratio)],
            );
            let kernel = (ratio > 1)
                .then(|| Kernel { entries: spec.entries() / ratio, stride: inner[BLOCK] });
            for (index, spec) in (0u64..).zip(&run) {
                placed.push(PlacedLayer {
                    cache: spec.cache,
                    offset: base + index * layer,
                    block,
                    kernel,
                    head: inner[HEAD],
                    token: inner[TOKEN],
                });
            }
            base += layers * if outermost { spec.page() } else { layer };
        }
        // In the order in which the group names its layers.
        placed.sort_by_key(|layer| specs.iter().position(|spec| spec.cache == layer.cache));
        groups.push(placed);
    }
    Ok(Placed { bytes, groups })
}

/// Byte strides of (layer, block, head, token, content), where `fixed` gives those of layers and
/// blocks that are already settled, and blocks are split into `ratio` kernel blocks.
fn strides(
    spec: &Spec,
    layout: Layout,
    layers: u64,
    blocks: u64,
    ratio: u64,
    fixed: [Option<u64>; 2],
) -> [u64; 5] {
    let class = &spec.class;
    let entries = spec.entries() / ratio;
    let shape = [layers, blocks * ratio, class.heads, entries, class.content];
    let order = layout.order();
    let place = |dim| order.iter().position(|&other| other == dim).expect("a permutation");
    // Padding goes to the end of a page: inside of both layers and blocks.
    let page_end = place(0).max(place(BLOCK));
    let mut strides = [0; 5];
    let mut current: u64 = 1;
    for (index, &dim) in order.iter().enumerate().rev() {
        if index == page_end
            && let Some(padded) = class.padded
        {
            current = current.max(padded);
        }
        strides[dim] = fixed.get(dim).copied().flatten().unwrap_or(current);
        current = strides[dim] * shape[dim];
    }
    strides
}

impl PlacedLayer {
    /// Adds this layer's pieces on one rank to a group: its tensor-parallel rank, and whose turn it has
    /// where ranks share tokens.
    pub(super) fn describe(
        &self,
        model: &Model,
        topology: &Topology,
        pools: &Pools,
        (rank, turn): (u32, u64),
        kinds: &mut Vec<Kind>,
        group: &mut Group,
    ) {
        let cache = &model.caches[self.cache];
        let held = |state: &State| state.held(rank.into(), topology.tp.into());
        // A sliding layer that is kept in full looks no further back than its window, which is all that
        // it needs unless another request may use its blocks again.
        let sight = cache.window();
        let need = (!topology.caching && sight != group.window).then_some(sight);
        let (turns, rate) = (u64::from(topology.dcp), cache.tokens_per_entry());
        let phase = match cache.sort.is_recurrent() || turns == 1 {
            true => Phase::ALL,
            false => Phase::share(turn, turns, topology.interleave.into()),
        };
        let mut offset = self.offset;
        for tensor in &cache.tensors {
            let start = offset;
            let lengths = |state| held(state).0.iter().map(Span::len).collect::<Vec<_>>();
            // A convolution's channels are those of its states together; its columns are the live
            // ones, and those that only speculative tokens use.
            let channels: u64 =
                tensor.states.iter().filter_map(|state| lengths(state).first().copied()).sum();
            let spare = match tensor.packing {
                Packing::Convolution { grows: true } => u64::from(topology.spec),
                _ => 0,
            };
            for state in &tensor.states {
                let size = u64::from(state.kind.format.bytes);
                let lengths = lengths(state);
                let mut entry = if cache.sort.is_recurrent() { 0 } else { self.token };
                let (axes, advance) = match (tensor.packing, &cache.sort) {
                    (Packing::Convolution { .. }, _) => match pools.conv {
                        Conv::Sd => (vec![size, channels * size], lengths[0] * size),
                        Conv::Ds => {
                            let row = (lengths[1] + spare) * size;
                            (vec![row, size], lengths[0] * row)
                        }
                    },
                    (Packing::Plain, Sort::Attention { .. }) => {
                        let content = lengths[1..].iter().product::<u64>() * size;
                        let inner = dense(&lengths[1..], size).0;
                        ([vec![self.head], inner].concat(), content)
                    }
                    (Packing::Plain, _) => dense(&lengths, size),
                    // All numbers of a head, then those of the next: a head's slots lie together.
                    (Packing::Planes, Sort::Attention { .. }) => {
                        let entries = self.kernel.map(|kernel| kernel.entries);
                        let block = group.tokens_per_block.map(|tokens| tokens / turns / rate);
                        let plane = entries.or(block).unwrap_or(1) * size;
                        entry = size;
                        (vec![plane], lengths[0] * plane)
                    }
                    (Packing::Planes, _) => {
                        let (axes, bytes) = dense(&lengths, size);
                        let entries = self.kernel.map(|kernel| kernel.entries);
                        entry = bytes;
                        let block = group.tokens_per_block.map(|tokens| tokens / turns / rate);
                        (axes, bytes * entries.or(block).unwrap_or(1))
                    }
                };
                group.pieces.push(Piece {
                    state: state.name.clone(),
                    kind: kind_index(kinds, &state.kind),
                    bounds: held(state),
                    phase,
                    need,
                    view: View {
                        region: 0,
                        offset,
                        block: self.block,
                        kernel: self.kernel,
                        entry,
                        axes,
                    },
                });
                offset += advance;
            }
            let (Packing::Convolution { .. }, Some(state)) =
                (tensor.packing, tensor.states.first())
            else {
                continue;
            };
            let (size, live) = (u64::from(state.kind.format.bytes), state.kind.axes[1].length);
            let columns = live + spare;
            offset = start + channels * columns * size;
            if spare > 0 {
                let (at, run, dims) = match pools.conv {
                    Conv::Sd => (live * channels * size, spare * channels * size, vec![]),
                    Conv::Ds => (live * size, spare * size, vec![(channels, columns * size)]),
                };
                let offset = start + at;
                group.scratch.push(Scratch { region: 0, offset, block: self.block, run, dims });
            }
        }
    }
}

/// Strides of a state whose elements follow each other, and its bytes.
fn dense(lengths: &[u64], size: u64) -> (Vec<u64>, u64) {
    let mut bytes = size;
    let mut strides = vec![0; lengths.len()];
    for (stride, length) in strides.iter_mut().zip(lengths).rev() {
        *stride = bytes;
        bytes *= length;
    }
    (strides, bytes)
}

fn kind_index(kinds: &mut Vec<Kind>, kind: &Kind) -> u32 {
    let index = kinds.iter().position(|known| known == kind).unwrap_or_else(|| {
        kinds.push(kind.clone());
        kinds.len() - 1
    });
    u32::try_from(index).expect("a model has few kinds of states")
}
