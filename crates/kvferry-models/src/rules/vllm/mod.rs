//! The page rules of vLLM 0.32: which layers share a block table, how large a block is, and at which
//! bytes every state of every block lies.
//!
//! Nothing is measured here and nothing is asked of an engine: the same numbers come out that
//! `get_kv_cache_groups`, `get_kv_cache_configs` and the hybrid block alignment of vLLM compute for the
//! same inputs. The repository's tests compare the two.
//!
//! What a [`Topology`] leaves out is chosen as follows. Blocks have 16 tokens, and the attention
//! kernels take any multiple of 16; a model with latent attention has blocks of 64, and its kernels
//! take 64 and nothing else. A given `kernel` is a back end that takes this size only. The layout is
//! LBHNC, which vLLM's own connector asks for. Convolution states are stored columns first.

mod error;
mod group;
mod kept;
mod place;
mod pools;
mod quantised;
mod spec;
pub mod verdict;

use kvferry_layout::{Draft, Group, Manifest, Place, Region};

pub use self::error::ENGINE;
use self::error::cannot_run;
pub use self::pools::{PoolGroup, Pools};
use crate::error::RulesError;
use crate::model::{Model, Sort};
use crate::rules::topology::{Conv, Layout, Topology};

/// Blocks in a pool whose size the topology leaves open.
const DEFAULT_BLOCKS: u32 = 4096;

/// What the engine decides for a model and a topology.
pub fn pools(model: &Model, topology: &Topology) -> Result<Pools, RulesError> {
    let model = &*kept::kept(model, topology)?;
    let tp = u64::from(topology.tp);
    for limit in &model.limits {
        if let Some(reason) = limit.refuses(tp) {
            return Err(cannot_run(model, format!("tp={tp}"), reason));
        }
    }
    check_turns(model, topology)?;
    let stages = stages(model, topology)?;
    let kernels = spec::Kernels::of(model, topology)?;
    let layout = layout(model, topology)?;
    let conv = topology.conv.unwrap_or(Conv::Sd);
    let blocks = topology.blocks.unwrap_or(DEFAULT_BLOCKS);
    let specs = spec::specs(model, topology, &kernels)?;
    let specs = match topology.hma {
        true => specs,
        false => group::promote(specs)
            .map_err(|reason| cannot_run(model, "hma=off".to_owned(), reason))?,
    };
    let specs = group::group(specs, layout)
        .map_err(|reason| cannot_run(model, format!("layout={layout}"), reason))?;
    let mut groups = vec![];
    for (number, group) in specs.iter().enumerate() {
        groups.push(PoolGroup {
            name: group_name(model, group, number),
            caches: group.members.iter().map(|spec| spec.cache).collect(),
            block: group.block(),
            kernel: group.block(),
            pages: group.members.iter().map(spec::Spec::page).collect(),
        });
    }
    for block in groups.iter().filter_map(|group| group.block) {
        if topology.dcp > 1 && !block.is_multiple_of(topology.interleave.into()) {
            let reason = format!("a turn of so many tokens does not divide a block of {block}");
            return Err(cannot_run(model, format!("interleave={}", topology.interleave), reason));
        }
    }
    let mut pools = Pools { groups, layout, conv, blocks, stages, specs };
    place::check_layout(model, &pools)?;
    for number in 0..pools.groups.len() {
        let kernel = place::kernel(model, &pools, number, &kernels)?;
        pools.groups[number].kernel = kernel;
    }
    Ok(pools)
}

/// The manifest of every rank, in the order of rank numbers: stage by stage. `engine` is the engine's
/// name in messages.
///
/// Addresses are made up: every rank's pool starts at a place of its own.
pub fn manifests(
    model: &Model,
    topology: &Topology,
    engine: &str,
) -> Result<Vec<Manifest>, RulesError> {
    pools(model, topology)?.manifests(model, topology, engine)
}

impl Pools {
    /// [`manifests`], for pools that are decided already.
    pub fn manifests(
        &self,
        model: &Model,
        topology: &Topology,
        engine: &str,
    ) -> Result<Vec<Manifest>, RulesError> {
        let (pools, model) = (self, &*kept::kept(model, topology)?);
        let mut ranks = vec![];
        for stage in 0..topology.pp {
            let placed = place::stage(model, pools, stage)?;
            for (pcp, tp) in
                (0..topology.pcp).flat_map(|pcp| (0..topology.tp).map(move |tp| (pcp, tp)))
            {
                let rank = (stage * topology.pcp + pcp) * topology.tp + tp;
                let mut label = format!("tp{tp}");
                if topology.pcp > 1 {
                    label.insert_str(0, &format!("pcp{pcp} "));
                }
                if topology.pp > 1 {
                    label.insert_str(0, &format!("pp{stage} "));
                }
                // Turns go over the ranks of a prefill first, and then over those of tensors.
                let turns = u64::from(topology.dcp);
                let turn = u64::from(tp * topology.pcp + pcp) % turns;
                let mut draft = Draft {
                    identity: model.identity(),
                    engine: engine.to_owned(),
                    rank,
                    label,
                    regions: vec![Region {
                        base: (1 + u64::from(rank)) << 48,
                        bytes: placed.bytes,
                        place: Place::Gpu(rank),
                    }],
                    kinds: vec![],
                    writers: Default::default(),
                    groups: vec![],
                };
                for (number, (group, layers)) in pools.groups.iter().zip(&placed.groups).enumerate()
                {
                    let mut made = Group {
                        name: group.name.clone(),
                        blocks: pools.blocks,
                        null_block: Some(0),
                        tokens_per_block: group.block.map(|block| block * turns),
                        window: pools.specs[number].window(),
                        pieces: vec![],
                        scratch: vec![],
                    };
                    for layer in layers {
                        layer.describe(
                            model,
                            topology,
                            pools,
                            (tp, turn),
                            &mut draft.kinds,
                            &mut made,
                        );
                    }
                    draft.groups.push(made);
                }
                ranks.push(Manifest::new(draft).map_err(|problem| RulesError::Unsound {
                    model: model.name.clone(),
                    problem,
                })?);
            }
        }
        Ok(ranks)
    }
}

