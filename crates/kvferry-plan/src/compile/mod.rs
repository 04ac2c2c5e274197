//! From manifests to a plan.

mod cover;
mod interner;
mod merge;
mod prove;
mod readers;
mod series;
mod spread;
mod unwritten;

use kvferry_layout::{Law, Manifest, Piece, Window};

pub use cover::Part;
pub(crate) use merge::{Merged, append_neighbours};
pub(crate) use unwritten::Unwritten;

use crate::incompatible::Incompatible;
use crate::nest::{BothSteps, Loop, Nest};
use crate::walk::{BlockLayout, Pairing};
use cover::{Budget, Cover, cover};
use interner::Interner;
use merge::{Key, merge};
use prove::{Claims, prove_cover, prove_merging};
pub use spread::Spread;
use spread::spread;
use unwritten::unwritten;

/// What one destination rank does to take over a request from another engine, compiled once per pair
/// of engines. Its size grows with the number of layers, never with the number of blocks.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) parts: Vec<Part>,
    pub(crate) pairings: Vec<Pairing>,
    /// For every source rank.
    pub(crate) sources: Vec<Vec<Merged>>,
    /// What the parts leave of the destination's pieces: their `pairing` is an index into `unwritten`.
    pub(crate) rest: Vec<Merged>,
    pub(crate) unwritten: Vec<Unwritten>,
    pub(crate) groups: Vec<DestinationGroup>,
    /// Groups of the source engine.
    pub(crate) source_groups: usize,
    /// The source tables that are read, for which destination group, and whether for one slot.
    pub(crate) reads: Vec<SourceTable>,
    pub(crate) windowed: Vec<(usize, usize)>,
    /// For every source rank: whether it holds something of use.
    pub(crate) holds: Vec<bool>,
}

/// What a source's table is checked against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SourceTable {
    pub(crate) group: usize,
    pub(crate) blocks: u32,
    pub(crate) null_block: Option<u32>,
    pub(crate) one_slot: bool,
    pub(crate) destination_group: usize,
}

/// What a request is checked against.
#[derive(Clone, Debug)]
pub(crate) struct DestinationGroup {
    pub(crate) blocks: u32,
    pub(crate) null_block: Option<u32>,
    pub(crate) one_slot: bool,
    pub(crate) pool: usize,
    /// The distinct ways in which its pieces are held; empty where the rank has none.
    pub(crate) layouts: Vec<(Law, BlockLayout)>,
}

impl Plan {
    /// Compiles the plan of `destination`. `sources` are the ranks of the engine that is read, in any
    /// number and order: those that hold nothing of use are not read.
    pub fn compile(destination: &Manifest, sources: &[&Manifest]) -> Result<Self, Incompatible> {
        Self::compile_spread(destination, sources, Spread::default())
    }

    /// Like [`compile`](Self::compile), and says how what several source ranks hold is shared among them.
    pub fn compile_spread(
        destination: &Manifest,
        sources: &[&Manifest],
        how: Spread,
    ) -> Result<Self, Incompatible> {
        Self::compile_apart(destination, sources, how, &|_| 0)
    }

    /// Like [`compile_spread`](Self::compile_spread), where what goes to pieces (by group and index) of different layers
    /// is never merged.
    pub(crate) fn compile_by_layer(
        destination: &Manifest,
        sources: &[&Manifest],
        how: Spread,
        layer: &dyn Fn((usize, usize)) -> usize,
    ) -> Result<Self, Incompatible> {
        Self::compile_apart(destination, sources, how, layer)
    }

    fn compile_apart(
        destination: &Manifest,
        sources: &[&Manifest],
        how: Spread,
        layer: &dyn Fn((usize, usize)) -> usize,
    ) -> Result<Self, Incompatible> {
        for source in sources {
            check_identity(destination, source)?;
        }
        let budget = &mut Budget::new();
        let (mut cover, wanted) = cover(destination, sources, budget)?;
        spread(destination, sources, &wanted, how, &mut cover.parts, budget)?;
        let mut holds = vec![false; sources.len()];
        wanted.iter().flat_map(|want| &want.offers).for_each(|offer| holds[offer.source] = true);
        prove_cover(destination, sources, &cover, &mut Budget::new())?;
        let (pairings, nests) = nests(destination, sources, &cover, layer);
        let mut reads = Interner::default();
        for pairing in &pairings {
            let BlockLayout { group, blocks, null_block, .. } = pairing.source;
            let one_slot = pairing.law.entries == 0;
            let destination_group = pairing.destination.group;
            reads.number(SourceTable { group, blocks, null_block, one_slot, destination_group });
        }
        let nests_by_source: Vec<_> = nests.into_iter().map(merge).collect();

        let (unwritten, rest) = unwritten(destination, &cover.windows);
        let rest = merge(rest);

        let groups = (0..destination.groups().len())
            .map(|group| facts(destination, group, &cover.windows[group]));
        let claims = Claims {
            cover: &cover,
            pairings: &pairings,
            sources: &nests_by_source,
            unwritten: &unwritten,
            rest: &rest,
        };
        prove_merging(destination, sources, &claims)?;
        Ok(Self {
            groups: groups.collect(),
            source_groups: sources.iter().map(|source| source.groups().len()).max().unwrap_or(0),
            reads: reads.list,
            windowed: windowed(destination, &cover.windows),
            pairings,
            sources: nests_by_source,
            rest,
            unwritten,
            parts: cover.parts,
            holds,
        })
    }

