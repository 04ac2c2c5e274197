//! Stretches of entries that lie evenly on both sides.

use std::cell::RefCell;

use kvferry_layout::BlockPair;

use crate::nest::Nest;
use crate::walk::slot::{Slot, Step, Within};

/// How a segment lies in its blocks: where it starts, how many entries lie evenly, and how often that
/// repeats at which steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) entries: u64,
    pub(crate) repeats: u64,
    pub(crate) source: Within,
    pub(crate) source_step: Step,
    pub(crate) destination: Within,
    pub(crate) destination_step: Step,
}

impl Shape {
    /// Bytes from one repetition to the next for a nest, on the source and on the destination.
    pub(crate) fn steps(&self, nest: &Nest) -> (u64, u64) {
        (
            self.source_step.offset(&nest.steps.source),
            self.destination_step.offset(&nest.steps.destination),
        )
    }
}

/// A stretch of entries that lie evenly on both sides: the blocks it starts in, and its shape.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) blocks: BlockPair,
    /// Index among the shapes of its pairing.
    pub(crate) shape: u32,
}

/// The segments of a pairing, and the shapes that they name.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SegmentList<'s> {
    pub(crate) blocks: &'s [BlockPair],
    /// For each of them, the index of its shape.
    pub(crate) numbers: &'s [u32],
    pub(crate) shapes: &'s [Shape],
}

impl SegmentList<'_> {
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    #[inline(always)]
    pub(crate) fn at(&self, index: usize) -> Segment {
        Segment { blocks: self.blocks[index], shape: self.numbers[index] }
    }
}

/// The segments of a request, for one pairing after the other, each in the order of its tables.
#[derive(Clone, Debug, Default)]
pub(crate) struct Segments {
    shapes: Vec<Shape>,
    /// Blocks, and the index of their shape among those of their pairing.
    list: List,
    /// Where in `shapes` and in `list` each pairing's part ends.
    ends: Vec<(usize, usize)>,
    /// The segment that the next stretch may still continue.
    open: Option<(Slot, Slot, Shape)>,
}

/// What segments there are: blocks apart from the rest, so that whole tables of them are copied at once.
#[derive(Clone, Debug, Default)]
struct List {
    blocks: Vec<BlockPair>,
    numbers: Vec<u32>,
}

/// Lists of at most so many segments are kept for the next request: memory that is fresh from the system
/// costs more than to write to it.
const KEPT: usize = 1 << 16;

thread_local! {
    static SPARE: RefCell<List> = const { RefCell::new(List { blocks: vec![], numbers: vec![] }) };
}

impl Drop for Segments {
    fn drop(&mut self) {
        if self.list.blocks.capacity() > KEPT {
            return;
        }
        // A thread that ends has nothing to keep it for.
        let _ = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.blocks.capacity() < self.list.blocks.capacity() {
                *spare = std::mem::take(&mut self.list);
            }
        });
    }
}

impl Segments {
    /// None yet, with room for as many as a request of this thread had before.
    pub(crate) fn new() -> Self {
        let mut list = SPARE.take();
        list.blocks.clear();
        list.numbers.clear();
        Self { shapes: vec![], list, ends: vec![], open: None }
    }

