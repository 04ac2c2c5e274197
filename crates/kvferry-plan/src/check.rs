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
    // The maximum first: a scan without branches.
    if table.blocks.iter().max().is_some_and(wrong)
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
    let mut used: Vec<u32> = vec![];
    for pool in 0..groups.len() {
        let members = || (0..groups.len()).filter(move |&g| groups[g].pool == pool);
        let members = || members().filter(|&g| !groups[g].holdings.is_empty());
        used.clear();
        for group in members() {
            let null_block = groups[group].null_block;
            used.extend(tables[group].blocks.iter().filter(|id| null_block != Some(**id)));
        }
        if used.is_sorted_by(|a, b| a < b) {
            continue;
        }
        let blocks = members().map(|group| groups[group].blocks).max().unwrap_or(0);
        if all_differ(&used, blocks) {
            continue;
        }
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

/// Whether ids below `blocks` are known to differ: by a bit for every block, where that is quicker than
/// to sort them.
fn all_differ(ids: &[u32], blocks: u32) -> bool {
    let words = blocks as usize / 64 + 1;
    if words > ids.len().saturating_mul(4) {
        return false;
    }
    let mut seen = vec![0u64; words];
    ids.iter().all(|id| {
        let Some(word) = seen.get_mut(*id as usize / 64) else { return false };
        let bit = 1 << (id % 64);
        let new = *word & bit == 0;
        *word |= bit;
        new
    })
}
