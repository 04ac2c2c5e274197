//! Nests that touch, walked together.

use kvferry_layout::BlockPair;

use crate::compile::fitted::Fitted;
use crate::nest::{Loop, Nest};
use crate::walk::Shape;

/// Nests that are walked together, segment by segment, because the end of each touches the start of
/// the next on both sides; most often a single one.
#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    pub(crate) pairing: usize,
    /// See [`Key::layer`].
    pub(crate) layer: usize,
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
    /// Moves a place in block 0 to other blocks.
    #[inline(always)]
    pub(crate) fn at_blocks(&self, start: (u64, u64), blocks: BlockPair) -> (u64, u64) {
        let source = u64::from(blocks.source).wrapping_mul(self.blocks.0);
        let destination = u64::from(blocks.destination).wrapping_mul(self.blocks.1);
        (start.0.wrapping_add(source), start.1.wrapping_add(destination))
    }
}

/// What nests must have in common to be walked together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) group: usize,
    pub(crate) pairing: usize,
    pub(crate) regions: (u32, u32),
    /// Bytes from one block to the next on the source and on the destination.
    pub(crate) blocks: (u64, u64),
    /// Where a plan is made to be read layer by layer: of which layer they are. Else 0.
    pub(crate) layer: usize,
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
        for chain in chains(unrolled(nests, entries), entries) {
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
        let Key { pairing, regions, blocks, layer, .. } = key;
        let whole = Shape { entries: evenly(&key), repeats: 1, ..Shape::default() };
        let fits = nests.iter().map(|nest| Fitted::new(nest, &whole, 1, &[])).collect();
        Cluster { pairing, layer, regions, blocks, outer, nests, usual: (whole, fits) }
    };
    clusters.into_iter().map(cluster).collect()
}

/// One pass that appends nests to their predecessors where the two make one.
fn append_neighbours(nests: &mut Vec<Nest>) -> bool {
    let before = nests.len();
    nests.dedup_by(|next, nest| nest.append(next));
    nests.len() < before
}

/// Where nests take turns in an outer loop (the keys and values of a head, then those of the next),
/// writes that loop out: then the end of each nest touches the start of the next.
fn unrolled(nests: Vec<Nest>, entries: u64) -> Vec<Nest> {
    let mut unrolled: Vec<Nest> = vec![];
    let mut rest = &nests[..];
    while let [first, ..] = rest {
        let turn = turn(rest, entries).unwrap_or_default();
        let (taken, after) = rest.split_at(turn.len().max(1));
        match first.loops.first() {
            Some(outer) if turn.len() > 1 => {
                unrolled.extend((0..outer.count).flat_map(|at| {
                    turn.iter().map(move |nest| Nest {
                        source: nest.source + at * outer.source,
                        destination: nest.destination + at * outer.destination,
                        ..nest.clone()
                    })
                }));
            }
            _ => unrolled.extend_from_slice(taken),
        }
        rest = after;
    }
    unrolled
}

/// The first nests that take turns, each without its outermost loop. `None` if they do not.
fn turn(nests: &[Nest], entries: u64) -> Option<Vec<Nest>> {
    let outer = *nests[0].loops.first()?;
    let without = |nest: &Nest| Nest { loops: nest.loops[1..].to_vec(), ..nest.clone() };
    let start = (nests[0].source + outer.source, nests[0].destination + outer.destination);
    let mut turn: Vec<Nest> = vec![];
    for nest in nests {
        let continues = turn.last().is_none_or(|last| end(last, entries) == nest.start());
        // A plan stays small: what it says more of than this is said in more copies.
        let small = (turn.len() as u64 + 1).saturating_mul(outer.count) <= MAX_UNROLLED;
        if nest.loops.first() != Some(&outer) || !continues || !small {
            return None;
        }
        turn.push(without(nest));
        if end(&turn[turn.len() - 1], entries) == start {
            return Some(turn);
        }
    }
    None
}

/// Nests that one outer loop becomes at most.
const MAX_UNROLLED: u64 = 128;

/// Where a nest ends on both sides when `entries` entries are copied.
fn end(nest: &Nest, entries: u64) -> (u64, u64) {
    let (source, destination) = nest.extent();
    let steps = (nest.steps.source.entry, nest.steps.destination.entry);
    (
        nest.source + source + (entries - 1) * steps.0,
        nest.destination + destination + (entries - 1) * steps.1,
    )
}

/// Splits nests where the end of one does not touch the start of the next on both sides, when
/// `entries` entries are copied.
fn chains(nests: Vec<Nest>, entries: u64) -> Vec<Vec<Nest>> {
    let mut chains: Vec<Vec<Nest>> = vec![];
    for nest in nests {
        match chains.last_mut() {
            Some(chain) if chain.last().is_some_and(|last| end(last, entries) == nest.start()) => {
                chain.push(nest);
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nest::{BothSteps, Steps};

    fn nest(at: u64, run: u64, entry: u64, loops: &[(u64, u64)]) -> Nest {
        let step = Steps { entry, ..Steps::default() };
        let loops =
            loops.iter().map(|&(count, step)| Loop { count, source: step, destination: step });
        let steps = BothSteps { source: step, destination: step };
        Nest::new((at, at + 1000), steps, run, loops.collect())
    }

    #[test]
    fn keys_and_values_that_take_turns_head_by_head_are_one_chain() {
        // Four entries of 8 bytes: 32 bytes of keys, then 32 of values, for each of three heads.
        let nests = vec![nest(0, 8, 8, &[(3, 64)]), nest(32, 8, 8, &[(3, 64)])];
        let one = |at| nest(at, 8, 8, &[]);
        assert_eq!(
            chains(unrolled(nests.clone(), 4), 4),
            [[one(0), one(32), one(64), one(96), one(128), one(160)]]
        );
        // With a gap behind the values, or before them, they stay as they are.
        assert_eq!(unrolled(nests.clone(), 3), nests);
        let apart = vec![nest(0, 8, 8, &[(3, 72)]), nest(32, 8, 8, &[(3, 72)])];
        assert_eq!(unrolled(apart.clone(), 4), apart);
    }

    #[test]
    fn a_transposed_part_takes_its_turn_too() {
        // Keys number by number (4 numbers of 2 bytes, 4 entries), values entry by entry.
        let nests = vec![nest(0, 2, 2, &[(3, 64), (4, 8)]), nest(32, 8, 8, &[(3, 64)])];
        assert_eq!(chains(unrolled(nests, 4), 4).len(), 1);
    }

    #[test]
    fn a_plan_stays_small() {
        let nests = vec![nest(0, 8, 8, &[(1000, 64)]), nest(32, 8, 8, &[(1000, 64)])];
        assert_eq!(unrolled(nests.clone(), 4), nests);
    }
}
