//! Sets of bytes that lie in memory like a tensor: equal runs at nested strides.
//!
//! Also the one place where loops that continue each other are made one ([`fuse`]), whatever else a
//! loop carries.

use crate::view::MAX_AXES;

/// `count` repetitions, `stride` bytes apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dim {
    /// Bytes from one repetition to the next.
    pub stride: u64,
    /// How many there are.
    pub count: u64,
    /// Whether the index along this dimension is the block id.
    pub block: bool,
}

/// A loop over bytes that may continue another, or a run.
pub trait Fusible: Copy {
    /// How often it repeats.
    fn count(&self) -> u64;

    /// Whether its repetitions lie `run` bytes apart: then a run of that length and the loop around it
    /// are one longer run.
    fn repeats_run(&self, run: u64) -> bool;

    /// This loop around `inner`, as one loop; `None` where it does not start again just where `inner`
    /// ends.
    fn around(&self, inner: &Self) -> Option<Self>;
}

/// Joins loops that continue each other, and the run that they are around; returns how many are left, at
/// the front. The loops are sorted by stride, the largest first.
pub fn fuse<L: Fusible>(loops: &mut [L], run: &mut u64) -> usize {
    let mut len = loops.len();
    while len > 0 && loops[len - 1].repeats_run(*run) {
        let Some(longer) = run.checked_mul(loops[len - 1].count()) else { break };
        *run = longer;
        len -= 1;
    }
    let mut index = 1;
    while index < len {
        if let Some(one) = loops[index - 1].around(&loops[index]) {
            loops[index - 1] = one;
            loops.copy_within(index + 1..len, index);
            len -= 1;
        } else {
            index += 1;
        }
    }
    len
}

impl Fusible for Dim {
    fn count(&self) -> u64 {
        self.count
    }

    /// The block dimension stays apart.
    fn repeats_run(&self, run: u64) -> bool {
        !self.block && self.stride == run
    }

    fn around(&self, inner: &Self) -> Option<Self> {
        let count = self.count.checked_mul(inner.count)?;
        let whole = inner.stride.checked_mul(inner.count)?;
        (!self.block && !inner.block && whole == self.stride).then_some(Self { count, ..*inner })
    }
}

/// The bytes of a view: runs of equal length, repeated along nested dimensions.
///
/// Nested means that every dimension's stride is at least the extent of all smaller ones together, so
/// that no two elements share a byte. Every real layout is of this form, padding included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strided {
    start: u64,
    run: u64,
    dims: [Dim; MAX_DIMS],
    len: usize,
    /// `spans[k]` is the extent of the dimensions from `k` on, and of the run.
    spans: [u64; MAX_DIMS + 1],
}

/// Block, kernel block, entry, and the axes.
const MAX_DIMS: usize = MAX_AXES + 3;

/// Why dimensions do not make a strided set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotStrided {
    /// Two elements would share a byte.
    Overlapping {
        /// The stride that is too short.
        stride: u64,
        /// What has to fit in it.
        extent: u64,
    },
    /// The extent does not fit in 64 bits.
    Overflow,
}

/// What counts as a meeting of two sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// A byte that both have.
    AnyByte,
    /// A byte that both have, under different block ids.
    ByteOfDifferentBlocks,
}

/// Deciding whether two sets meet took more than the allowed number of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooComplex;

impl Strided {
    /// The set that starts at `start`. Dimensions may come in any order; at most [`MAX_AXES`] + 3.
    pub fn new(
        start: u64,
        run: u64,
        dims: impl IntoIterator<Item = Dim>,
    ) -> Result<Self, NotStrided> {
        let none = Dim { stride: 0, count: 1, block: false };
        let mut set = Self { start, run, dims: [none; MAX_DIMS], len: 0, spans: [0; MAX_DIMS + 1] };
        for dim in dims.into_iter().filter(|dim| dim.count > 1) {
            *set.dims.get_mut(set.len).ok_or(NotStrided::Overflow)? = dim;
            set.len += 1;
        }
        set.dims[..set.len].sort_unstable_by_key(|dim| std::cmp::Reverse(dim.stride));
        set.len = fuse(&mut set.dims[..set.len], &mut set.run);
        set.spans[set.len] = set.run;
        for k in (0..set.len).rev() {
            let (dim, extent) = (set.dims[k], set.spans[k + 1]);
            if dim.stride < extent {
                return Err(NotStrided::Overlapping { stride: dim.stride, extent });
            }
            set.spans[k] = (dim.count - 1)
                .checked_mul(dim.stride)
                .and_then(|reach| reach.checked_add(extent))
                .ok_or(NotStrided::Overflow)?;
        }
        start.checked_add(set.spans[0]).ok_or(NotStrided::Overflow)?;
        Ok(set)
    }

