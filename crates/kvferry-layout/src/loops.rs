//! A transfer as loops: what an executor needs that works out addresses for itself.
//!
//! A list of copies grows with the copies. Loops do not: a few nests say how the bytes of a block lie
//! on both sides, and a table of block pairs, which many nests share, says which blocks. The same words
//! describe a transfer, a gather (the destination is a buffer), a scatter (the source is one) and a
//! digest.

use std::ops::Range;

use thiserror::Error;

use crate::copy::ByteCopy;
use crate::strided::Fusible;

/// The most loops around a run.
pub const MAX_LOOPS: usize = 12;

/// `count` repetitions, a stride apart on each side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Loop {
    /// How many, at least one.
    pub count: u64,
    /// Bytes from one to the next on the source.
    pub source: u64,
    /// Bytes from one to the next on the destination.
    pub destination: u64,
}

impl Fusible for Loop {
    fn count(&self) -> u64 {
        self.count
    }

    fn repeats_run(&self, run: u64) -> bool {
        (self.source, self.destination) == (run, run)
    }

    fn around(&self, inner: &Self) -> Option<Self> {
        let continued = inner.source.checked_mul(inner.count) == Some(self.source)
            && inner.destination.checked_mul(inner.count) == Some(self.destination);
        let count = self.count.checked_mul(inner.count).filter(|_| continued)?;
        Some(Self { count, ..*inner })
    }
}

/// A block of the source, and the block of the destination that takes what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct BlockPair {
    /// Block number on the source.
    pub source: u32,
    /// Block number on the destination.
    pub destination: u32,
}

/// Loops around a run, for every pair of a table of blocks: the run at index `i` of the loops for the
/// pair `p` starts at
///
/// ```text
/// source      + p.source      * blocks.0 + sum(i[l] * loops[l].source)
/// destination + p.destination * blocks.1 + sum(i[l] * loops[l].destination)
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopNest<'l> {
    /// Where the first run of block 0 starts on the source.
    pub source: u64,
    /// Where it starts on the destination.
    pub destination: u64,
    /// Bytes of a run.
    pub run: u64,
    /// Bytes from one block to the next on the source and on the destination.
    pub blocks: (u64, u64),
    /// Loops around the run, the outermost first.
    pub loops: &'l [Loop],
    /// The blocks.
    pub pairs: &'l [BlockPair],
    /// Index of their table: nests with the same index have the same blocks.
    pub table: usize,
    /// The lowest block number on each side.
    pub lowest: BlockPair,
    /// The highest block number on each side.
    pub highest: BlockPair,
}

/// What is wrong with loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LoopsError {
    /// More loops than [`MAX_LOOPS`].
    ///
    /// What to do: report it; a plan never makes so many.
    #[error("a nest has {0} loops; at most {MAX_LOOPS} are allowed")]
    TooDeep(usize),
    /// A nest that names a table of blocks that is not there.
    ///
    /// What to do: report it; a plan never makes such a nest.
    #[error("a nest names table {0}, but there are only {1}")]
    NoSuchTable(usize, usize),
    /// A loop that never runs, a run of no bytes, or a table of no blocks.
    ///
    /// What to do: report it; a plan never makes such a nest.
    #[error("a nest moves nothing")]
    Empty,
    /// The last byte of a nest lies beyond the end of the address space.
    ///
    /// What to do: check the addresses in the manifests of both sides.
    #[error(
        "a nest that starts at {source_start:#x} and {destination:#x} leaves the address space"
    )]
    TooFar {
        /// Its start on the source.
        source_start: u64,
        /// Its start on the destination.
        destination: u64,
    },
}

