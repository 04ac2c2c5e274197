//! What can be wrong with a request before its tables are walked.

use crate::compile::{DestinationGroup, Plan};
use crate::request::{Request, RequestError, Side, Table};

/// How many blocks a pool has at most for each id of a request, for these to be marked.
const MOST_BLOCKS: usize = 256;

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
    // Most often none is beyond the last, and that is found faster.
    let highest = table.blocks.iter().fold(0, |highest, id| highest.max(*id));
    if highest >= blocks
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
        let blocks = members().map(|group| groups[group].blocks as usize).max().unwrap_or(0);
        if all_differ(lists(), blocks) {
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

/// Whether the live ids of some tables are known to differ, of a pool of so many blocks: each is marked, and in the end
/// as many are as there are ids, or two were the same. `false` where the pool is so large that sorting is quicker.
fn all_differ<'t>(
    tables: impl Iterator<Item = (&'t [u32], Option<u32>)> + Clone,
    blocks: usize,
) -> bool {
    let entries: usize = tables.clone().map(|(ids, _)| ids.len()).sum();
    if blocks > entries.saturating_mul(MOST_BLOCKS) {
        return false;
    }
    let (mut marks, mut live) = (vec![0u64; blocks / 64 + 1], 0);
    for (ids, null_block) in tables {
        for id in ids.iter().filter(|id| null_block != Some(**id)) {
            // Ids beyond the last block have been refused.
            marks[*id as usize / 64] |= 1 << (id % 64);
            live += 1;
        }
    }
    marks.iter().map(|word| word.count_ones() as usize).sum::<usize>() == live
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// What differs is known to, in every pool that is not too large, and what does not never is.
        #[test]
        fn ids_that_differ_are_known_to(
            ids in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..40),
            times in prop::sample::select(vec![1usize, 2, 100, MOST_BLOCKS, 300]),
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
            prop_assert_eq!(known, differ && times <= MOST_BLOCKS);
        }
    }
}
