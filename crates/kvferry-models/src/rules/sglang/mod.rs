//! Where SGLang 0.5.23 puts a model's states, and what its own transfer back ends do with a pair ([`verdict`]).
//!
//! A pool for all layers that keep something of each token, one of its own for those with a window, and one of slots for
//! recurrent states; token by token, keys apart from values. What a [`Topology`] says of `block` is the page size; without it a
//! page has one token, as without `--page-size`.

pub mod verdict;

use kvferry_layout::{
    Draft, Group, Kind, Manifest, Phase, Piece, Place, Region, Span, View, Window,
};

use crate::error::RulesError;
use crate::model::{Cache, Model, Packing, Sort, State, Tensor};
use crate::rules::topology::Topology;

/// The engine's name in messages.
pub const ENGINE: &str = "SGLang 0.5";

/// Families whose layers with a window share the pool of those without.
const ONE_POOL: [&str; 7] =
    ["gemma2", "gemma3", "gemma3_text", "olmo2", "olmo3", "exaone4", "exaone4_5"];

/// The manifest of every rank, in the order of their numbers. Addresses are made up.
pub fn manifests(
    model: &Model,
    topology: &Topology,
    engine: &str,
) -> Result<Vec<Manifest>, RulesError> {
    let refuse = |setting: String, reason: String| {
        Err(RulesError::CannotRun { engine: ENGINE, model: model.name.clone(), setting, reason })
    };
    for limit in &model.limits {
        if let Some(reason) = limit.refuses(topology.tp.into()) {
            return refuse(format!("tp={}", topology.tp), reason);
        }
    }
    let said = [
        ("kernel", topology.kernel.is_some()),
        ("layout", topology.layout.is_some()),
        ("conv", topology.conv.is_some()),
        ("spec", topology.spec > 0),
        ("pcp", topology.pcp > 1),
        ("dcp", topology.dcp > 1),
        ("kv", topology.kv.is_some()),
    ];
    if let Some((key, _)) = said.iter().find(|(_, said)| *said) {
        return refuse((*key).to_owned(), "it is not described for this engine".to_owned());
    }
    let undescribed = |cache: &&Cache| match cache.sort {
        Sort::Latent { indexed, window } => indexed || window.is_some(),
        Sort::Indexer => true,
        _ => cache.tensors.iter().any(|tensor| tensor.packing == Packing::Planes),
    };
    if let Some(cache) = model.caches.iter().find(undescribed) {
        let sort = cache.sort.word();
        return refuse("its pools".to_owned(), format!("those of {sort} layers are not described"));
    }
    let stage_of = |cache: &Cache| stage(model.layers, topology.pp, cache.layer);
    let mut ranks = vec![];
    for (number, tp) in (0..topology.pp).flat_map(|pp| (0..topology.tp).map(move |tp| (pp, tp))) {
        let label = match topology.pp {
            1 => format!("tp{tp}"),
            _ => format!("pp{number} tp{tp}"),
        };
        let caches: Vec<&Cache> =
            model.caches.iter().filter(|cache| stage_of(cache) == number).collect();
        let mut rank = Rank { topology, tp, kinds: vec![], bytes: 0 };
        let groups = pools(model).into_iter().map(|pool| rank.group(&caches, pool)).collect();
        let (rank_number, bytes) = (number * topology.tp + tp, rank.bytes);
        ranks.push(Draft {
            identity: model.identity(),
            engine: engine.to_owned(),
            rank: rank_number,
            label,
            regions: vec![Region {
                base: (1 + u64::from(rank_number)) << 48,
                bytes,
                place: Place::Gpu(rank_number),
            }],
            kinds: rank.kinds,
            writers: Default::default(),
            groups,
        });
    }
    let made = ranks.into_iter().map(|draft| {
        Manifest::new(draft)
            .map_err(|problem| RulesError::Unsound { model: model.name.clone(), problem })
    });
    made.collect()
}

/// The stage of a layer: as even as can be, what is left over going to the first stages.
fn stage(layers: u32, stages: u32, layer: u32) -> u32 {
    let (each, left) = (layers / stages, layers % stages);
    let longer = left * (each + 1);
    match layer < longer || each == 0 {
        true => layer / (each + 1),
        false => left + (layer - longer) / each,
    }
}

/// What shares a table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pool {
    Tokens,
    Window(u64),
    Slots,
}

