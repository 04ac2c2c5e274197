//! What can be wrong with a request before its tables are walked.

use crate::compile::{DestinationGroup, Plan};
use crate::request::{Request, RequestError, Side, Table};

impl Plan {
    /// Checks all that can be checked before the tables are walked.
    pub(crate) fn check(&self, request: &Request<'_>) -> Result<(), RequestError> {
        for (side, expected, found) in [
            (Side::Source, self.source_groups, request.source.len()),
            (Side::Destination, self.groups.len(), request.destination.len()),
        ] {
            if expected != found {
                return Err(RequestError::TableCount { side, expected, found });
            }
        }
        if request.cached.len() != self.groups.len() {
            return Err(RequestError::CachedCount {
                expected: self.groups.len(),
                found: request.cached.len(),
            });
        }
        let tokens = request.tokens;
        if let Some(group) = (0..self.groups.len()).find(|&g| request.cached[g] > tokens) {
            let cached = request.cached[group];
            return Err(RequestError::CachedBeyondEnd { group, cached, tokens });
        }
        if tokens == 0 {
            return Ok(());
        }
        for (index, group) in self.groups.iter().enumerate() {
            let table = &request.destination[index];
            if !group.holdings.is_empty() {
                let facts = (index, group.blocks, group.null_block);
                let one_slot = group.one_slot && request.cached[index] < tokens;
                check_table(Side::Destination, facts, one_slot, table)?;
            }
        }
        for read in &self.reads {
            let one_slot = read.one_slot && request.cached[read.destination_group] < tokens;
            let facts = (read.group, read.blocks, read.null_block);
            check_table(Side::Source, facts, one_slot, &request.source[read.group])?;
        }
        check_used_once(&self.groups, request.destination)
    }
}

fn check_table(
    side: Side,
    (group, blocks, null_block): (usize, u32, Option<u32>),
    one_slot: bool,
    table: &Table<'_>,
) -> Result<(), RequestError> {
    let (first, entries) = (table.first, table.blocks.len());
    if one_slot && (first, entries) != (0, 1) {
        return Err(RequestError::NotOneSlot { side, group, first, entries });
    }
    let wrong = |id: &u32| *id >= blocks && null_block != Some(*id);
    if kvferry_scan::highest(table.blocks) >= blocks
        && let Some(index) = table.blocks.iter().position(wrong)
    {
        return Err(RequestError::NoSuchBlock {
            side,
            group,
            position: first.saturating_add(index as u64),
            id: table.blocks[index],
            blocks,
        });
    }
    Ok(())
}

/// No block of a pool may appear twice in the destination's tables.
fn check_used_once(groups: &[DestinationGroup], tables: &[Table<'_>]) -> Result<(), RequestError> {
    let mut seen: Vec<u64> = vec![];
    for pool in 0..groups.len() {
        let members = || (0..groups.len()).filter(move |&g| groups[g].pool == pool);
        let members = || members().filter(|&g| !groups[g].holdings.is_empty());
        let lists = || members().map(|group| (tables[group].blocks, groups[group].null_block));
        let blocks = members().map(|group| groups[group].blocks).max().unwrap_or(0);
        let entries: usize = lists().map(|(ids, _)| ids.len()).sum();
        // By a bit for every block, where that is quicker than to sort them.
        let words = blocks as usize / 64 + 1;
        if words <= entries.saturating_mul(4) {
            seen.clear();
            seen.resize(words, 0);
            if all_differ(lists(), &mut seen) {
                continue;
            }
        }
        let live = lists().flat_map(|(ids, null)| ids.iter().filter(move |id| null != Some(**id)));
        let mut used: Vec<u32> = live.copied().collect();
        used.sort_unstable();
        let Some(twice) = used.windows(2).find(|pair| pair[0] == pair[1]) else { continue };
        let mut users = members().flat_map(|group| {
            let ids = tables[group].blocks.iter().filter(|id| **id == twice[0]);
            ids.map(move |_| group)
        });
        let first_group = users.next().unwrap_or(pool);
        let second_group = users.next().unwrap_or(first_group);
        return Err(RequestError::BlockTwice { id: twice[0], first_group, second_group });
    }
    Ok(())
}

/// Whether the live ids of some tables differ, by a bit of `seen` for each: all are clear at first. There is
/// no branch on what was found: as many bits are set in the end as there are ids, or two were the same.
fn all_differ<'t>(
    tables: impl Iterator<Item = (&'t [u32], Option<u32>)> + Clone,
    seen: &mut [u64],
) -> bool {
    for (ids, _) in tables.clone() {
        // Ids beyond the last block have been refused, unless they mark dead entries.
        kvferry_scan::mark(ids, seen);
    }
    let mut live = 0;
    for (ids, null_block) in tables {
        live += ids.len();
        let Some(null) = null_block else { continue };
        live -= kvferry_scan::count(ids, null);
        if let Some(word) = seen.get_mut(null as usize / 64) {
            *word &= !(1 << (null % 64));
        }
    }
    kvferry_scan::ones(seen) == live
}
