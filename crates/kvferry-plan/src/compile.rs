//! From manifests to a plan.

use std::collections::HashMap;

use kvferry_layout::{Law, Manifest, Window};

use crate::cover::{Part, cover};
use crate::incompatible::Incompatible;
use crate::nest::{Loop, Nest, Steps};
use crate::prove::prove;
use crate::transfer::Fitted;
use crate::walk::{Holding, Rhythm, Segment, Shape};

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

/// Nests that are walked together, segment by segment, because the end of each touches the start of
/// the next on both sides; most often a single one.
#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    pub(crate) rhythm: usize,
    /// Indices of the regions on the source and on the destination.
    pub(crate) regions: (u32, u32),
    pub(crate) source_steps: Steps,
    pub(crate) destination_steps: Steps,
    /// Loops around the walk over the segments: what lies further apart than blocks do.
    pub(crate) outer: Vec<Loop>,
    pub(crate) nests: Vec<Nest>,
    /// The nests fitted to whole blocks, the shape of most segments.
    pub(crate) usual: (Shape, Vec<Fitted>),
}

impl Cluster {
    /// Moves a place in block 0 to the blocks of a segment.
    #[inline(always)]
    pub(crate) fn at_blocks(&self, start: (u64, u64), segment: &Segment) -> (u64, u64) {
        let source = u64::from(segment.source).wrapping_mul(self.source_steps.block);
        let destination = u64::from(segment.destination).wrapping_mul(self.destination_steps.block);
        (start.0.wrapping_add(source), start.1.wrapping_add(destination))
    }

    /// The bytes from one repetition of a shape to the next, on the source and on the destination.
    pub(crate) fn steps(&self, shape: &Shape) -> (u64, u64) {
        (
            shape.source_step.offset(&self.source_steps),
            shape.destination_step.offset(&self.destination_steps),
        )
    }
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
        let parts = cover(destination, sources)?;
        prove(destination, sources, &parts)?;

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
            let nest = Nest::new(
                start(source, from),
                start(destination, to),
                u64::from(kind.format.bytes),
                loops.collect(),
            );
            let regions = (from.view.region, to.view.region);
            let key = Key { group: part.to.0, rhythm, regions, source_steps, destination_steps };
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
            source_rank: crate::cover::rank_name(source),
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
        let base = |region: u32| destination.regions()[region as usize].base;
        for (number, piece) in group.pieces.iter().enumerate() {
            let (held, steps) = holding(destination, (index, number));
            let kind = destination.kind(piece);
            let rhythm = leftovers.number(Leftover::Entries(kind.law, held));
            let start = base(piece.view.region) + piece.view.offset;
            let loops = piece.bounds.0.iter().zip(&piece.view.axes);
            let loops = loops.map(|(span, &stride)| both(span.len(), stride)).collect();
            let nest = Nest::new(start, start, u64::from(kind.format.bytes), loops);
            let region = piece.view.region;
            nests.push((Key::own(index, rhythm, region, steps), nest));
        }
        for scratch in &group.scratch {
            let rhythm = leftovers.number(Leftover::Blocks { group: index });
            let start = base(scratch.region) + scratch.offset;
            let loops = scratch.dims.iter().map(|&(count, stride)| both(count, stride)).collect();
            let nest = Nest::new(start, start, scratch.run, loops);
            let steps = Steps { block: scratch.block, ..Steps::default() };
            nests.push((Key::own(index, rhythm, scratch.region, steps), nest));
        }
    }
    (leftovers.list, nests)
}

/// What nests must have in common to be merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    group: usize,
    rhythm: usize,
    regions: (u32, u32),
    source_steps: Steps,
    destination_steps: Steps,
}

impl Key {
    /// For nests from the destination to itself.
    fn own(group: usize, rhythm: usize, region: u32, steps: Steps) -> Self {
        let regions = (region, region);
        Self { group, rhythm, regions, source_steps: steps, destination_steps: steps }
    }
}