    /// The segments of pairing `index`.
    pub(crate) fn of(&self, index: usize) -> SegmentList<'_> {
        let start = self.start(index);
        let end = self.ends[index];
        SegmentList {
            blocks: &self.list.blocks[start.1..end.1],
            numbers: &self.list.numbers[start.1..end.1],
            shapes: &self.shapes[start.0..end.0],
        }
    }

    fn start(&self, index: usize) -> (usize, usize) {
        if index == 0 { (0, 0) } else { self.ends[index - 1] }
    }

    /// Ends a pairing.
    pub(crate) fn end(&mut self) {
        self.close();
        self.ends.push((self.shapes.len(), self.list.blocks.len()));
    }

    /// Adds a stretch, as a further repetition of the last one where it continues it.
    pub(crate) fn push(&mut self, source: Slot, destination: Slot, entries: u64) {
        if let Some((first_source, first_destination, shape)) = &mut self.open
            && shape.entries == entries
        {
            if shape.repeats == 1 {
                let steps =
                    first_source.step_to(&source).zip(first_destination.step_to(&destination));
                if let Some((source_step, destination_step)) = steps {
                    *shape = Shape { repeats: 2, source_step, destination_step, ..*shape };
                    return;
                }
            } else if first_source.ahead(&shape.source_step, shape.repeats) == Some(source)
                && first_destination.ahead(&shape.destination_step, shape.repeats)
                    == Some(destination)
            {
                shape.repeats += 1;
                return;
            }
        }
        self.open(source, destination, entries);
    }

    /// Adds `repeats` stretches that fill blocks in a row on both sides.
    pub(crate) fn push_blocks(
        &mut self,
        source: u32,
        destination: u32,
        entries: u64,
        repeats: u64,
    ) {
        let slot = |block| Slot { block, within: Within::default() };
        self.push(slot(source), slot(destination), entries);
        let mut left = repeats - 1;
        let in_a_row = |shape: &Shape| {
            shape.repeats == 1
                || (shape.source_step, shape.destination_step) == (Step::BLOCK, Step::BLOCK)
        };
        if left > 0 && !self.open.as_ref().is_some_and(|(_, _, shape)| in_a_row(shape)) {
            // The first one continued something else; the others follow by themselves.
            self.open(slot(source + 1), slot(destination + 1), entries);
            left -= 1;
        }
        if let Some((_, _, shape)) = self.open.as_mut().filter(|_| left > 0) {
            (shape.source_step, shape.destination_step) = (Step::BLOCK, Step::BLOCK);
            shape.repeats += left;
        }
    }

    /// Adds stretches that fill one block each, none of which continues another or the one before.
    pub(crate) fn push_scattered(&mut self, sources: &[u32], destinations: &[u32], entries: u64) {
        if sources.is_empty() {
            return;
        }
        self.close();
        let shape = self.number(Shape { entries, repeats: 1, ..Shape::default() });
        let pair = |(&source, &destination)| BlockPair { source, destination };
        self.list.blocks.extend(sources.iter().zip(destinations).map(pair));
        self.list.numbers.resize(self.list.blocks.len(), shape);
    }

    /// Numbers a stretch that repeats nothing, for [`push_numbered`](Self::push_numbered).
    pub(crate) fn number_stretch(
        &mut self,
        source: Within,
        destination: Within,
        entries: u64,
    ) -> u32 {
        self.close();
        self.number(Shape { entries, repeats: 1, source, destination, ..Shape::default() })
    }

    /// Adds stretches in rounds, none of which continues another or the one before. The shapes are those of
    /// one round.
    pub(crate) fn push_numbered(
        &mut self,
        rounds: impl Iterator<Item = impl Iterator<Item = BlockPair>>,
        shapes: impl Iterator<Item = u32> + Clone,
    ) {
        self.close();
        for round in rounds {
            self.list.blocks.extend(round);
            self.list.numbers.extend(shapes.clone());
        }
    }

    /// Starts a new segment.
    fn open(&mut self, source: Slot, destination: Slot, entries: u64) {
        self.close();
        let shape = Shape {
            entries,
            repeats: 1,
            source: source.within,
            destination: destination.within,
            ..Shape::default()
        };
        self.open = Some((source, destination, shape));
    }

    fn close(&mut self) {
        let Some((source, destination, shape)) = self.open.take() else { return };
        let shape = self.number(shape);
        let (source, destination) = (source.block, destination.block);
        self.list.blocks.push(BlockPair { source, destination });
        self.list.numbers.push(shape);
    }

    /// The index of a shape among those of the pairing at hand.
    fn number(&mut self, shape: Shape) -> u32 {
        // Mostly the shape of the segment before; where block sizes differ, some take turns.
        let known = &self.shapes[self.start(self.ends.len()).0..];
        let recent = known.iter().rposition(|known| *known == shape);
        let index = recent.unwrap_or(known.len());
        if recent.is_none() {
            self.shapes.push(shape);
        }
        index as u32
    }
}
