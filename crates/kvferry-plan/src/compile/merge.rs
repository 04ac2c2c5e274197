//! Nests that continue each other made one, and those that repeat each other evenly.

use crate::nest::{Loop, Nest};

/// A nest of a plan, and what it is walked by.
#[derive(Clone, Debug)]
pub(crate) struct Merged {
    pub(crate) key: Key,
    pub(crate) nest: Nest,
}

/// What nests must have in common to be merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    /// Of the destination.
    pub(crate) group: usize,
    pub(crate) pairing: usize,
    /// Indices of the regions on the source and on the destination.
    pub(crate) regions: (u32, u32),
    /// Bytes from one block to the next on the source and on the destination.
    pub(crate) blocks: (u64, u64),
    /// Where a plan is made to be read layer by layer: of which layer they are. Else 0.
    pub(crate) layer: usize,
}

/// Merges nests; sorts them by their key and, within one, by the destination's addresses.
pub(crate) fn merge(mut nests: Vec<(Key, Nest)>) -> Vec<Merged> {
    nests.sort_by_key(|(key, nest)| (*key, nest.destination));
    let mut merged = vec![];
    for alike in nests.chunk_by(|(one, _), (next, _)| one == next) {
        let key = alike[0].0;
        let mut nests: Vec<Nest> = alike.iter().map(|(_, nest)| nest.clone()).collect();
        append_neighbours(&mut nests);
        // Once for the sections of a layer, once for the layers.
        let mut nests = progressions(progressions(nests));
        nests.sort_by_key(|nest| nest.destination);
        merged.extend(nests.into_iter().map(|nest| Merged { key, nest }));
    }
    merged
}

/// Appends nests to their predecessors where the two make one.
pub(crate) fn append_neighbours(nests: &mut Vec<Nest>) {
    let mut before = usize::MAX;
    while nests.len() < before {
        before = nests.len();
        nests.dedup_by(|next, nest| nest.append(next));
    }
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