    /// First byte.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// First byte after the last one.
    pub fn end(&self) -> u64 {
        self.start + self.spans[0]
    }

    /// The dimensions, largest stride first.
    pub fn dims(&self) -> &[Dim] {
        &self.dims[..self.len]
    }

    /// Whether the two sets meet. Takes one from `steps` for every step; when none is left the answer
    /// is not known.
    pub fn meets(
        &self,
        other: &Self,
        meeting: Meeting,
        steps: &mut u64,
    ) -> Result<bool, TooComplex> {
        if self.start >= other.end() || other.start >= self.end() {
            return Ok(false);
        }
        if let Some(answer) = self.meets_by_cells(other, meeting) {
            return Ok(answer);
        }
        let mut search = Search { a: self, b: other, meeting, steps };
        // Without a block dimension there is one block, and its id is 0.
        let lone = |set: &Self| (!set.dims().iter().any(|dim| dim.block)).then_some(0);
        let delta = i128::from(self.start) - i128::from(other.start);
        search.descend(At { delta, i: 0, j: 0, block_a: lone(self), block_b: lone(other) })
    }

    /// The common case, decided at once: both sets are repeated by block in equal cells, and both
    /// cells of block 0 fit in one cell's length.
    fn meets_by_cells(&self, other: &Self, meeting: Meeting) -> Option<bool> {
        let (a, b) = (self.dims().first()?, other.dims().first()?);
        if !a.block || !b.block || a.stride != b.stride {
            return None;
        }
        let (a_end, b_end) = (self.start + self.spans[1], other.start + other.spans[1]);
        let fits = a_end.max(b_end) - self.start.min(other.start) <= a.stride;
        match meeting {
            Meeting::ByteOfDifferentBlocks => fits.then_some(false),
            Meeting::AnyByte => {
                (fits && (a_end <= other.start || b_end <= self.start)).then_some(false)
            }
        }
    }
}

/// A search for a byte that both sets have, from the largest stride down.
struct Search<'a> {
    a: &'a Strided,
    b: &'a Strided,
    meeting: Meeting,
    steps: &'a mut u64,
}

/// How far a search is.
#[derive(Clone, Copy)]
struct At {
    /// How far `a`'s part lies behind `b`'s.
    delta: i128,
    /// The dimensions of `a` and of `b` that are decided.
    i: usize,
    j: usize,
    /// The block ids, where decided. (Where only their difference is, it stands for `a`'s, and 0 for
    /// `b`'s.)
    block_a: Option<i128>,
    block_b: Option<i128>,
}

