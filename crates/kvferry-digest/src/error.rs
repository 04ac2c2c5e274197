//! Why a digest cannot be computed.

use kvferry_layout::StateBox;
use thiserror::Error;

/// Why a digest of a part cannot be computed by a rank.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DigestError {
    /// The rank does not hold all of the part.
    ///
    /// What to do: check that both engines run the same model and release; a plan never asks a rank for
    /// what it does not hold.
    #[error("{state}: this rank does not hold {bounds}")]
    NotHeld {
        /// The state.
        state: String,
        /// What of it is not held.
        bounds: StateBox,
    },
    /// Entries that the request does not have.
    ///
    /// What to do: ask for no more than was granted; report it if the other side is a kvferry agent.
    #[error("{state}: entry {entry} was asked for, but {tokens} tokens have {entries}")]
    Beyond {
        /// The state.
        state: String,
        /// The last entry that was asked for.
        entry: u64,
        /// Tokens of the request.
        tokens: u64,
        /// The entries that so many tokens have.
        entries: u64,
    },
    /// A block that the request's table does not name.
    ///
    /// What to do: ask for no more than was granted; report it if the other side is a kvferry agent.
    #[error("{state}: the table of group {group} has no block at position {position}")]
    NoBlock {
        /// The state.
        state: String,
        /// The group.
        group: usize,
        /// The position.
        position: u64,
    },
    /// Not one table for every group.
    ///
    /// What to do: report it; the tables come from the engine's own scheduler.
    #[error("this rank has {groups} groups, but there are {tables} block tables")]
    TableCount {
        /// Groups.
        groups: usize,
        /// Tables.
        tables: usize,
    },
    /// A part that makes no sense: another number of axes than the state has, or turns of no entries.
    ///
    /// What to do: report it if the other side is a kvferry agent.
    #[error("{state}: the part that was asked for makes no sense")]
    Malformed {
        /// The state.
        state: String,
    },
}
