//! From manifests to a plan.

use std::collections::HashMap;

use kvferry_layout::{Law, Manifest, Window};

use crate::cluster::{Cluster, Key, clusters};
use crate::cover::{self, Part, cover};
use crate::incompatible::Incompatible;
use crate::nest::{BothSteps, Loop, Nest, Steps};
use crate::prove::prove;
use crate::walk::{Holding, Rhythm};

/// What one destination rank does to take over a request from another engine, compiled once per pair
/// of engines. Its size grows with the number of layers, never with the number of blocks.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) parts: Vec<Part>,
    pub(crate) rhythms: Vec<Rhythm>,
    /// For every source rank.
    pub(crate) sources: Vec<Vec<Cluster>>,
    /// What the parts leave of the destination's pieces: their `rhythm` is an index into `leftovers`.
    pub(crate) rest: Vec<Cluster>,
    pub(crate) leftovers: Vec<Leftover>,
    pub(crate) groups: Vec<DestinationGroup>,
    /// Groups of the source engine.
    pub(crate) source_groups: usize,
    /// The source tables that are read, for which destination group, and whether for one slot.
    pub(crate) reads: Vec<SourceTable>,
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

/// What is left of a destination group's blocks once a request is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Leftover {
    /// Entries of a piece that are neither copied nor held already.
    Entries(Law, Holding),
    /// All of a group's blocks that hold any such entry.
    Blocks { group: usize },
}

/// What a request is checked against.
#[derive(Clone, Debug)]
pub(crate) struct DestinationGroup {
    pub(crate) blocks: u32,
    pub(crate) null_block: Option<u32>,
    pub(crate) one_slot: bool,
    pub(crate) window: Window,
    pub(crate) pool: usize,
    /// The distinct ways in which its pieces are held; empty where the rank has none.
    pub(crate) holdings: Vec<(Law, Holding)>,
}

