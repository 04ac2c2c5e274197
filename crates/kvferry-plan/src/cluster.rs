//! Nests that touch, walked together.

use crate::cursor::Fitted;
use crate::nest::{Loop, Nest};
use crate::walk::{Segment, Shape};

/// Nests that are walked together, segment by segment, because the end of each touches the start of
/// the next on both sides; most often a single one.
#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    pub(crate) rhythm: usize,
    /// Indices of the regions on the source and on the destination.
    pub(crate) regions: (u32, u32),
    /// Bytes from one block to the next on the source and on the destination.
    pub(crate) blocks: (u64, u64),
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
        let source = u64::from(segment.source).wrapping_mul(self.blocks.0);
        let destination = u64::from(segment.destination).wrapping_mul(self.blocks.1);
        (start.0.wrapping_add(source), start.1.wrapping_add(destination))
    }
}

/// What nests must have in common to be walked together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) group: usize,
    pub(crate) rhythm: usize,
    pub(crate) regions: (u32, u32),
    /// Bytes from one block to the next on the source and on the destination.
    pub(crate) blocks: (u64, u64),
}

/// Merges nests and joins those that touch, in the order of the destination's groups and addresses.
pub(crate) fn clusters(
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
        for chain in chains(nests, entries) {
            match <[Nest; 1]>::try_from(chain) {
                Ok([nest]) => alone.push(nest),
                Err(chain) => match progressions(chain.clone()) {
                    single if single.len() == 1 => alone.extend(single),
                    _ => clusters.push((key, chain)),
                },
            }
        }
        // Once for the sections of a layer, once for the layers.
        let alone = progressions(progressions(alone));
        clusters.extend(alone.into_iter().map(|nest| (key, vec![nest])));
    }
    clusters.sort_by_key(|(key, nests)| (key.group, nests[0].destination));
    let cluster = |(key, mut nests): (Key, Vec<Nest>)| {
        let mut outer = vec![];
        if let ([nest], true) = (&mut nests[..], repeated(&key)) {
            let inner = nest.loops.iter().position(|repeat| repeat.destination < key.blocks.1);
            let inner = nest.loops.split_off(inner.unwrap_or(nest.loops.len()));
            outer = std::mem::replace(&mut nest.loops, inner);
        }
        let Key { rhythm, regions, blocks, .. } = key;
        let whole = Shape { entries: evenly(&key), repeats: 1, ..Shape::default() };
        let fits = nests.iter().map(|nest| Fitted::new(nest, &whole, 1, &[])).collect();
        Cluster { rhythm, regions, blocks, outer, nests, usual: (whole, fits) }
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
fn chains(nests: Vec<Nest>, entries: u64) -> Vec<Vec<Nest>> {
    let mut chains: Vec<Vec<Nest>> = vec![];
    for nest in nests {
        let touches = |last: &Nest| {
            let (source, destination) = last.extent();
            let (source_step, destination_step) =
                (last.steps.source.entry, last.steps.destination.entry);
            last.source + source + (entries - 1) * source_step == nest.source
                && last.destination + destination + (entries - 1) * destination_step
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
    nests.sort_by(|a, b| {
        let (a, b) =
            ((a.steps, a.run, &a.loops, a.destination), (b.steps, b.run, &b.loops, b.destination));
        a.cmp(&b)
    });
    let mut merged: Vec<Nest> = vec![];
    let mut rest = &nests[..];
    while let [first, others @ ..] = rest {
        let step = |from: &Nest, to: &Nest| {
            let alike = (from.steps, from.run, &from.loops) == (to.steps, to.run, &to.loops);
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
        let start = (first.source, first.destination);
        merged.push(Nest::new(start, first.steps, first.run, loops));
        rest = &rest[count..];
    }
    merged
}
