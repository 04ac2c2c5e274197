//! What one layer asks of the pool.

use kvferry_layout::Format;

use super::error::cannot_run;
use crate::error::RulesError;
use crate::model::{Cache, Model, Packing, Sort};
use crate::rules::topology::{CacheType, Layout, Topology};

/// No page may be larger than this: far above every real one, and low enough that a pool's bytes fit
/// in 64 bits.
const MAX_PAGE: u64 = 1 << 36;

/// The block sizes that the attention kernels take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernels {
    /// Any multiple of 16.
    Multiples,
    /// One size.
    Fixed(u64),
}

impl Kernels {
    pub(super) fn of(model: &Model, topology: &Topology) -> Result<Self, RulesError> {
        let latent = model.caches.iter().any(|cache| matches!(cache.sort, Sort::Latent { .. }));
        let kernels = match (OwnKernels::of(model), topology.kernel) {
            (Some(own), Some(kernel)) if own.block != u64::from(kernel) => {
                let reason = format!("its attention kernels take blocks of {} tokens", own.block);
                return Err(cannot_run(model, format!("kernel={kernel}"), reason));
            }
            (Some(own), _) => Self::Fixed(own.block),
            (None, Some(kernel)) => Self::Fixed(kernel.into()),
            (None, None) if latent => Self::Fixed(64),
            (None, None) => Self::Multiples,
        };
        if let Some(block) = topology.block
            && !u64::from(block).is_multiple_of(kernels.smallest())
        {
            let reason = match kernels {
                Self::Fixed(size) => format!("its attention kernels take blocks of {size} tokens"),
                Self::Multiples => "its attention kernels take multiples of 16".to_owned(),
            };
            return Err(cannot_run(model, format!("block={block}"), reason));
        }
        Ok(kernels)
    }

    pub(super) fn smallest(&self) -> u64 {
        match self {
            Self::Multiples => 16,
            Self::Fixed(size) => *size,
        }
    }
}

/// A family with attention kernels of its own.
pub(super) struct OwnKernels {
    family: &'static str,
    /// The one block size that they take.
    block: u64,
    /// The layouts that they take, the preferred one first: pages of several sizes lie side by side in
    /// a block.
    pub(super) layouts: [Layout; 2],
    /// By the type of cache that they take: bytes of a latent that stays, and of its scales. `fp8` is
    /// their name for what they prefer.
    pub(super) records: &'static [(CacheType, (u32, u32))],
}

const OWN_KERNELS: [OwnKernels; 2] = [
    OwnKernels {
        family: "deepseek_v4",
        block: 256,
        layouts: [Layout::Blhnc, Layout::Blnhc],
        records: &[(CacheType::Fp8DsMla, (576, 8))],
    },
    OwnKernels {
        family: "deepseek_v41",
        block: 128,
        layouts: [Layout::Blhnc, Layout::Blnhc],
        records: &[(CacheType::Fp8DsMla, (512, 16)), (CacheType::Nvfp4DsMla, (256, 32))],
    },
];

impl OwnKernels {
    pub(super) fn of(model: &Model) -> Option<&'static Self> {
        OWN_KERNELS.iter().find(|own| own.family == model.family)
    }

    /// The type of cache that they take where none is asked for: the one that the model's records are named
    /// after.
    pub(super) fn preferred(&self, model: &Model) -> CacheType {
        let mut formats =
            model.caches.iter().flat_map(Cache::states).map(|state| &state.kind.format.name);
        let types = || self.records.iter().map(|(kv, _)| *kv);
        let named = formats.find_map(|name| types().find(|kv| name.starts_with(kv.name())));
        named.unwrap_or(self.records[0].0)
    }
}

/// What one layer asks of the pool on one rank; the same on every tensor-parallel rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Spec {
    /// Index of the layer among the model's caches.
    pub(super) cache: usize,
    /// What must be equal for two layers to share a block table.
    pub(super) class: Class,
}

/// Everything but the layer's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Class {
    pub(super) sort: Sort,
    /// Tokens in a block; zero for states of a fixed size.
    pub(super) block: u64,
    /// Tokens that one entry stands for.
    rate: u64,
    /// Heads that a rank keeps; one where there are none.
    pub(super) heads: u64,
    /// Bytes of one head and token, or of all states together.
    pub(super) content: u64,
    /// Shapes and formats on a rank.
    shapes: Vec<(Vec<u64>, Format)>,
    /// Bytes of a block, where it is padded.
    pub(super) padded: Option<u64>,
}

impl Spec {
    /// Bytes of a block without padding.
    pub(super) fn dense(&self) -> u64 {
        let class = &self.class;
        if class.sort.is_recurrent() {
            class.content
        } else {
            class.heads * self.entries() * class.content
        }
    }

    /// Entries in a block; one for states of a fixed size.
    pub(super) fn entries(&self) -> u64 {
        if self.class.sort.is_recurrent() { 1 } else { self.class.block / self.class.rate }
    }

    /// Bytes of a block.
    pub(super) fn page(&self) -> u64 {
        self.class.padded.unwrap_or_else(|| self.dense())
    }
}

