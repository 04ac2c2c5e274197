//! What a request leaves of its own blocks.

use crate::request::{RequestError, Side, Table};
use crate::walk::block_layout::BlockLayout;
use crate::walk::entries::Entries;
use crate::walk::segments::Segments;
use crate::walk::slot::{Slot, Within};

/// Adds the part of a destination group's blocks that a request neither fills nor finds filled.
pub(crate) fn walk_rest(
    layout: &BlockLayout,
    entries: &Entries,
    table: &Table<'_>,
    segments: &mut Segments,
) -> Result<(), RequestError> {
    let local = |index| layout.phase.local(index);
    let (held, first, end) = (local(entries.held), local(entries.first), local(entries.end));
    // Own blocks before the first needed entry, then those from the last one on.
    let before = held / layout.entries..first.div_ceil(layout.entries);
    let after = (end / layout.entries).max(before.end)..u64::MAX;
    for positions in [before, after] {
        let blocks = own_blocks(positions.start, layout.null_block, table);
        for (position, _) in blocks.take_while(|(position, _)| *position < positions.end) {
            let block = position.saturating_mul(layout.entries);
            let after = block.saturating_add(layout.entries);
            for (from, to) in [(held, first), (end, after)] {
                let (mut at, to) = (from.max(block), to.min(after));
                while at < to {
                    let walker = layout.enter_local(Side::Destination, table, at)?;
                    let count = walker.even_left().min(to - at);
                    segments.push(walker.slot, walker.slot, count);
                    at += count;
                }
            }
        }
    }
    Ok(())
}

/// Adds the live blocks of a table, whole, from position `first_own` on.
pub(crate) fn walk_own_blocks(
    first_own: u64,
    null_block: Option<u32>,
    table: &Table<'_>,
    segments: &mut Segments,
) {
    for (_, id) in own_blocks(first_own, null_block, table) {
        let slot = Slot { block: id, within: Within::default() };
        segments.push(slot, slot, 1);
    }
}

/// Position and id of the live blocks of a table from position `first_own` on.
fn own_blocks<'a>(
    first_own: u64,
    null_block: Option<u32>,
    table: &'a Table<'_>,
) -> impl Iterator<Item = (u64, u32)> + use<'a> {
    let first = table.first;
    let skipped = usize::try_from(first_own.saturating_sub(first)).unwrap_or(usize::MAX);
    let live = table.blocks.iter().copied().enumerate().skip(skipped);
    let live = live.filter(move |(_, id)| null_block != Some(*id));
    live.map(move |(index, id)| (first.saturating_add(index as u64), id))
}