impl Search<'_> {
    fn descend(&mut self, at: At) -> Result<bool, TooComplex> {
        *self.steps = self.steps.checked_sub(1).ok_or(TooComplex)?;
        let (a, b) = (self.a, self.b);
        let (span_a, span_b) = (i128::from(a.spans[at.i]), i128::from(b.spans[at.j]));
        if at.delta >= span_b || at.delta + span_a <= 0 {
            return Ok(false);
        }
        let by_blocks = self.meeting == Meeting::ByteOfDifferentBlocks;
        if by_blocks && at.block_a.is_some() && at.block_a == at.block_b {
            return Ok(false);
        }
        let (next_a, next_b) = (a.dims().get(at.i).copied(), b.dims().get(at.j).copied());
        if let (Some(dim_a), Some(dim_b)) = (next_a, next_b)
            && dim_a.stride == dim_b.stride
            && (!by_blocks || dim_a.block == dim_b.block)
        {
            // Only the difference of the two indices matters.
            let next = |at: At, difference| At {
                i: at.i + 1,
                j: at.j + 1,
                block_a: if dim_a.block { Some(difference) } else { at.block_a },
                block_b: if dim_a.block { Some(0) } else { at.block_b },
                ..at
            };
            let indices = (1 - i128::from(dim_b.count), i128::from(dim_a.count) - 1);
            return self.along(at, i128::from(dim_a.stride), indices, next);
        }
        if let Some(dim) = next_a
            && next_b.is_none_or(|other| other.stride <= dim.stride)
        {
            let next = |at: At, index| At {
                i: at.i + 1,
                block_a: if dim.block { Some(index) } else { at.block_a },
                ..at
            };
            return self.along(at, i128::from(dim.stride), (0, i128::from(dim.count) - 1), next);
        }
        if let Some(dim) = next_b {
            // Counted backwards: an index of `b` brings it nearer.
            let next = |at: At, index: i128| At {
                j: at.j + 1,
                block_b: if dim.block { Some(-index) } else { at.block_b },
                ..at
            };
            return self.along(at, i128::from(dim.stride), (1 - i128::from(dim.count), 0), next);
        }
        Ok(true)
    }

    /// Tries those of the indices `first..=last` along a dimension at which what is left of the two
    /// sets can still meet.
    fn along(
        &mut self,
        at: At,
        stride: i128,
        (first, last): (i128, i128),
        next: impl Fn(At, i128) -> At,
    ) -> Result<bool, TooComplex> {
        let inner = next(at, 0);
        let (rest_a, rest_b) =
            (i128::from(self.a.spans[inner.i]), i128::from(self.b.spans[inner.j]));
        let low = (-rest_a - at.delta).div_euclid(stride) + 1;
        let high = (rest_b - 1 - at.delta).div_euclid(stride);
        for index in low.max(first)..=high.min(last) {
            let delta = at.delta + index * stride;
            if self.descend(At { delta, ..next(at, index) })? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Every byte with the block id under which it is reached.
    fn bytes(start: u64, run: u64, dims: &[Dim]) -> Vec<(u64, u64)> {
        let mut bytes: Vec<(u64, u64)> = (start..start + run).map(|byte| (byte, 0)).collect();
        for dim in dims {
            let inner = bytes;
            bytes = (0..dim.count)
                .flat_map(|i| {
                    inner.iter().map(move |&(byte, block)| {
                        (byte + i * dim.stride, if dim.block { i } else { block })
                    })
                })
                .collect();
        }
        bytes
    }

    fn sets() -> impl Strategy<Value = (u64, u64, Vec<Dim>)> {
        let dims = prop::collection::vec((0u64..4, 1u64..4), 0..4);
        (0u64..30, 1u64..5, dims, 0usize..5).prop_map(|(start, run, gaps, block)| {
            let mut extent = run;
            let mut dims = vec![];
            for (i, (gap, count)) in gaps.into_iter().enumerate() {
                let stride = extent + gap;
                dims.push(Dim { stride, count, block: i == block });
                extent += stride * (count - 1);
            }
            (start, run, dims)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn meeting_is_decided_as_by_comparing_every_byte(a in sets(), b in sets()) {
            let (bytes_a, bytes_b) = (bytes(a.0, a.1, &a.2), bytes(b.0, b.1, &b.2));
            let blocks: HashMap<u64, u64> = bytes_a.iter().copied().collect();
            let any = bytes_b.iter().any(|(byte, _)| blocks.contains_key(byte));
            let different = bytes_b
                .iter()
                .any(|(byte, block)| blocks.get(byte).is_some_and(|other| other != block));
            let set_a = Strided::new(a.0, a.1, a.2.iter().rev().copied()).unwrap();
            let set_b = Strided::new(b.0, b.1, b.2.iter().copied()).unwrap();
            prop_assert_eq!(set_a.end(), bytes_a.iter().map(|(byte, _)| byte + 1).max().unwrap());
            let steps = &mut 100_000;
            prop_assert_eq!(set_a.meets(&set_b, Meeting::AnyByte, steps), Ok(any));
            prop_assert_eq!(
                set_a.meets(&set_b, Meeting::ByteOfDifferentBlocks, steps),
                Ok(different)
            );
        }
    }

    #[test]
    fn overlapping_and_overflowing_dimensions_are_told_apart() {
        let dim = |stride, count| Dim { stride, count, block: false };
        assert_eq!(
            Strided::new(0, 4, [dim(3, 2)]),
            Err(NotStrided::Overlapping { stride: 3, extent: 4 })
        );
        assert_eq!(
            Strided::new(0, 4, [dim(0, 2)]),
            Err(NotStrided::Overlapping { stride: 0, extent: 4 })
        );
        assert_eq!(Strided::new(0, 4, [dim(1 << 40, 1 << 40)]), Err(NotStrided::Overflow));
        assert_eq!(Strided::new(u64::MAX - 3, 4, []), Err(NotStrided::Overflow));
    }

    #[test]
    fn a_search_ends_when_its_steps_are_spent() {
        let dim = |stride, count, block| Dim { stride, count, block };
        // All bytes of one are multiples of 6; none of the other is.
        let a = Strided::new(0, 1, [dim(6000, 1_000_000, true), dim(6, 100, false)]).unwrap();
        let b = Strided::new(3, 1, [dim(6006, 1_000_000, true), dim(12, 50, false)]).unwrap();
        assert_eq!(a.meets(&b, Meeting::AnyByte, &mut 10_000), Err(TooComplex));
    }
}