/// The specs of all layers, in the order in which the engine meets them.
pub(super) fn specs(
    model: &Model,
    topology: &Topology,
    kernels: &Kernels,
) -> Result<Vec<Spec>, RulesError> {
    let mut specs: Vec<Spec> = model
        .caches
        .iter()
        .enumerate()
        .map(|(cache, kept)| Spec { cache, class: class(kept, topology) })
        .collect();
    let block = block_size(&specs, topology, kernels);
    let states = specs.iter().filter(|spec| is_fitted(&spec.class.sort));
    let is_hybrid = states.clone().count() > 0 && states.clone().count() < specs.len();
    let counted = |spec: &Spec| counted_bytes(&model.caches[spec.cache], topology);
    let largest_state = states.map(counted).max().unwrap_or(0);
    let first = specs.iter().find(|spec| !spec.class.sort.is_recurrent());
    let token = first.map_or(0, |spec| spec.class.heads * spec.class.content);
    let block =
        if is_hybrid { hybrid_block(&specs, block, token, largest_state, kernels) } else { block };
    for spec in &mut specs {
        let cache = &model.caches[spec.cache];
        match spec.class.sort {
            // The platform pads states to the attention page that it aligned to them.
            Sort::Recurrent(_) if is_hybrid && is_fitted(&spec.class.sort) => {
                let page = block * token;
                spec.class.padded = Some(page).filter(|_| page != largest_state);
            }
            Sort::Recurrent(_) => {}
            // A sliding window takes the largest block that its kernels can run unsplit.
            Sort::Attention { window: Some(_) } => {
                spec.class.block = match kernels {
                    Kernels::Multiples => block,
                    Kernels::Fixed(size) => *size,
                };
            }
            _ => spec.class.block = cache.block.unwrap_or(block),
        }
        if let Some(align) = cache.align {
            let page = spec.dense().next_multiple_of(align);
            spec.class.padded = Some(page).filter(|page| *page != spec.dense());
        }
        let page = spec.page();
        if page < spec.dense() {
            let reason = "the columns for speculative tokens do not fit in the page".to_owned();
            return Err(cannot_run(model, format!("spec={}", topology.spec), reason));
        }
        if page > MAX_PAGE {
            let reason = format!("a layer's block would have {page} bytes");
            return Err(cannot_run(model, format!("block={block}"), reason));
        }
    }
    Ok(specs)
}

fn class(cache: &Cache, topology: &Topology) -> Class {
    let tp = u64::from(topology.tp);
    let mut shapes = vec![];
    let (mut heads, mut content) = (1, 0);
    for tensor in &cache.tensors {
        for state in &tensor.states {
            // Every rank holds as much as the first one.
            let held = state.held(0, tp);
            let mut shape: Vec<u64> = held.0.iter().map(kvferry_layout::Span::len).collect();
            if tensor.packing == (Packing::Convolution { grows: true }) {
                shape[1] += u64::from(topology.spec);
            }
            let elements: u64 = shape.iter().product();
            let mut bytes = elements * u64::from(state.kind.format.bytes);
            if let Sort::Attention { .. } = cache.sort {
                heads = shape[0];
                bytes /= heads;
            }
            content += bytes;
            shapes.push((shape, state.kind.format.clone()));
        }
    }
    let (sort, rate) = (cache.sort.clone(), cache.tokens_per_entry());
    Class { sort, block: 0, rate, heads, content, shapes, padded: None }
}

/// Kinds of states of a fixed size that have a block of their own, to which the engine fits no others.
pub(super) const OWN_BLOCK: [&str; 1] = ["ring"];

/// Whether the engine makes attention blocks as large as it.
fn is_fitted(sort: &Sort) -> bool {
    matches!(sort, Sort::Recurrent(kind) if !OWN_BLOCK.contains(&kind.word()))
}

/// Kinds whose columns for speculative tokens the engine forgets when it fits blocks to states: the
/// shape that it computes from the model's configuration has none, while the layer itself asks for
/// them.
const FORGETS_SPARE: [&str; 1] = ["short conv"];

/// Bytes of a state as the engine counts them when it fits blocks to states.
fn counted_bytes(cache: &Cache, topology: &Topology) -> u64 {
    let without = Topology { spec: 0, ..topology.clone() };
    match &cache.sort {
        Sort::Recurrent(kind) if FORGETS_SPARE.contains(&kind.word()) => {
            class(cache, &without).content
        }
        _ => class(cache, topology).content,
    }
}

/// The block size that is asked for, or else the smallest that the kernels take.
fn block_size(specs: &[Spec], topology: &Topology, kernels: &Kernels) -> u64 {
    match (topology.block, kernels) {
        (Some(block), _) => block.into(),
        (None, Kernels::Fixed(size))
            if specs.iter().any(|spec| !spec.class.sort.is_recurrent()) =>
        {
            *size
        }
        (None, _) => 16,
    }
}

/// The block size of a model with both attention and states: the smallest whose attention page is at
/// least as large as the largest state.
fn hybrid_block(specs: &[Spec], block: u64, token: u64, state: u64, kernels: &Kernels) -> u64 {
    let latent = specs.iter().any(|spec| matches!(spec.class.sort, Sort::Latent { .. }));
    let smallest = kernels.smallest();
    let mut align = smallest.max(block);
    if latent {
        align = align.max(128);
    }
    let fitting = align * state.div_ceil(align * token);
    block.max(fitting.next_multiple_of(smallest))
}
