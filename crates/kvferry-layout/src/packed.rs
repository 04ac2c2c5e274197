//! Loops in two halves, for who packs: the source gathers its runs into a buffer, the destination
//! scatters the buffer. Both halves are loops again, and both sides work out the buffer's order from the
//! same few numbers, so that nothing is said about it. Loops that are larger than a buffer are cut.

use std::ops::Range;

use crate::loops::{BlockPair, Loop, LoopNest, Loops, LoopsError};

/// Nests start at multiples of this in the buffer, so that who moves wide words can do so.
const ALIGNMENT: u64 = 16;

impl Loops {
    /// The source's half: the same runs, into a buffer at `buffer`. They fill it nest by nest, within
    /// one block by block, within one loop by loop.
    pub fn gather(&self, buffer: u64) -> Result<Self, LoopsError> {
        let pair = |pair: &BlockPair, at| BlockPair { source: pair.source, destination: at };
        self.half(buffer, pair, |nest, packed| Placed {
            start: (nest.source, packed.start),
            blocks: (nest.blocks.0, packed.block),
            stride: |repeat, packed| (repeat.source, packed),
        })
    }

    /// The destination's half: the same runs, out of the buffer that [`gather`](Self::gather) filled.
    pub fn scatter(&self, buffer: u64) -> Result<Self, LoopsError> {
        let pair = |pair: &BlockPair, at| BlockPair { source: at, destination: pair.destination };
        self.half(buffer, pair, |nest, packed| Placed {
            start: (packed.start, nest.destination),
            blocks: (packed.block, nest.blocks.1),
            stride: |repeat, packed| (packed, repeat.destination),
        })
    }

    /// Bytes of the buffer that both halves need. `None` where that is beyond counting.
    pub fn packed_bytes(&self) -> Option<u64> {
        let mut end = 0u64;
        for nest in self.nests() {
            let bytes = nest.runs().checked_mul(nest.run)?;
            end = end.checked_next_multiple_of(ALIGNMENT)?.checked_add(bytes)?;
        }
        Some(end)
    }

    fn half(
        &self,
        buffer: u64,
        pair: impl Fn(&BlockPair, u32) -> BlockPair,
        place: impl Fn(&LoopNest<'_>, &Packed) -> Placed,
    ) -> Result<Self, LoopsError> {
        let mut half = Self::default();
        for table in 0..self.tables() {
            let pairs = &self.pairs()[self.table(table)];
            half.add_table(pairs.iter().zip(0..).map(|(known, at)| pair(known, at)));
        }
        let mut end = 0;
        for nest in self.nests() {
            let start = buffer + u64::next_multiple_of(end, ALIGNMENT);
            let mut block = nest.run;
            let mut loops = nest.loops.to_vec();
            let placed = |block| place(&nest, &Packed { start, block });
            let stride = placed(0).stride;
            for repeat in loops.iter_mut().rev() {
                (repeat.source, repeat.destination) = stride(repeat, block);
                block *= repeat.count;
            }
            let Placed { start: at, blocks, .. } = placed(block);
            half.add_nest(at, nest.run, blocks, &loops, nest.table)?;
            end = start - buffer + block * nest.pairs.len() as u64;
        }
        Ok(half)
    }
}

/// Where a nest lies in the buffer: its start, and the bytes of a block.
struct Packed {
    start: u64,
    block: u64,
}

/// A nest of a half.
struct Placed {
    start: (u64, u64),
    blocks: (u64, u64),
    /// The strides of one of its loops, which is so far apart in the buffer.
    stride: fn(&Loop, u64) -> (u64, u64),
}

/// How large a part of loops may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CutLimits {
    /// Bytes that it moves.
    pub bytes: u64,
    /// Nests.
    pub nests: usize,
    /// Pairs of blocks, in all of its tables.
    pub pairs: usize,
}

/// Cuts loops into parts, one after the other: what is left to hand out.
#[derive(Clone, Debug, Default)]
pub struct Cutting {
    /// The first nest that was not begun.
    next: usize,
    /// What is left of those that were, the last first.
    begun: Vec<Begun>,
}

/// A part of a nest.
#[derive(Clone, Debug)]
struct Begun {
    nest: usize,
    start: (u64, u64),
    run: u64,
    loops: Vec<Loop>,
    pairs: Range<usize>,
}

impl Cutting {
    /// Whether nothing is left.
    pub fn is_over(&self, loops: &Loops) -> bool {
        self.begun.is_empty() && self.next >= loops.nests().len()
    }

