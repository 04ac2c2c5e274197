//! What is asked of a plan for one request.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

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
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    ///
    /// What to do: hand in one block table for every group of that side, in the order of its manifest.
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
    ///
    /// What to do: hand in one cached length for every group of the destination.
    #[error("the destination has {expected} groups, but the request has {found} cached lengths")]
    CachedCount {
        /// Groups.
        expected: usize,
        /// Lengths.
        found: usize,
    },
    /// More is said to be held than there is.
    ///
    /// What to do: count only tokens of this request as cached.
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
    ///
    /// What to do: check that the table belongs to this engine and group, and that the manifest's number of
    /// blocks is the engine's.
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
    ///
    /// What to do: hand in the blocks of every token that is needed; a clipped table must say at which position
    /// it starts.
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
    ///
    /// What to do: keep the blocks of all tokens that the destination needs until it has confirmed them; on the
    /// destination, allocate a block for this position.
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
    ///
    /// What to do: for a group of recurrent states hand in a table of one entry: the slot that the request
    /// runs in.
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
    ///
    /// What to do: allocate every block once: groups that share memory share their block ids, too.
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

impl RequestError {
    /// Which error it is, in one word that stays the same from release to release.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::TableCount { .. } => "table_count",
            Self::CachedCount { .. } => "cached_count",
            Self::CachedBeyondEnd { .. } => "cached_beyond_end",
            Self::NoSuchBlock { .. } => "no_such_block",
            Self::TableTooShort { .. } => "table_too_short",
            Self::DeadBlock { .. } => "dead_block",
            Self::NotOneSlot { .. } => "not_one_slot",
            Self::BlockTwice { .. } => "block_twice",
        }
    }
}
