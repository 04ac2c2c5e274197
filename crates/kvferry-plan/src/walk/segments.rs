//! Stretches of entries that lie evenly on both sides.

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

/// The segments of a request for one pairing: stretches of entries that lie evenly on both sides.
#[derive(Clone, Debug, Default)]
pub(crate) struct Segments {
    /// Every shape, and the blocks that the segments of that shape start in, in the order of the tables.
    shapes: Vec<(Shape, Vec<BlockPair>)>,
    /// The segment that the next stretch may still continue.
    open: Option<(Slot, Slot, Shape)>,
}

impl Segments {
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

    /// Adds whole blocks of so many entries. Most of a long request is that, and most often they lie scattered:
    /// those that neither continue the one before nor are continued by the one after are added at once.
    pub(crate) fn push_blocks(&mut self, sources: &[u32], destinations: &[u32], entries: u64) {
        let slot = |ids: &[u32], at: usize| Slot { block: ids[at], within: Within::default() };
        let follows = |ids: &[u32], at: usize| ids[at] == ids[at - 1].wrapping_add(1);
        let continues = |at| follows(sources, at) && follows(destinations, at);
        let mut at = 0;
        while at < sources.len() {
            self.push(slot(sources, at), slot(destinations, at), entries);
            let start = at + 1;
            at = start;
            let mut follows_on = at < sources.len() && continues(at);
            while at + 1 < sources.len() && !follows_on {
                follows_on = continues(at + 1);
                at += usize::from(!follows_on);
            }
            if at > start {
                self.close();
                let alone = self.of_shape(Shape { entries, repeats: 1, ..Shape::default() });
                let pairs = sources[start..at].iter().zip(&destinations[start..at]);
                alone
                    .extend(pairs.map(|(&source, &destination)| BlockPair { source, destination }));
            }
        }
    }

    fn close(&mut self) {
        let Some((source, destination, shape)) = self.open.take() else { return };
        let pair = BlockPair { source: source.block, destination: destination.block };
        self.of_shape(shape).push(pair);
    }

    fn of_shape(&mut self, shape: Shape) -> &mut Vec<BlockPair> {
        // Mostly the shape of the segment before; where block sizes differ, some take turns.
        let known = self.shapes.iter().rposition(|(known, _)| *known == shape);
        let at = known.unwrap_or_else(|| {
            self.shapes.push((shape, vec![]));
            self.shapes.len() - 1
        });
        &mut self.shapes[at].1
    }

    /// All of them, by their shape.
    pub(crate) fn by_shape(mut self) -> Vec<(Shape, Vec<BlockPair>)> {
        self.close();
        self.shapes
    }
}