/// Nests, and the tables of blocks that they are walked for. No two runs write the same byte, so the
/// order does not matter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loops {
    nests: Vec<Nest>,
    loops: Vec<Loop>,
    tables: Vec<Table>,
    pairs: Vec<BlockPair>,
    bytes: u64,
    runs: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Nest {
    source: u64,
    destination: u64,
    run: u64,
    blocks: (u64, u64),
    loops: Range<usize>,
    table: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Table {
    pairs: Range<usize>,
    lowest: BlockPair,
    highest: BlockPair,
}

impl Loops {
    /// Adds a table of blocks; returns its index.
    pub fn add_table(&mut self, pairs: impl IntoIterator<Item = BlockPair>) -> usize {
        let start = self.pairs.len();
        self.pairs.extend(pairs);
        let mut lowest = BlockPair { source: u32::MAX, destination: u32::MAX };
        let mut highest = BlockPair::default();
        for pair in &self.pairs[start..] {
            lowest.source = lowest.source.min(pair.source);
            lowest.destination = lowest.destination.min(pair.destination);
            highest.source = highest.source.max(pair.source);
            highest.destination = highest.destination.max(pair.destination);
        }
        self.tables.push(Table { pairs: start..self.pairs.len(), lowest, highest });
        self.tables.len() - 1
    }

    /// Adds a nest for a table that was added before.
    pub fn add_nest(
        &mut self,
        (source, destination): (u64, u64),
        run: u64,
        blocks: (u64, u64),
        loops: &[Loop],
        table: usize,
    ) -> Result<(), LoopsError> {
        let Some(pairs) = self.tables.get(table).map(|table| table.pairs.len()) else {
            return Err(LoopsError::NoSuchTable(table, self.tables.len()));
        };
        if loops.len() > MAX_LOOPS {
            return Err(LoopsError::TooDeep(loops.len()));
        }
        if run == 0 || pairs == 0 || loops.iter().any(|repeat| repeat.count == 0) {
            return Err(LoopsError::Empty);
        }
        let start = self.loops.len();
        self.loops.extend_from_slice(loops);
        let loops = start..self.loops.len();
        let nest = Nest { source, destination, run, blocks, loops, table };
        let added = self.nest(&nest);
        let sums = added.extents().zip(added.checked_runs()).and_then(|(_, runs)| {
            let bytes = runs.checked_mul(run)?.checked_add(self.bytes)?;
            Some((self.runs.checked_add(runs)?, bytes))
        });
        let Some((runs, bytes)) = sums else {
            self.loops.truncate(start);
            return Err(LoopsError::TooFar { source_start: source, destination });
        };
        (self.runs, self.bytes) = (runs, bytes);
        self.nests.push(nest);
        Ok(())
    }

    /// Some of the nests, and the tables that they name.
    pub fn of(&self, nests: impl Fn(&LoopNest<'_>) -> bool) -> Self {
        let mut some = Self::default();
        let mut numbers = vec![None; self.tables.len()];
        for nest in self.nests().filter(nests) {
            let pairs = || nest.pairs.iter().copied();
            let table = *numbers[nest.table].get_or_insert_with(|| some.add_table(pairs()));
            let start = (nest.source, nest.destination);
            let added = some.add_nest(start, nest.run, nest.blocks, nest.loops, table);
            debug_assert!(added.is_ok(), "a part of sound loops is sound: {added:?}");
        }
        some
    }

    /// The nests.
    pub fn nests(&self) -> impl ExactSizeIterator<Item = LoopNest<'_>> {
        self.nests.iter().map(|nest| self.nest(nest))
    }

    /// The nest number `index`.
    pub fn nest_at(&self, index: usize) -> Option<LoopNest<'_>> {
        self.nests.get(index).map(|nest| self.nest(nest))
    }

    fn nest(&self, nest: &Nest) -> LoopNest<'_> {
        let Nest { source, destination, run, blocks, ref loops, table } = *nest;
        let Table { pairs, lowest, highest } = &self.tables[table];
        LoopNest {
            source,
            destination,
            run,
            blocks,
            loops: &self.loops[loops.clone()],
            pairs: &self.pairs[pairs.clone()],
            table,
            lowest: *lowest,
            highest: *highest,
        }
    }

    /// How many tables there are.
    pub fn tables(&self) -> usize {
        self.tables.len()
    }

    /// The pairs of all tables, one after the other.
    pub fn pairs(&self) -> &[BlockPair] {
        &self.pairs
    }

    /// Where the pairs of a table lie among all [`pairs`](Self::pairs).
    pub fn table(&self, table: usize) -> Range<usize> {
        self.tables.get(table).map_or(0..0, |table| table.pairs.clone())
    }

    /// Bytes that all of it moves.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Runs that all of it moves. Runs that touch are not joined: there may be more than copies.
    pub fn runs(&self) -> u64 {
        self.runs
    }

    /// Whether there is nothing to move.
    pub fn is_empty(&self) -> bool {
        self.nests.is_empty()
    }

    /// Every run as a copy, nest by nest. For executors that know nothing but lists, and for tests.
    pub fn copies(&self) -> impl Iterator<Item = ByteCopy> {
        self.nests().flat_map(|nest| (0..nest.runs()).map(move |index| nest.copy(index)))
    }
}