impl Plan {
    /// Compiles the plan of `destination`. `sources` are the ranks of the engine that is read, in any
    /// number and order: those that hold nothing of use are not read.
    pub fn compile(destination: &Manifest, sources: &[&Manifest]) -> Result<Self, Incompatible> {
        for source in sources {
            check_identity(destination, source)?;
        }
        let parts = cover(destination, sources, &mut cover::Steps::new())?;
        prove(destination, sources, &parts, &mut cover::Steps::new())?;

        let mut rhythms = Numbered::default();
        let mut nests: Vec<Vec<(Key, Nest)>> = vec![vec![]; sources.len()];
        for part in &parts {
            let source = sources[part.source];
            let from = &source.groups()[part.from.0].pieces[part.from.1];
            let to = &destination.groups()[part.to.0].pieces[part.to.1];
            let (source_holding, source_steps) = holding(source, part.from);
            let (destination_holding, destination_steps) = holding(destination, part.to);
            let kind = destination.kind(to);
            let rhythm = rhythms.number(Rhythm {
                law: kind.law,
                phase: part.phase,
                source: source_holding,
                destination: destination_holding,
            });
            let start = |manifest: &Manifest, piece: &kvferry_layout::Piece| {
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
            let key = Key { group: part.to.0, rhythm, regions, blocks };
            nests[part.source].push((key, nest));
        }
        let rhythms = rhythms.list;
        let mut reads = Numbered::default();
        for rhythm in &rhythms {
            let Holding { group, blocks, null_block, .. } = rhythm.source;
            let one_slot = rhythm.law.entries == 0;
            let destination_group = rhythm.destination.group;
            reads.number(SourceTable { group, blocks, null_block, one_slot, destination_group });
        }
        let repeated =
            |key: &Key| several_blocks(rhythms[key.rhythm].law, &rhythms[key.rhythm].destination);
        let evenly = |key: &Key| {
            let rhythm = &rhythms[key.rhythm];
            rhythm.source.even.min(rhythm.destination.even)
        };
        let sources_clusters =
            nests.into_iter().map(|nests| clusters(nests, &repeated, &evenly)).collect();

        let (leftovers, rest) = leftovers(destination);
        let repeated = |key: &Key| match &leftovers[key.rhythm] {
            Leftover::Entries(law, held) => several_blocks(*law, held),
            Leftover::Blocks { group } => destination.groups()[*group].blocks > 1,
        };
        let evenly = |key: &Key| match &leftovers[key.rhythm] {
            Leftover::Entries(_, held) => held.even,
            Leftover::Blocks { .. } => 1,
        };
        let rest = clusters(rest, &repeated, &evenly);

        let groups = (0..destination.groups().len()).map(|group| facts(destination, group));
        let plan = Self {
            rhythms,
            sources: sources_clusters,
            rest,
            groups: groups.collect(),
            leftovers,
            source_groups: sources.iter().map(|source| source.groups().len()).max().unwrap_or(0),
            reads: reads.list,
            parts,
        };
        plan.check_merging(destination)?;
        Ok(plan)
    }

    /// Which part of which destination piece comes from where.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Number of source ranks that the plan was compiled for.
    pub fn source_count(&self) -> usize {
        self.sources.len()
    }

    /// Whether anything is read from a source rank.
    pub fn reads(&self, source: usize) -> bool {
        self.sources.get(source).is_some_and(|clusters| !clusters.is_empty())
    }

    /// Merging nests must neither lose nor invent a byte.
    fn check_merging(&self, destination: &Manifest) -> Result<(), Incompatible> {
        let mut before = vec![0u128; self.sources.len()];
        for part in &self.parts {
            let piece = &destination.groups()[part.to.0].pieces[part.to.1];
            let bytes = u128::from(destination.kind(piece).format.bytes);
            before[part.source] += bytes * u128::from(part.bounds.volume());
        }
        for (source, clusters) in self.sources.iter().enumerate() {
            let nests = clusters.iter().flat_map(|cluster| {
                let outer: u64 = cluster.outer.iter().map(|repeat| repeat.count).product();
                cluster.nests.iter().map(move |nest| u128::from(nest.bytes() * outer))
            });
            let after: u128 = nests.sum();
            if after != before[source] {
                return Err(Incompatible::Unproven {
                    state: "all".to_owned(),
                    problem: format!(
                        "the parts from source {source} have {} bytes, merged {after}",
                        before[source]
                    ),
                });
            }
        }
        Ok(())
    }
}

fn check_identity(destination: &Manifest, source: &Manifest) -> Result<(), Incompatible> {
    let (ours, theirs) = (destination.identity(), source.identity());
    let differing =
        ours.keys().chain(theirs.keys()).find(|&fact| ours.get(fact) != theirs.get(fact));
    match differing {
        None => Ok(()),
        Some(fact) => Err(Incompatible::Identity {
            fact: fact.clone(),
            source_rank: cover::rank_name(source),
            source_value: theirs.get(fact).cloned(),
            destination_value: ours.get(fact).cloned(),
        }),
    }
}

fn holding(manifest: &Manifest, (group, piece): (usize, usize)) -> (Holding, Steps) {
    let facts = &manifest.groups()[group];
    let held = &facts.pieces[piece];
    let entries = manifest.entries_per_block(group, piece);
    Holding::new(group, facts, entries, held.phase, &held.view)
}

/// Whether a request's entries can lie in more than one block.
fn several_blocks(law: Law, held: &Holding) -> bool {
    law.entries > 0 && u64::from(held.blocks) * held.split > 1
}

fn facts(destination: &Manifest, index: usize) -> DestinationGroup {
    let group = &destination.groups()[index];
    let mut holdings = Numbered::default();
    for (number, piece) in group.pieces.iter().enumerate() {
        holdings.number((destination.kind(piece).law, holding(destination, (index, number)).0));
    }
    DestinationGroup {
        blocks: group.blocks,
        null_block: group.null_block,
        one_slot: group.tokens_per_block.is_none(),
        window: group.window,
        pool: destination.pool(index),
        holdings: holdings.list,
    }
}

/// The destination's own pieces and scratch as nests from it to itself.
fn leftovers(destination: &Manifest) -> (Vec<Leftover>, Vec<(Key, Nest)>) {
    let mut leftovers = Numbered::default();
    let mut nests = vec![];
    for (index, group) in destination.groups().iter().enumerate() {
        let both = |count, stride| Loop { count, source: stride, destination: stride };
        let mut add = |rhythm, (region, offset): (u32, u64), steps: Steps, run, loops| {
            let start = destination.regions()[region as usize].base + offset;
            let (regions, blocks) = ((region, region), (steps.block, steps.block));
            let steps = BothSteps { source: steps, destination: steps };
            let nest = Nest::new((start, start), steps, run, loops);
            nests.push((Key { group: index, rhythm, regions, blocks }, nest));
        };
        for (number, piece) in group.pieces.iter().enumerate() {
            let (held, steps) = holding(destination, (index, number));
            let (kind, view) = (destination.kind(piece), &piece.view);
            let rhythm = leftovers.number(Leftover::Entries(kind.law, held));
            let loops = piece.bounds.0.iter().zip(&view.axes);
            let loops = loops.map(|(span, &stride)| both(span.len(), stride)).collect();
            add(rhythm, (view.region, view.offset), steps, kind.format.bytes.into(), loops);
        }
        for scratch in &group.scratch {
            let rhythm = leftovers.number(Leftover::Blocks { group: index });
            let loops = scratch.dims.iter().map(|&(count, stride)| both(count, stride)).collect();
            let steps = Steps { block: scratch.block, ..Steps::default() };
            add(rhythm, (scratch.region, scratch.offset), steps, scratch.run, loops);
        }
    }
    (leftovers.list, nests)
}

/// Distinct values, numbered in the order of their first appearance.
struct Numbered<T> {
    list: Vec<T>,
    numbers: HashMap<T, usize>,
}

impl<T> Default for Numbered<T> {
    fn default() -> Self {
        Self { list: vec![], numbers: HashMap::new() }
    }
}

impl<T: Clone + Eq + std::hash::Hash> Numbered<T> {
    fn number(&mut self, value: T) -> usize {
        *self.numbers.entry(value.clone()).or_insert_with(|| {
            self.list.push(value);
            self.list.len() - 1
        })
    }
}
