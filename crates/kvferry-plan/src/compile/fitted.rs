//! Nests fitted to the shape of a segment.

use kvferry_layout::ByteCopy;
use kvferry_layout::strided::fuse;

use crate::nest::{Loop, MAX_LOOPS, Nest, advance, extent};
use crate::walk::Shape;

/// A nest for one shape of segment: loops around a run, as few as can be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fitted {
    /// Bytes from the starts of the two blocks to the first run.
    pub(crate) offset: (u64, u64),
    pub(crate) run: u64,
    pub(crate) loops: [Loop; MAX_LOOPS],
    pub(crate) len: usize,
    /// How many runs there are.
    pub(crate) runs: u64,
    /// Whether a run can touch the next one although no two loops continue each other: when an outer
    /// loop starts again just where the inner ones ended.
    pub(crate) touches_itself: bool,
}

impl Fitted {
    const EMPTY: Self = Self {
        offset: (0, 0),
        run: 0,
        loops: [Loop { count: 0, source: 0, destination: 0 }; MAX_LOOPS],
        len: 0,
        runs: 1,
        touches_itself: false,
    };

    /// Fits a nest, with loops around it, to a shape that repeats `count` times.
    pub(crate) fn new(nest: &Nest, shape: &Shape, count: u64, around: &[Loop]) -> Self {
        let mut fitted = Self {
            offset: (
                shape.source.offset(&nest.steps.source),
                shape.destination.offset(&nest.steps.destination),
            ),
            run: nest.run,
            ..Self::EMPTY
        };
        let entries = Loop {
            count: shape.entries,
            source: nest.steps.source.entry,
            destination: nest.steps.destination.entry,
        };
        let (source, destination) = shape.steps(nest);
        let repeats = Loop { count, source, destination };
        for repeat in around.iter().chain(&nest.loops).chain([&entries, &repeats]) {
            if repeat.count > 1 {
                let at = fitted.loops[..fitted.len]
                    .iter()
                    .position(|other| other.destination < repeat.destination)
                    .unwrap_or(fitted.len);
                fitted.loops.copy_within(at..fitted.len, at + 1);
                fitted.loops[at] = *repeat;
                fitted.len += 1;
            }
        }
        fitted.len = fuse(&mut fitted.loops[..fitted.len], &mut fitted.run);
        let loops = &fitted.loops[..fitted.len];
        fitted.runs = loops.iter().map(|repeat| repeat.count).product();
        fitted.touches_itself = (0..loops.len()).any(|outer| {
            let inner = extent(&loops[outer + 1..], fitted.run);
            (loops[outer].source, loops[outer].destination) == inner
        });
        fitted
    }

    /// All runs, in order, from a start on. There must be a slot for each.
    #[inline(always)]
    pub(crate) fn write(&self, start: (u64, u64), slots: &mut [ByteCopy]) {
        let (outer, inner) = match self.loops[..self.len] {
            [] => (&[][..], Loop { count: 1, ..Loop::default() }),
            [.., last] => (&self.loops[..self.len - 1], last),
        };
        let write_row = |row: &mut [ByteCopy], mut at: (u64, u64)| {
            for slot in row {
                *slot = ByteCopy { source: at.0, destination: at.1, bytes: self.run };
                at.0 = at.0.wrapping_add(inner.source);
                at.1 = at.1.wrapping_add(inner.destination);
            }
        };
        let step = |at: (u64, u64), index: u64, repeat: &Loop| {
            let source = at.0.wrapping_add(index * repeat.source);
            (source, at.1.wrapping_add(index * repeat.destination))
        };
        let mut rows = slots.chunks_exact_mut(inner.count as usize);
        match outer {
            [] => write_row(slots, start),
            [repeat] => {
                for (row, index) in rows.zip(0..) {
                    write_row(row, step(start, index, repeat));
                }
            }
            [around @ .., repeat] => {
                let mut indices = [0; MAX_LOOPS];
                loop {
                    let at = indices.iter().zip(around);
                    let at = at.fold(start, |at, (index, repeat)| step(at, *index, repeat));
                    for index in 0..repeat.count {
                        let Some(row) = rows.next() else { return };
                        write_row(row, step(at, index, repeat));
                    }
                    if !advance(&mut indices, around) {
                        return;
                    }
                }
            }
        }
    }
}
