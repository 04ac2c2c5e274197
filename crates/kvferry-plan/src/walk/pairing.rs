//! From two block tables to segments.

use kvferry_layout::{Law, Phase};

use crate::request::{RequestError, Side, Table};
use crate::walk::block_layout::{BlockLayout, Walker};
use crate::walk::rounds::Rounds;
use crate::walk::segments::Segments;

/// How a part's entries follow each other on the two sides. All parts with the same pairing walk the
/// same segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Pairing {
    pub(crate) law: Law,
    /// Which entries.
    pub(crate) phase: Phase,
    pub(crate) source: BlockLayout,
    pub(crate) destination: BlockLayout,
}

impl Pairing {
    /// Adds the segments of entries `first..end`.
    pub(crate) fn walk(
        &self,
        first: u64,
        end: u64,
        (source, destination): (&Table<'_>, &Table<'_>),
        segments: &mut Segments,
    ) -> Result<(), RequestError> {
        let (all, modulus, held) = (self.phase.is_all(), self.phase.modulus, self.phase.held);
        let mut rounds = Rounds::new(&self.source, &self.destination);
        let mut entry = first;
        while entry < end {
            let mut turn_end = end;
            if !all {
                let cycle = entry - entry % modulus;
                entry = entry.max(cycle.saturating_add(held.start));
                turn_end = turn_end.min(cycle.saturating_add(held.end));
                if entry >= turn_end {
                    entry = cycle.saturating_add(modulus);
                    continue;
                }
            }
            let mut source = self.source.enter(Side::Source, source, entry)?;
            let mut destination = self.destination.enter(Side::Destination, destination, entry)?;
            loop {
                let blocks = source.whole_blocks(&destination, turn_end - entry);
                if blocks > 0 {
                    push_whole_blocks(&source, &destination, blocks, segments);
                    let entries = blocks as u64 * source.layout.entries;
                    entry += entries;
                    if entry >= turn_end {
                        break;
                    }
                    source.skip_blocks(blocks)?;
                    destination.skip_blocks(blocks)?;
                    continue;
                }
                let rounds = rounds.take(&source, &destination, turn_end - entry, segments);
                if rounds.entries > 0 {
                    entry += rounds.entries;
                    if entry >= turn_end {
                        break;
                    }
                    source.skip_blocks(rounds.blocks.0)?;
                    destination.skip_blocks(rounds.blocks.1)?;
                    continue;
                }
                let even = source.even_left().min(destination.even_left());
                let entries = even.min(turn_end - entry);
                segments.push(source.slot, destination.slot, entries);
                entry += entries;
                if entry >= turn_end {
                    break;
                }
                source.advance(entries)?;
                destination.advance(entries)?;
            }
        }
        Ok(())
    }
}

/// Adds `blocks` whole blocks of both sides, in runs of ids that follow each other.
fn push_whole_blocks(
    source: &Walker<'_>,
    destination: &Walker<'_>,
    blocks: usize,
    segments: &mut Segments,
) {
    let BlockLayout { even, split, .. } = *source.layout;
    let (sources, destinations) = (&source.ids()[..blocks], &destination.ids()[..blocks]);
    let mut start = 0;
    while start < blocks {
        let mut end = start + 1;
        while end < blocks
            && sources[end] == sources[end - 1].wrapping_add(1)
            && destinations[end] == destinations[end - 1].wrapping_add(1)
        {
            end += 1;
        }
        let first = |ids: &[u32]| ids[start].wrapping_mul(split as u32);
        let repeats = (end - start) as u64 * split;
        segments.push_blocks(first(sources), first(destinations), even, repeats);
        start = end;
        if repeats == 1 {
            // Most often blocks lie scattered: those that neither continue the one before nor are
            // continued by the one after. The last may still be continued by what comes.
            let end = start + kvferry_scan::apart(&sources[start..], &destinations[start..]);
            segments.push_scattered(&sources[start..end], &destinations[start..end], even);
            start = end;
        }
    }
}