/// The layout that is asked for, or else the one that vLLM's own connector asks for, or that the
/// model's kernels need.
fn layout(model: &Model, topology: &Topology) -> Result<Layout, RulesError> {
    let Some(own) = spec::OwnKernels::of(model) else {
        return Ok(topology.layout.unwrap_or(Layout::Lbhnc));
    };
    match topology.layout {
        None => Ok(own.layouts[0]),
        Some(layout) if own.layouts.contains(&layout) => Ok(layout),
        Some(layout) => {
            let names: Vec<_> = own.layouts.iter().map(Layout::name).collect();
            let reason = format!("its attention kernels take {}", names.join(" or "));
            Err(cannot_run(model, format!("layout={layout}"), reason))
        }
    }
}

/// Which ranks can take turns at tokens.
fn check_turns(model: &Model, topology: &Topology) -> Result<(), RulesError> {
    let Topology { tp, pcp, dcp, .. } = *topology;
    let refuse = |reason| Err(cannot_run(model, format!("dcp={dcp}"), reason));
    if dcp == 1 {
        return Ok(());
    }
    if pcp == 1 && tp % dcp != 0 {
        return refuse(format!("it does not divide the {tp} tensor-parallel ranks"));
    }
    if pcp > 1 && dcp != pcp && dcp != tp * pcp {
        return refuse(format!(
            "ranks take turns over those of a prefill ({pcp}) or over all {}",
            tp * pcp
        ));
    }
    let attention = || model.caches.iter().filter(|cache| !cache.sort.is_recurrent());
    if attention().any(|cache| cache.sort.window().is_some()) {
        return refuse("ranks cannot take turns at the tokens of a sliding window".to_owned());
    }
    for cache in attention().filter(|cache| matches!(cache.sort, Sort::Attention { .. })) {
        let heads = cache.states().next().and_then(|state| state.split).map_or(1, |it| it.units);
        if u64::from(tp) <= heads || u64::from(dcp) > u64::from(tp) / heads {
            return refuse(format!(
                "its {heads} KV heads are on {tp} ranks: no {dcp} share a head"
            ));
        }
    }
    Ok(())
}

/// The first layer of every pipeline stage, and the end: as even as can be, what is left over going to
/// the stages before the last.
fn stages(model: &Model, topology: &Topology) -> Result<Vec<u32>, RulesError> {
    let (layers, pp) = (model.layers, topology.pp);
    let setting = || format!("pp={pp}");
    if pp > layers {
        let reason = format!("it has only {layers} layers");
        return Err(cannot_run(model, setting(), reason));
    }
    if pp > 1 && NO_PIPELINE.contains(&model.family.as_str()) {
        let reason = "its implementation there does not support pipeline stages".to_owned();
        return Err(cannot_run(model, setting(), reason));
    }
    let mut sizes = vec![layers / pp; pp as usize];
    let left = (layers % pp) as usize;
    for size in sizes.iter_mut().rev().skip(1).take(left) {
        *size += 1;
    }
    let mut starts = vec![0];
    for size in sizes {
        starts.push(starts[starts.len() - 1] + size);
    }
    let stage = |layer: u32| starts.iter().rposition(|start| *start <= layer);
    if let Some(cache) =
        model.caches.iter().find(|it| stage(it.layer) != stage(it.read_until.min(layers - 1)))
    {
        let (layer, reader) = (cache.layer, cache.read_until);
        let reason = format!("layer {reader} reads what layer {layer} keeps, on another stage");
        return Err(cannot_run(model, setting(), reason));
    }
    Ok(starts)
}

/// Families whose implementation in the engine does not support pipeline parallelism.
const NO_PIPELINE: [&str; 2] = ["mamba2", "zamba2"];

fn group_name(model: &Model, group: &group::SpecGroup, number: usize) -> String {
    let mut words: Vec<&str> = vec![];
    for member in &group.members {
        let word = model.caches[member.cache].sort.word();
        if !words.contains(&word) {
            words.push(word);
        }
    }
    format!("{number} {}", words.join("+"))
}