    /// Which part of which destination piece comes from where.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Number of source ranks that the plan was compiled for.
    pub fn source_count(&self) -> usize {
        self.sources.len()
    }

    /// Group and index of the destination pieces that get less than their group keeps, because the
    /// source keeps no more: only what the model looks back at after the whole request. A block that
    /// holds such a piece must not serve as the cached prefix of another, shorter request.
    pub fn windowed(&self) -> &[(usize, usize)] {
        &self.windowed
    }

    /// Whether a source rank holds anything that the destination needs, whether it is read from it or from others
    /// that hold the same.
    pub fn holds(&self, source: usize) -> bool {
        self.holds.get(source).is_some_and(|holds| *holds)
    }

    /// Whether anything is read from a source rank.
    pub fn reads(&self, source: usize) -> bool {
        self.sources.get(source).is_some_and(|nests| !nests.is_empty())
    }
}

/// The parts as nests, for every source rank, and the pairings that they name.
fn nests(
    destination: &Manifest,
    sources: &[&Manifest],
    cover: &Cover,
    layer: &dyn Fn((usize, usize)) -> usize,
) -> (Vec<Pairing>, Vec<Vec<(Key, Nest)>>) {
    let mut pairings = Interner::default();
    let mut nests: Vec<Vec<(Key, Nest)>> = vec![vec![]; sources.len()];
    for part in &cover.parts {
        let source = sources[part.source];
        let from = &source.groups()[part.from.0].pieces[part.from.1];
        let to = &destination.groups()[part.to.0].pieces[part.to.1];
        let kept = source.groups()[part.from.0].window;
        let (source_holding, source_steps) = BlockLayout::new(source, part.from, kept);
        let window = cover.windows[part.to.0][part.to.1];
        let (destination_holding, destination_steps) =
            BlockLayout::new(destination, part.to, window);
        let kind = destination.kind(to);
        let pairing = pairings.number(Pairing {
            law: kind.law,
            phase: part.phase,
            source: source_holding,
            destination: destination_holding,
        });
        let start = |manifest: &Manifest, piece: &Piece| {
            let view = &piece.view;
            let inner = part.bounds.0.iter().zip(&piece.bounds.0).zip(&view.axes);
            let inner = inner.map(|((part, held), stride)| (part.start - held.start) * stride);
            manifest.regions()[view.region as usize].base + view.offset + inner.sum::<u64>()
        };
        let strides = from.view.axes.iter().zip(&to.view.axes);
        let loops = part.bounds.0.iter().zip(strides).map(|(span, strides)| Loop {
            count: span.len(),
            source: *strides.0,
            destination: *strides.1,
        });
        let steps = BothSteps { source: source_steps, destination: destination_steps };
        let nest = Nest::new(
            (start(source, from), start(destination, to)),
            steps,
            u64::from(kind.format.bytes),
            loops.collect(),
        );
        let regions = (from.view.region, to.view.region);
        let blocks = (source_steps.block, destination_steps.block);
        let key = Key { group: part.to.0, pairing, regions, blocks, layer: layer(part.to) };
        nests[part.source].push((key, nest));
    }
    (pairings.list, nests)
}

/// The pieces of which less is copied than their group keeps.
fn windowed(destination: &Manifest, windows: &[Vec<Window>]) -> Vec<(usize, usize)> {
    let groups = destination.groups().iter().zip(windows).enumerate();
    let pieces = groups.flat_map(|(group, (facts, windows))| {
        let less = windows.iter().enumerate().filter(|(_, window)| **window != facts.window);
        let less =
            less.filter(|(piece, _)| destination.kind(&facts.pieces[*piece]).law.entries > 0);
        less.map(move |(piece, _)| (group, piece))
    });
    pieces.collect()
}

/// Facts of a manifest's identity that are compared where both sides state them: engines of earlier releases do not, weights
/// cannot always be looked into, and the engine matters for some models alone. What only one side says of another fact is a
/// difference.
const COMPARED_WHERE_STATED: [&str; 3] = ["num_kv_shared_layers", "weights", "engine"];

fn check_identity(destination: &Manifest, source: &Manifest) -> Result<(), Incompatible> {
    let (ours, theirs) = (destination.identity(), source.identity());
    let differs = |fact: &&String| match (ours.get(*fact), theirs.get(*fact)) {
        (Some(ours), Some(theirs)) => ours != theirs,
        _ => !COMPARED_WHERE_STATED.contains(&fact.as_str()),
    };
    match ours.keys().chain(theirs.keys()).find(differs) {
        None => Ok(()),
        Some(fact) => Err(Incompatible::Identity {
            fact: fact.clone(),
            source_rank: cover::rank_name(source),
            source_value: theirs.get(fact).cloned(),
            destination_value: ours.get(fact).cloned(),
        }),
    }
}

fn facts(destination: &Manifest, index: usize, windows: &[Window]) -> DestinationGroup {
    let group = &destination.groups()[index];
    let mut layouts = Interner::default();
    for (number, piece) in group.pieces.iter().enumerate() {
        let (held, _) = BlockLayout::new(destination, (index, number), windows[number]);
        layouts.number((destination.kind(piece).law, held));
    }
    DestinationGroup {
        blocks: group.blocks,
        null_block: group.null_block,
        one_slot: group.tokens_per_block.is_none(),
        pool: destination.pool(index),
        layouts: layouts.list,
    }
}
