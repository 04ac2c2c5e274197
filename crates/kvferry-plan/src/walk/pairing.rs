//! From two block tables to segments.

use kvferry_layout::{Law, Phase};

use crate::request::{RequestError, Side, Table};
use crate::walk::block_layout::BlockLayout;
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
    /// The segments of entries `first..end`.
    pub(crate) fn walk(
        &self,
        first: u64,
        end: u64,
        (source, destination): (&Table<'_>, &Table<'_>),
    ) -> Result<Segments, RequestError> {
        let mut segments = Segments::default();
        let (all, modulus, held) = (self.phase.is_all(), self.phase.modulus, self.phase.held);
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
                    let entries = source.layout.entries;
                    let (from, to) = (&source.ids()[..blocks], &destination.ids()[..blocks]);
                    segments.push_blocks(from, to, entries);
                    entry += blocks as u64 * entries;
                    if entry >= turn_end {
                        break;
                    }
                    source.skip_blocks(blocks)?;
                    destination.skip_blocks(blocks)?;
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
        Ok(segments)
    }
}
