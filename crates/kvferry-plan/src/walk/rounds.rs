//! Blocks of two sizes, in rounds: from where blocks of both sides start together to the next such place. All
//! rounds are cut alike, so what the cuts are is worked out once.

use kvferry_layout::BlockPair;
use kvferry_layout::arithmetic::gcd;

use crate::walk::block_layout::{BlockLayout, Walker};
use crate::walk::segments::Segments;
use crate::walk::slot::Within;

/// Rounds of more cuts than this are walked cut by cut: there is little to gain.
const MOST_CUTS: u64 = 64;

/// How rounds are cut.
pub(crate) struct Rounds {
    /// Entries of a round; 0 where blocks cannot be taken this way.
    entries: u64,
    /// Blocks of each side in a round.
    blocks: (usize, usize),
    /// Empty before the first round.
    cuts: Vec<Cut>,
    /// Whether their shapes are known, which are those of segments that are there.
    numbered: bool,
    /// Whether there are dead blocks from where this was asked first.
    dead: Option<bool>,
}

/// A stretch of a round: a part of one block on each side.
struct Cut {
    /// The block on each side, counted from the start of the round.
    blocks: (usize, usize),
    within: (Within, Within),
    entries: u64,
    shape: u32,
    /// Whether the one before is in another block: on the source, on the destination.
    moves: (bool, bool),
}

/// What rounds have covered.
#[derive(Default)]
pub(crate) struct Taken {
    pub(crate) entries: u64,
    pub(crate) blocks: (usize, usize),
}

impl Rounds {
    pub(crate) fn new(source: &BlockLayout, destination: &BlockLayout) -> Self {
        let (ours, theirs) = (source.entries, destination.entries);
        let even = |layout: &BlockLayout| layout.even == layout.entries;
        let divisor = gcd(ours, theirs);
        let cuts = (ours / divisor).saturating_add(theirs / divisor) - 1;
        let suits = even(source) && even(destination) && ours != theirs && cuts <= MOST_CUTS;
        let entries = if suits { (ours / divisor).checked_mul(theirs) } else { None };
        Self {
            entries: entries.unwrap_or(0),
            blocks: ((theirs / divisor) as usize, (ours / divisor) as usize),
            cuts: vec![],
            numbered: false,
            dead: None,
        }
    }

    /// Adds as many rounds as there are from here on, of at most `entries` entries, up to one that has
    /// dead blocks, or stretches that may continue each other.
    pub(crate) fn take(
        &mut self,
        source: &Walker<'_>,
        destination: &Walker<'_>,
        entries: u64,
        segments: &mut Segments,
    ) -> Taken {
        if self.entries == 0 || entries < self.entries {
            return Taken::default();
        }
        if !source.at_start() || !destination.at_start() {
            return Taken::default();
        }
        if self.cuts.is_empty() {
            self.cut(source.layout.entries, destination.layout.entries);
        }
        let (a, b) = self.blocks;
        let (sources, destinations) = (source.ids(), destination.ids());
        let rounds = usize::try_from(entries / self.entries).unwrap_or(usize::MAX);
        let by_round = || sources.chunks_exact(a).zip(destinations.chunks_exact(b)).take(rounds);
        // Most tables have no dead blocks at all: that is asked once.
        let dead = *self.dead.get_or_insert_with(|| {
            let dead = |walker: &Walker<'_>| walker.live(usize::MAX) < walker.ids().len();
            dead(source) || dead(destination)
        });
        let is_dead = |walker: &Walker<'_>, ids: &[u32]| {
            dead && walker.layout.null_block.is_some_and(|null| ids.contains(&null))
        };
        let ends = |(sources, destinations): (&[u32], &[u32])| {
            self.cuts.iter().any(|cut| cut.may_continue(sources, destinations))
                || is_dead(source, sources)
                || is_dead(destination, destinations)
        };
        let taken = by_round().position(ends).unwrap_or_else(|| by_round().len());
        if taken == 0 {
            return Taken::default();
        }
        if !std::mem::replace(&mut self.numbered, true) {
            for cut in &mut self.cuts {
                cut.shape = segments.number_stretch(cut.within.0, cut.within.1, cut.entries);
            }
        }
        let cuts = &self.cuts;
        segments.push_numbered(
            by_round().take(taken).map(|(sources, destinations)| {
                cuts.iter().map(|cut| BlockPair {
                    source: sources[cut.blocks.0],
                    destination: destinations[cut.blocks.1],
                })
            }),
            cuts.iter().map(|cut| cut.shape),
        );
        Taken {
            entries: taken as u64 * self.entries,
            blocks: (taken * self.blocks.0, taken * self.blocks.1),
        }
    }

    /// Works the cuts out.
    fn cut(&mut self, ours: u64, theirs: u64) {
        let mut at = 0;
        while at < self.entries {
            let blocks = ((at / ours) as usize, (at / theirs) as usize);
            let (source, destination) = (at % ours, at % theirs);
            let entries = (ours - source).min(theirs - destination);
            let within =
                (Within { kernel: 0, entry: source }, Within { kernel: 0, entry: destination });
            let moves = self.cuts.last().map_or((false, false), |last| {
                (blocks.0 > last.blocks.0, blocks.1 > last.blocks.1)
            });
            self.cuts.push(Cut { blocks, within, entries, shape: 0, moves });
            at += entries;
        }
    }
}

