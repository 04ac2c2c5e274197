//! What is asked of a plan for one request.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::compile::{DestinationGroup, Plan};

/// A block table of one group: `blocks[i]` holds the entries at table position `first + i`. The
/// group's null block marks dead entries. A group whose block holds a whole sequence has a table of
/// one entry: the running slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Table<'a> {
    /// Position of the first id; above 0 where the list was clipped (windows).
    pub first: u64,
    /// Block ids.
    pub blocks: &'a [u32],
}

impl<'a> Table<'a> {
    /// A table that starts at position 0.
    pub fn new(blocks: &'a [u32]) -> Self {
        Self { first: 0, blocks }
    }
}

/// A [`Table`] that owns its ids: what crosses threads and processes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockTable {
    /// Position of the first id; above 0 where the list was clipped.
    pub first: u64,
    /// Block ids.
    pub blocks: Vec<u32>,
}

impl BlockTable {
    /// The table as requests want it.
    pub fn borrow(&self) -> Table<'_> {
        Table { first: self.first, blocks: &self.blocks }
    }
}

/// One request: what the destination needs, and where both sides keep it.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Length of the sequence.
    pub tokens: u64,
    /// For every group of the destination: how many of the first tokens it holds already.
    pub cached: &'a [u64],
    /// The source engine's tables, one for every group; all its ranks share them.
    pub source: &'a [Table<'a>],
    /// The destination's tables, one for every group.
    pub destination: &'a [Table<'a>],
}

/// Whose table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that is read.
    Source,
    /// The side that is written.
    Destination,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
        })
    }
}

/// Why a request cannot be served. Nothing was copied.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RequestError {
    /// Not one table for every group.
    #[error("the {side} has {expected} groups, but the request has {found} block tables for it")]
    TableCount {
        /// Whose tables.
        side: Side,
        /// Groups.
        expected: usize,
        /// Tables.
        found: usize,
    },
    /// Not one cached length for every group.
    #[error("the destination has {expected} groups, but the request has {found} cached lengths")]
    CachedCount {
        /// Groups.
        expected: usize,
        /// Lengths.
        found: usize,
    },
    /// More is said to be held than there is.
    #[error(
        "group {group} of the destination cannot hold {cached} tokens of a request of {tokens}"
    )]
    CachedBeyondEnd {
        /// The group.
        group: usize,
        /// What is said to be held.
        cached: u64,
        /// Length of the sequence.
        tokens: u64,
    },
    /// A block id that does not exist.
    #[error(
        "{side} group {group}: the table names block {id} at position {position}, but there are only {blocks} blocks"
    )]
    NoSuchBlock {
        /// Whose table.
        side: Side,
        /// The group.
        group: usize,
        /// Position in the table.
        position: u64,
        /// The id.
        id: u32,
        /// How many there are.
        blocks: u32,
    },
    /// A needed position is not in the table.
    #[error(
        "{side} group {group}: position {position} is needed, but the table has {entries} entries from position {first} on"
    )]
    TableTooShort {
        /// Whose table.
        side: Side,
        /// The group.
        group: usize,
        /// The position.
        position: u64,
        /// First position of the table.
        first: u64,
        /// Its length.
        entries: usize,
    },
    /// A needed position is marked dead.
    #[error("{side} group {group}: position {position} is needed, but the table marks it dead")]
    DeadBlock {
        /// Whose table.
        side: Side,
        /// The group.
        group: usize,
        /// The position.
        position: u64,
    },
    /// A group whose block holds a whole sequence has one slot, not several.
    #[error(
        "{side} group {group}: a block holds a whole sequence, so the table must be its one running slot, not {entries} entries from position {first} on"
    )]
    NotOneSlot {
        /// Whose table.
        side: Side,
        /// The group.
        group: usize,
        /// First position of the table.
        first: u64,
        /// Its length.
        entries: usize,
    },
    /// Two entries of the destination would be written to the same bytes.
    #[error(
        "destination block {id} is used twice: in group {first_group} and in group {second_group}"
    )]
    BlockTwice {
        /// The id.
        id: u32,
        /// One of the groups.
        first_group: usize,
        /// The other; may be the same.
        second_group: usize,
    },
}

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