    /// The next part of the loops, always the same ones; `None` at the end. Limits of zero count as one.
    pub fn next(&mut self, loops: &Loops, limits: &CutLimits) -> Option<Loops> {
        let most = limits.bytes.max(1);
        let mut out = Loops::default();
        // Tables of the part, by what they were cut from.
        let mut tables: Vec<((usize, Range<usize>), usize)> = vec![];
        loop {
            let room = most - out.bytes();
            let pairs_room = limits.pairs.max(1).saturating_sub(out.pairs().len());
            let full = room == 0 || out.nests().len() >= limits.nests.max(1) || pairs_room == 0;
            if full && !out.is_empty() {
                break;
            }
            let Some(begun) = self.begun.pop().or_else(|| {
                let begun = Begun::whole(loops, self.next)?;
                self.next += 1;
                Some(begun)
            }) else {
                break;
            };
            let table = loops.nest_at(begun.nest)?.table;
            let known = |pairs: &Range<usize>| {
                tables.iter().find(|(key, _)| *key == (table, pairs.clone())).map(|(_, at)| *at)
            };
            // A table that the part has already costs nothing.
            let free = begun.bytes() <= room && known(&begun.pairs).is_some();
            let pairs_room = if free { usize::MAX } else { pairs_room };
            let first = match begun.split(room, pairs_room) {
                Split::Whole(first) => first,
                Split::First(first, rest) => {
                    self.begun.push(rest);
                    first
                }
                // A little room is left open rather than filled with crumbs.
                Split::Inside(first, rest) if out.is_empty() || room >= most / 4 => {
                    self.begun.extend([rest, first]);
                    continue;
                }
                Split::Inside(first, rest) => {
                    self.begun.extend([rest, first]);
                    break;
                }
            };
            let at = known(&first.pairs).unwrap_or_else(|| {
                let all = &loops.pairs()[loops.table(table)];
                let at = out.add_table(all[first.pairs.clone()].iter().copied());
                tables.push(((table, first.pairs.clone()), at));
                at
            });
            let blocks = loops.nest_at(first.nest)?.blocks;
            let added = out.add_nest(first.start, first.run, blocks, &first.loops, at);
            debug_assert!(added.is_ok(), "a part of sound loops is sound: {added:?}");
        }
        (!out.is_empty()).then_some(out)
    }
}

/// What fits of a part, and the rest.
enum Split {
    Whole(Begun),
    First(Begun, Begun),
    /// Not even one pair, or one turn of the outermost loop, fits: the first of them, to be looked
    /// into, and the others.
    Inside(Begun, Begun),
}

impl Begun {
    fn whole(loops: &Loops, nest: usize) -> Option<Self> {
        let LoopNest { source, destination, run, loops, pairs, .. } = loops.nest_at(nest)?;
        let loops = loops.iter().filter(|repeat| repeat.count > 1).copied().collect();
        Some(Self { nest, start: (source, destination), run, loops, pairs: 0..pairs.len() })
    }

    fn bytes(&self) -> u64 {
        let block = self.loops.iter().fold(self.run, |bytes, repeat| bytes * repeat.count);
        block * self.pairs.len() as u64
    }

    fn split(self, room: u64, pairs_room: usize) -> Split {
        let bytes = self.bytes();
        if bytes <= room && self.pairs.len() <= pairs_room {
            return Split::Whole(self);
        }
        if self.pairs.len() > 1 {
            let fit = (room / (bytes / self.pairs.len() as u64)).min(pairs_room as u64) as usize;
            let cut = self.pairs.start + fit.max(1);
            let first = Self { pairs: self.pairs.start..cut, ..self.clone() };
            let rest = Self { pairs: cut..self.pairs.end, ..self };
            return if fit > 0 { Split::First(first, rest) } else { Split::Inside(first, rest) };
        }
        if let Some(outermost) = self.loops.first().copied() {
            let fit = room / (bytes / outermost.count);
            let cut = fit.max(1);
            let turns = |count: u64, start| {
                let mut loops = self.loops.clone();
                loops[0].count = count;
                if count == 1 {
                    loops.remove(0);
                }
                Self { start, loops, ..self.clone() }
            };
            let (source, destination) = self.start;
            let after =
                (source + cut * outermost.source, destination + cut * outermost.destination);
            let (first, rest) = (turns(cut, self.start), turns(outermost.count - cut, after));
            return if fit > 0 { Split::First(first, rest) } else { Split::Inside(first, rest) };
        }
        // A long run, in wide words where it can be.
        let cut = if room >= ALIGNMENT { room / ALIGNMENT * ALIGNMENT } else { room.max(1) };
        let first = Self { run: cut, ..self.clone() };
        let start = (self.start.0 + cut, self.start.1 + cut);
        Split::First(first, Self { run: self.run - cut, start, ..self })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Where each byte of the destination comes from; every byte once.
    fn carry_out<'l>(all: impl IntoIterator<Item = &'l Loops>) -> BTreeMap<u64, u64> {
        let mut map = BTreeMap::new();
        for copy in all.into_iter().flat_map(Loops::copies) {
            for byte in 0..copy.bytes {
                let known = map.insert(copy.destination + byte, copy.source + byte);
                assert_eq!(known, None, "a byte is written twice");
            }
        }
        map
    }