impl Cut {
    /// Whether it may continue the one before, with these blocks: where it is in another one, that is the next.
    fn may_continue(&self, sources: &[u32], destinations: &[u32]) -> bool {
        let next =
            |ids: &[u32], at: usize, moves: bool| !moves || ids[at] == ids[at - 1].wrapping_add(1);
        (self.moves.0 || self.moves.1)
            && next(sources, self.blocks.0, self.moves.0)
            && next(destinations, self.blocks.1, self.moves.1)
    }
}

#[cfg(test)]
mod tests {
    use kvferry_layout::{Phase, Window};
    use proptest::prelude::*;

    use super::*;
    use crate::request::{Side, Table};
    use crate::walk::segments::Segment;

    fn layout(entries: u64) -> BlockLayout {
        BlockLayout {
            group: 0,
            entries,
            even: entries,
            split: 1,
            phase: Phase::ALL,
            window: Window::FULL,
            blocks: 1000,
            null_block: Some(0),
        }
    }

    /// Cut by cut, as blocks of any kind are walked.
    fn plain(walkers: (Walker<'_>, Walker<'_>), mut entries: u64, segments: &mut Segments) {
        let (mut source, mut destination) = walkers;
        while entries > 0 {
            let many = source.even_left().min(destination.even_left()).min(entries);
            segments.push(source.slot, destination.slot, many);
            entries -= many;
            if entries > 0 {
                source.advance(many).unwrap();
                destination.advance(many).unwrap();
            }
        }
    }

    fn seen(segments: &Segments) -> Vec<(BlockPair, crate::walk::Shape)> {
        let list = segments.of(0);
        let with_shape = |one: Segment| (one.blocks, list.shapes[one.shape as usize]);
        (0..list.len()).map(|index| with_shape(list.at(index))).collect()
    }

    proptest! {
        /// Rounds make the segments that one cut after the other makes, and name no shape that none has.
        #[test]
        fn rounds_are_what_their_cuts_are(
            (ours, theirs) in (1u64..13, 1u64..13),
            entries in 1u64..150,
            // Many follow each other.
            ids in prop::collection::vec((1u32..9, 1u32..9), 151),
        ) {
            let (mut from, mut to): (Vec<u32>, Vec<u32>) = ids.into_iter().unzip();
            // What is not needed is dead.
            from[entries.div_ceil(ours) as usize..].fill(0);
            to[entries.div_ceil(theirs) as usize..].fill(0);
            let (from, to) = (Table::new(&from), Table::new(&to));
            let (source, destination) = (layout(ours), layout(theirs));
            let enter = || (
                source.enter(Side::Source, &from, 0).unwrap(),
                destination.enter(Side::Destination, &to, 0).unwrap(),
            );
            let mut expected = Segments::default();
            plain(enter(), entries, &mut expected);
            expected.end();

            let (mut rounds, mut made, mut done) =
                (Rounds::new(&source, &destination), Segments::default(), 0);
            let mut walkers = enter();
            while done < entries {
                let taken = rounds.take(&walkers.0, &walkers.1, entries - done, &mut made);
                let (many, blocks) = if taken.entries > 0 {
                    (taken.entries, taken.blocks)
                } else {
                    // One round, or what is left, without them.
                    let many = if rounds.entries > 0 { rounds.entries } else { entries };
                    let many = many.min(entries - done);
                    plain(walkers, many, &mut made);
                    (many, rounds.blocks)
                };
                done += many;
                if done >= entries {
                    break;
                }
                let at = |layout: &BlockLayout| done / layout.entries;
                prop_assert!(blocks.0 as u64 * ours == many && blocks.1 as u64 * theirs == many);
                walkers = (
                    source.enter(Side::Source, &from, at(&source) * ours).unwrap(),
                    destination.enter(Side::Destination, &to, at(&destination) * theirs).unwrap(),
                );
            }
            made.end();
            prop_assert_eq!(seen(&made), seen(&expected));
            let used = |segments: &Segments| segments.of(0).numbers.iter().copied().max();
            prop_assert_eq!(made.of(0).shapes.len() as u32, used(&made).unwrap() + 1);
        }
    }
}