impl LoopNest<'_> {
    /// How many runs there are.
    pub fn runs(&self) -> u64 {
        self.checked_runs().unwrap_or(u64::MAX)
    }

    fn checked_runs(&self) -> Option<u64> {
        let mut counts = self.loops.iter().map(|repeat| repeat.count);
        counts.try_fold(self.pairs.len() as u64, u64::checked_mul)
    }

    /// The run number `index`: pairs inside of the loops that are wider than a block of the
    /// destination, and outside of the others.
    pub fn copy(&self, index: u64) -> ByteCopy {
        let (mut source, mut destination, mut left) = (self.source, self.destination, index);
        let outer = self.outer();
        let mut step = |repeat: &Loop| {
            let at = left % repeat.count;
            left /= repeat.count;
            source += at * repeat.source;
            destination += at * repeat.destination;
        };
        self.loops[outer..].iter().rev().for_each(&mut step);
        let pairs = Loop { count: self.pairs.len() as u64, ..Loop::default() };
        let before = index / self.loops[outer..].iter().map(|repeat| repeat.count).product::<u64>();
        step(&pairs);
        self.loops[..outer].iter().rev().for_each(&mut step);
        let pair = self.pairs[(before % pairs.count) as usize];
        source += u64::from(pair.source) * self.blocks.0;
        destination += u64::from(pair.destination) * self.blocks.1;
        ByteCopy { source, destination, bytes: self.run }
    }

    /// How many of the loops, from the outermost on, are wider than a block of the destination.
    pub fn outer(&self) -> usize {
        let inner = self.loops.iter().position(|repeat| repeat.destination < self.blocks.1);
        inner.unwrap_or(self.loops.len())
    }

    /// From the first byte that is touched to the one after the last, on the source and on the
    /// destination. `None` if that is beyond the end of the address space.
    pub fn extents(&self) -> Option<(Range<u64>, Range<u64>)> {
        let reach = |stride: fn(&Loop) -> u64| {
            self.loops.iter().try_fold(self.run, |reach, repeat| {
                reach.checked_add((repeat.count - 1).checked_mul(stride(repeat))?)
            })
        };
        let extent = |start: u64, block: u64, (lowest, highest): (u32, u32), reach: u64| {
            let first = start.checked_add(block.checked_mul(lowest.into())?)?;
            let last = start.checked_add(block.checked_mul(highest.into())?)?;
            Some(first..last.checked_add(reach)?)
        };
        let Self { lowest, highest, .. } = self;
        let (source, destination) =
            ((lowest.source, highest.source), (lowest.destination, highest.destination));
        let (read, written) = (reach(|repeat| repeat.source)?, reach(|repeat| repeat.destination)?);
        Some((
            extent(self.source, self.blocks.0, source, read)?,
            extent(self.destination, self.blocks.1, destination, written)?,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(source: u32, destination: u32) -> BlockPair {
        BlockPair { source, destination }
    }

    #[test]
    fn every_run_of_every_pair_is_yielded_once() {
        let mut loops = Loops::default();
        let table = loops.add_table([pair(1, 0), pair(0, 2)]);
        let layer = Loop { count: 2, source: 1000, destination: 5000 };
        let head = Loop { count: 3, source: 8, destination: 16 };
        loops.add_nest((0, 10), 4, (100, 300), &[layer, head], table).unwrap();
        let mut expected = vec![];
        for at in 0..2 {
            for (from, to) in [(100, 0), (0, 600)] {
                for head in 0..3 {
                    expected.push(ByteCopy {
                        source: at * 1000 + from + head * 8,
                        destination: 10 + at * 5000 + to + head * 16,
                        bytes: 4,
                    });
                }
            }
        }
        assert_eq!(loops.copies().collect::<Vec<_>>(), expected);
        assert_eq!((loops.runs(), loops.bytes()), (12, 48));
        let nest = loops.nests().next().unwrap();
        assert_eq!(nest.extents(), Some((0..1120, 10..5646)));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let mut loops = Loops::default();
        let (table, none) = (loops.add_table([pair(1, 1)]), loops.add_table([]));
        let far = Loop { count: 1 << 40, source: 1 << 40, destination: 0 };
        let zero = Loop::default();
        let add = |loops: &mut Loops, run, inner: &[Loop], table| {
            loops.add_nest((5, 6), run, (1, 1), inner, table)
        };
        assert_eq!(add(&mut loops, 1, &[], 2), Err(LoopsError::NoSuchTable(2, 2)));
        assert_eq!(add(&mut loops, 0, &[], table), Err(LoopsError::Empty));
        assert_eq!(add(&mut loops, 1, &[], none), Err(LoopsError::Empty));
        assert_eq!(add(&mut loops, 1, &[zero], table), Err(LoopsError::Empty));
        let too_far = LoopsError::TooFar { source_start: 5, destination: 6 };
        assert_eq!(add(&mut loops, 1, &[far], table), Err(too_far));
        assert_eq!(add(&mut loops, u64::MAX, &[], table), Err(too_far));
        let deep = [Loop { count: 2, source: 1, destination: 1 }; MAX_LOOPS + 1];
        assert_eq!(add(&mut loops, 1, &deep, table), Err(LoopsError::TooDeep(MAX_LOOPS + 1)));
        assert!(loops.is_empty() && loops.loops.is_empty());
    }
}