/// Merges nests and joins those that touch, in the order of the destination's groups and addresses.
fn clusters(
    mut nests: Vec<(Key, Nest)>,
    repeated: &dyn Fn(&Key) -> bool,
    evenly: &dyn Fn(&Key) -> u64,
) -> Vec<Cluster> {
    nests.sort_by_key(|(key, nest)| (*key, nest.destination));
    let mut clusters = vec![];
    let mut rest = nests.into_iter().peekable();
    while let Some((key, first)) = rest.next() {
        let mut nests = vec![first];
        while let Some((_, nest)) = rest.next_if(|(other, _)| *other == key) {
            nests.push(nest);
        }
        while append_neighbours(&mut nests) {}
        let entries = evenly(&key);
        let mut alone = vec![];
        for chain in chains(nests, &key, entries) {
            match <[Nest; 1]>::try_from(chain) {
                Ok([nest]) => alone.push(nest),
                Err(chain) => match progressions(chain.clone()) {
                    single if single.len() == 1 => alone.extend(single),
                    _ => clusters.push((key, chain)),
                },
            }
        }
        clusters.extend(progressions(alone).into_iter().map(|nest| (key, vec![nest])));
    }
    clusters.sort_by_key(|(key, nests)| (key.group, nests[0].destination));
    let cluster = |(key, mut nests): (Key, Vec<Nest>)| {
        let mut outer = vec![];
        if let ([nest], true) = (&mut nests[..], repeated(&key)) {
            let block = key.destination_steps.block;
            let inner = nest.loops.iter().position(|repeat| repeat.destination < block);
            let inner = nest.loops.split_off(inner.unwrap_or(nest.loops.len()));
            outer = std::mem::replace(&mut nest.loops, inner);
        }
        let Key { rhythm, regions, source_steps, destination_steps, .. } = key;
        let mut cluster = Cluster {
            rhythm,
            regions,
            source_steps,
            destination_steps,
            outer,
            nests,
            usual: (Shape { entries: evenly(&key), repeats: 1, ..Shape::default() }, vec![]),
        };
        cluster.usual.1 = (0..cluster.nests.len())
            .map(|nest| Fitted::new(&cluster, nest, &cluster.usual.0, &[]))
            .collect();
        cluster
    };
    clusters.into_iter().map(cluster).collect()
}

/// One pass that appends nests to their predecessors where the two make one.
fn append_neighbours(nests: &mut Vec<Nest>) -> bool {
    let before = nests.len();
    nests.dedup_by(|next, nest| nest.append(next));
    nests.len() < before
}

/// Splits nests where the end of one does not touch the start of the next on both sides, when
/// `entries` entries are copied.
fn chains(nests: Vec<Nest>, key: &Key, entries: u64) -> Vec<Vec<Nest>> {
    let mut chains: Vec<Vec<Nest>> = vec![];
    for nest in nests {
        let touches = |last: &Nest| {
            let (source, destination) = last.extent();
            let along = |steps: &Steps| (entries - 1) * steps.entry;
            last.source + source + along(&key.source_steps) == nest.source
                && last.destination + destination + along(&key.destination_steps)
                    == nest.destination
        };
        match chains.last_mut() {
            Some(chain) if chain.last().is_some_and(touches) => chain.push(nest),
            _ => chains.push(vec![nest]),
        }
    }
    chains
}

/// Makes one nest of several that are alike and evenly apart (the layers of a group).
fn progressions(mut nests: Vec<Nest>) -> Vec<Nest> {
    nests.sort_by(|a, b| (a.run, &a.loops, a.destination).cmp(&(b.run, &b.loops, b.destination)));
    let mut merged: Vec<Nest> = vec![];
    let mut rest = &nests[..];
    while let [first, others @ ..] = rest {
        let step = |from: &Nest, to: &Nest| {
            let alike = from.run == to.run && from.loops == to.loops;
            let source = to.source.checked_sub(from.source).filter(|&step| step > 0 && alike)?;
            Some((source, to.destination.checked_sub(from.destination)?))
        };
        let stride = others.first().and_then(|second| step(first, second));
        let mut count = 1;
        while count < rest.len()
            && stride.is_some()
            && step(&rest[count - 1], &rest[count]) == stride
        {
            count += 1;
        }
        let mut loops = first.loops.clone();
        if let (Some((source, destination)), true) = (stride, count > 1) {
            loops.push(Loop { count: count as u64, source, destination });
        }
        merged.push(Nest::new(first.source, first.destination, first.run, loops));
        rest = &rest[count..];
    }
    merged
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
