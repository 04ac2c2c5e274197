//! What can be wrong with a request before its tables are walked.

use crate::compile::{DestinationGroup, Plan};
use crate::request::{Request, RequestError, Side, Table};

/// How many blocks a pool has at most for each id of a request, for these to be marked by bytes, and by bits:
/// beyond that it takes longer to clear and count the marks than it saves.
const BLOCKS_BY_BYTES: usize = 32;
const BLOCKS_BY_BITS: usize = 256;

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
            if !group.layouts.is_empty() {
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
    for pool in 0..groups.len() {
        let members = || (0..groups.len()).filter(move |&g| groups[g].pool == pool);
        let members = || members().filter(|&g| !groups[g].layouts.is_empty());
        let lists = || members().map(|group| (tables[group].blocks, groups[group].null_block));
        let blocks = members().map(|group| groups[group].blocks).max().unwrap_or(0);
        if all_differ(lists(), blocks as usize) {
            continue;
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

/// Whether the live ids of some tables are known to differ, of a pool of so many blocks: each is marked, and in
/// the end as many marks are set as there are ids, or two were the same. By a byte for every block, or by a bit
/// where the pool is large; `false` where it is so large that it is quicker to sort the ids.
fn all_differ<'t>(
    tables: impl Iterator<Item = (&'t [u32], Option<u32>)> + Clone,
    blocks: usize,
) -> bool {
    let (mut entries, mut live) = (0, 0);
    for (ids, null_block) in tables.clone() {
        entries += ids.len();
        live += ids.len() - null_block.map_or(0, |null| kvferry_scan::count(ids, null));
    }
    let dead = tables.clone().filter_map(|(_, null_block)| null_block);
    // Ids beyond the last block have been refused, unless they mark dead entries: those have no mark.
    if blocks <= entries.saturating_mul(BLOCKS_BY_BYTES) {
        let mut seen = vec![0u8; blocks];
        tables.for_each(|(ids, _)| kvferry_scan::mark_bytes(ids, &mut seen));
        for null in dead {
            seen.get_mut(null as usize).into_iter().for_each(|mark| *mark = 0);
        }
        return kvferry_scan::sum(&seen) == live;
    }
    if blocks <= entries.saturating_mul(BLOCKS_BY_BITS) {
        let mut seen = vec![0u64; blocks / 64 + 1];
        tables.for_each(|(ids, _)| kvferry_scan::mark(ids, &mut seen));
        for null in dead {
            seen.get_mut(null as usize / 64)
                .into_iter()
                .for_each(|word| *word &= !(1 << (null % 64)));
        }
        return kvferry_scan::ones(&seen) == live;
    }
    false
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// By bytes, by bits or not at all: what differs is known to, in every pool that is not too large, and
        /// what does not never is.
        #[test]
        fn ids_that_differ_are_known_to(
            ids in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..40),
            times in prop::sample::select(vec![1usize, 2, BLOCKS_BY_BYTES, 100, BLOCKS_BY_BITS, 300]),
            null in prop::sample::select(vec![None, Some(0), Some(u32::MAX)]),
            split in any::<prop::sample::Index>(),
            dead in prop::collection::vec(any::<bool>(), 40),
        ) {
            let blocks = ids.len() * times;
            // Low ids meet often, and are the same as others in small pools.
            let id = |(low, any): &(prop::sample::Index, prop::sample::Index)| {
                low.index(2) * any.index(blocks) + any.index(4.min(blocks))
            };
            let mut ids: Vec<u32> = ids.iter().map(|one| (id(one) % blocks) as u32).collect();
            for (id, dead) in ids.iter_mut().zip(dead) {
                *id = null.filter(|_| dead).unwrap_or(*id);
            }
            let live: Vec<u32> = ids.iter().copied().filter(|id| null != Some(*id)).collect();
            let differ = live.iter().collect::<BTreeSet<_>>().len() == live.len();
            let (some, others) = ids.split_at(split.index(ids.len()));
            let known = all_differ([(some, null), (others, null)].into_iter(), blocks);
            prop_assert_eq!(known, differ && times <= BLOCKS_BY_BITS);
        }
    }
}