impl Pool {
    fn of(model: &Model, cache: &Cache) -> Self {
        match (cache.sort.is_recurrent(), cache.sort.window()) {
            (true, _) => Self::Slots,
            (false, Some(window)) if !ONE_POOL.contains(&model.family.as_str()) => {
                Self::Window(window)
            }
            _ => Self::Tokens,
        }
    }
}

/// The pools of a model, with what each holds.
fn pools(model: &Model) -> Vec<(Pool, Vec<&Cache>)> {
    let mut pools: Vec<(Pool, Vec<&Cache>)> = vec![];
    for cache in &model.caches {
        let pool = Pool::of(model, cache);
        match pools.iter_mut().find(|(known, _)| *known == pool) {
            Some((_, held)) => held.push(cache),
            None => pools.push((pool, vec![cache])),
        }
    }
    pools
}

struct Rank<'a> {
    topology: &'a Topology,
    tp: u32,
    kinds: Vec<Kind>,
    /// Of its memory, so far.
    bytes: u64,
}

impl Rank<'_> {
    /// One pool's part of this rank: `here` are the layers of its stage.
    fn group(&mut self, here: &[&Cache], (pool, caches): (Pool, Vec<&Cache>)) -> Group {
        let page = match pool {
            Pool::Slots => None,
            _ => Some(u64::from(self.topology.block.unwrap_or(1))),
        };
        let (name, window) = match pool {
            Pool::Tokens => ("tokens", Window::FULL),
            Pool::Window(tokens) => ("window", Window::sliding(tokens)),
            Pool::Slots => ("slots", Window::FULL),
        };
        let blocks = self.topology.blocks.unwrap_or(DEFAULT_BLOCKS);
        let mut pieces = vec![];
        for cache in
            caches.into_iter().filter(|cache| here.iter().any(|it| std::ptr::eq(*it, *cache)))
        {
            for tensor in &cache.tensors {
                self.tensor(cache, tensor, page, blocks, &mut pieces);
            }
        }
        Group {
            name: name.to_owned(),
            blocks,
            null_block: Some(0),
            tokens_per_block: page,
            window,
            pieces,
            scratch: vec![],
        }
    }

    /// The sections of a convolution lie in one allocation, and every other state in one of its own.
    fn tensor(
        &mut self,
        cache: &Cache,
        tensor: &Tensor,
        page: Option<u64>,
        blocks: u32,
        pieces: &mut Vec<Piece>,
    ) {
        let (rank, ranks) = (u64::from(self.tp), u64::from(self.topology.tp));
        let convolution = matches!(tensor.packing, Packing::Convolution { .. });
        // Columns first in KDA alone.
        let by_column = convolution && cache.sort.word() == "kda";
        let together = if convolution { tensor.states.len() } else { 1 };
        for states in tensor.states.chunks(together) {
            let rows = |state: &State| state.held(rank, ranks).0[0].len();
            let all: u64 = states.iter().map(rows).sum();
            let mut offset = self.bytes;
            let mut block = 0;
            for state in states {
                let held = state.held(rank, ranks);
                let size = u64::from(state.kind.format.bytes);
                let lengths: Vec<u64> = held.0.iter().map(Span::len).collect();
                let row = lengths[1..].iter().product::<u64>() * size;
                block = all * row * page.unwrap_or(1);
                let (axes, section) = match by_column {
                    true => (vec![size, all * size], lengths[0] * size),
                    false => (strides(&lengths, size), lengths[0] * row),
                };
                let entry = if page.is_some() { all * row } else { 0 };
                pieces.push(Piece {
                    state: state.name.clone(),
                    kind: self.kind(&state.kind),
                    bounds: held,
                    phase: Phase::ALL,
                    need: None,
                    view: View { region: 0, offset, block, kernel: None, entry, axes },
                });
                offset += section;
            }
            self.bytes += block * u64::from(blocks);
        }
    }

    fn kind(&mut self, kind: &Kind) -> u32 {
        let known = self.kinds.iter().position(|known| known == kind);
        let index = known.unwrap_or_else(|| {
            self.kinds.push(kind.clone());
            self.kinds.len() - 1
        });
        u32::try_from(index).expect("a model has few kinds of states")
    }
}

/// Of elements that follow each other, in bytes.
fn strides(lengths: &[u64], size: u64) -> Vec<u64> {
    let inner = |axis: usize| lengths[axis + 1..].iter().product::<u64>() * size;
    (0..lengths.len()).map(inner).collect()
}

/// Pages of each pool, where the topology does not say.
const DEFAULT_BLOCKS: u32 = 1 << 20;
