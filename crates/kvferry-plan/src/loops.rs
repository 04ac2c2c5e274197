//! A request as loops, for whoever works out addresses for itself.

use kvferry_layout::strided::fuse;
use kvferry_layout::{BlockPair, Loop as PlainLoop, Loops, LoopsError};

use crate::compile::Cluster;
use crate::nest::{Loop, MAX_LOOPS, Nest};
use crate::transfer::Transfer;
use crate::walk::{SegmentList, Shape};

impl Transfer<'_> {
    /// What [`copies`](Self::copies) yields for one source rank, as loops over tables of blocks: the
    /// same bytes, in time and space proportional to the request's blocks, however many copies they
    /// make. An error, which a proven plan does not have, is that of a nest that is not sound: without it bytes would
    /// be missing.
    pub fn loops(&self, source: usize) -> Result<Loops, LoopsError> {
        self.loops_over(self.plan.sources.get(source).into_iter().flatten())
    }

    pub(crate) fn loops_over<'c>(
        &self,
        clusters: impl Iterator<Item = &'c Cluster>,
    ) -> Result<Loops, LoopsError> {
        let mut loops = Loops::default();
        // For every pairing that was met: its first table. There is one for each shape.
        let mut first_tables: Vec<Option<usize>> = vec![None; self.plan.pairings.len()];
        for cluster in clusters {
            let segments = self.segments.of(cluster.pairing);
            if segments.is_empty() {
                continue;
            }
            let first = *first_tables[cluster.pairing]
                .get_or_insert_with(|| add_tables(&mut loops, &segments));
            for (number, shape) in segments.shapes.iter().enumerate() {
                for nest in &cluster.nests {
                    let fitted = fit(nest, shape, &cluster.outer);
                    loops.add_nest(
                        fitted.start,
                        fitted.run,
                        cluster.blocks,
                        &fitted.loops[..fitted.len],
                        first + number,
                    )?;
                }
            }
        }
        Ok(loops)
    }
}

/// Adds the blocks of the segments, a table for every shape; returns the index of the first table.
fn add_tables(loops: &mut Loops, segments: &SegmentList<'_>) -> usize {
    let SegmentList { blocks, numbers, shapes } = *segments;
    let first = loops.tables();
    if in_order(numbers) {
        // Most often: whole blocks, then the one that the request ends in.
        let mut start = 0;
        for number in 0..shapes.len() as u32 {
            let end = start + numbers[start..].partition_point(|shape| *shape <= number);
            loops.add_table(blocks[start..end].iter().copied());
            start = end;
        }
        return first;
    }
    // Shapes take turns: a counting sort.
    let mut next = vec![0; shapes.len()];
    for number in numbers {
        next[*number as usize] += 1;
    }
    let mut start = 0;
    for next in &mut next {
        start += std::mem::replace(next, start);
    }
    let starts = next.clone();
    let mut sorted = vec![BlockPair::default(); blocks.len()];
    for (pair, number) in blocks.iter().zip(numbers) {
        let at = &mut next[*number as usize];
        sorted[*at] = *pair;
        *at += 1;
    }
    for (start, end) in starts.into_iter().zip(next) {
        loops.add_table(sorted[start..end].iter().copied());
    }
    first
}

/// Whether numbers never fall. Looks at all of them, many at a time.
fn in_order(numbers: &[u32]) -> bool {
    let next = numbers.iter().skip(1);
    numbers.iter().zip(next).fold(true, |rising, (one, next)| rising & (one <= next))
}

/// A nest for one shape of segment.
struct Fit {
    start: (u64, u64),
    run: u64,
    loops: [PlainLoop; MAX_LOOPS],
    len: usize,
}

/// Fits a nest, with loops around it, to a shape: loops sorted by the destination's stride, the largest
/// first, and as few as can be.
fn fit(nest: &Nest, shape: &Shape, around: &[Loop]) -> Fit {
    let entry = (nest.steps.source.entry, nest.steps.destination.entry);
    let entries = Loop { count: shape.entries, source: entry.0, destination: entry.1 };
    let (source, destination) = shape.steps(nest);
    let repeats = Loop { count: shape.repeats, source, destination };
    let mut loops = [Loop::default(); MAX_LOOPS];
    let mut len = 0;
    let all = around.iter().chain(&nest.loops).chain([&entries, &repeats]);
    for repeat in all.filter(|repeat| repeat.count > 1) {
        loops[len] = *repeat;
        len += 1;
    }
    loops[..len].sort_unstable_by_key(|repeat| std::cmp::Reverse(repeat.destination));
    let mut run = nest.run;
    len = fuse(&mut loops[..len], &mut run);
    let start = (
        nest.source.wrapping_add(shape.source.offset(&nest.steps.source)),
        nest.destination.wrapping_add(shape.destination.offset(&nest.steps.destination)),
    );
    let loops =
        loops.map(|Loop { count, source, destination }| PlainLoop { count, source, destination });
    Fit { start, run, loops, len }
}