    prop_compose! {
        /// Nests whose runs never overlap on the destination: each has a space of its own there.
        fn some_loops()(
            tables in prop::collection::vec(prop::collection::vec(0u32..9, 1..6), 1..3),
            nests in prop::collection::vec(
                (0u64..500, 1u64..70, prop::collection::vec((1u64..4, 0u64..90), 0..4), any::<prop::sample::Index>()),
                0..6,
            ),
        ) -> Loops {
            let mut loops = Loops::default();
            for table in &tables {
                loops.add_table(table.iter().zip(0..).map(|(&source, at)| BlockPair { source, destination: at * 2 }));
            }
            let mut start = 1000;
            for (source, run, strides, table) in nests {
                let mut block = run + 3;
                let mut inner = vec![];
                for (count, source) in strides {
                    inner.insert(0, Loop { count, source, destination: block });
                    block = block * count + 5;
                }
                let table = table.index(tables.len());
                loops.add_nest((source, start), run, (100, block), &inner, table).unwrap();
                start += block * 20;
            }
            loops
        }
    }

    proptest! {
        #[test]
        fn gathering_and_scattering_is_the_transfer(loops in some_loops(), buffer in 0u64..1000) {
            let gather = loops.gather(buffer).unwrap();
            let scatter = loops.scatter(buffer).unwrap();
            prop_assert_eq!((gather.bytes(), scatter.bytes()), (loops.bytes(), loops.bytes()));
            let gathered = carry_out([&gather]);
            let end = buffer + loops.packed_bytes().unwrap();
            prop_assert!(gathered.keys().all(|at| (buffer..end).contains(at)));
            let through: BTreeMap<u64, u64> =
                carry_out([&scatter]).into_iter().map(|(to, at)| (to, gathered[&at])).collect();
            prop_assert_eq!(through, carry_out([&loops]));
        }

        #[test]
        fn parts_are_the_whole_and_no_larger_than_allowed(
            loops in some_loops(),
            bytes in 1u64..3000,
            nests in 1usize..4,
            pairs in 1usize..9,
        ) {
            let limits = CutLimits { bytes, nests, pairs };
            let mut cutting = Cutting::default();
            let mut parts = vec![];
            while let Some(part) = cutting.next(&loops, &limits) {
                prop_assert!(part.bytes() <= bytes && part.nests().len() <= nests);
                prop_assert!(part.pairs().len() <= pairs);
                parts.push(part);
            }
            prop_assert!(cutting.is_over(&loops));
            prop_assert_eq!(carry_out(&parts), carry_out([&loops]));
        }
    }

    /// Parts are filled: a request does not fall apart into crumbs.
    #[test]
    fn parts_are_large() {
        let mut loops = Loops::default();
        let table = loops.add_table((0..1000).map(|at| BlockPair { source: at, destination: at }));
        let tokens = Loop { count: 16, source: 1024, destination: 512 };
        for layer in 0..80u64 {
            let start = (layer << 30, layer << 30);
            loops.add_nest(start, 512, (16 << 10, 8 << 10), &[tokens], table).unwrap();
        }
        let limits = CutLimits { bytes: 1 << 20, nests: 256, pairs: 1 << 14 };
        let mut cutting = Cutting::default();
        let parts: Vec<Loops> = std::iter::from_fn(|| cutting.next(&loops, &limits)).collect();
        let least = loops.bytes().div_ceil(limits.bytes) as usize;
        assert!(parts.len() <= least * 4 / 3 + 1, "{} parts, where {least} would do", parts.len());
    }
}
