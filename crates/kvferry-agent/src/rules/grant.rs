//! What a lease lets be read.

use std::fmt;

use kvferry_plan::BlockTable;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// What P grants with a lease: so many tokens, in these blocks. Block ids reach D through a router and
/// a client, who may change them; P says by its [`Fingerprint`] whether they are still the ones that it
/// granted.
///
/// While P computes the request, its grant grows: tokens are added and tables appended to. When P starts
/// the request over, in other blocks, the epoch rises, and nothing of the earlier epoch counts. What grows
/// begins with an epoch that nobody can guess: only followers hear of it before all is complete, and they
/// read no more than is. Nobody else can name a grant before it is there, whatever tables they guess.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Grant {
    /// Rises when P starts the request over. 0 where it did not grow.
    pub epoch: u32,
    /// Tokens that the blocks hold.
    pub tokens: u64,
    /// The tables of P's groups.
    pub tables: Vec<BlockTable>,
}

/// Stands for a [`Grant`]: two that differ have different ones, whoever chose them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Fingerprint(pub [u8; 16]);

impl Grant {
    /// The fingerprint of exactly this epoch, these tokens and tables.
    pub fn fingerprint(&self) -> Fingerprint {
        let mut hash = Sha256::new();
        hash.update(self.epoch.to_le_bytes());
        hash.update(self.tokens.to_le_bytes());
        let mut bytes = Vec::new();
        for table in &self.tables {
            // Each table with its length before it: no two lists of tables are the same bytes.
            bytes.clear();
            bytes.extend(table.first.to_le_bytes());
            bytes.extend((table.blocks.len() as u64).to_le_bytes());
            bytes.extend(table.blocks.iter().flat_map(|id| id.to_le_bytes()));
            hash.update(&bytes);
        }
        let mut fingerprint = [0; 16];
        fingerprint.copy_from_slice(&hash.finalize()[..16]);
        Fingerprint(fingerprint)
    }
}

impl Grant {
    /// Whether `self` is what `earlier` has grown into: of the same epoch, with no fewer tokens, and with
    /// tables that go on where the earlier ones ended. A table that was empty may start anywhere.
    pub fn extends(&self, earlier: &Self) -> bool {
        let goes_on = |(now, then): (&BlockTable, &BlockTable)| {
            then.blocks.is_empty()
                || (now.first == then.first && now.blocks.starts_with(&then.blocks))
        };
        self.epoch == earlier.epoch
            && self.tokens >= earlier.tokens
            && (earlier.tables.is_empty() || self.tables.len() == earlier.tables.len())
            && self.tables.iter().zip(&earlier.tables).all(goes_on)
    }
}

/// A step that P computes at this moment, and how far it will bring a request. Nothing that it writes is
/// granted yet, but its blocks are in the tables already: as soon as P's ranks say that they have written a
/// layer in this step, that layer can be read.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub struct InFlight {
    /// Its number, which no other step of the engine has. They rise.
    pub step: u64,
    /// Tokens that the request will have then.
    pub tokens: u64,
}

/// Stands for what a request's cache was computed from, as its engine says: its prompt, and whatever else
/// decides what is in the cache. Both engines make it from the request that they have; here it is compared
/// and never looked into. With a ticket of another request come blocks and tables that were granted, but
/// not for this one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Origin(pub [u8; 16]);

/// What a reader says of what it has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// By which tables.
    pub read_by: Fingerprint,
    /// For what; `None` where its engine does not say.
    pub origin: Option<Origin>,
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(tokens: u64, tables: &[(u64, &[u32])]) -> Grant {
        let tables =
            tables.iter().map(|&(first, blocks)| BlockTable { first, blocks: blocks.to_vec() });
        Grant { epoch: 0, tokens, tables: tables.collect() }
    }

    #[test]
    fn whatever_differs_shows() {
        let all = [
            grant(8, &[(0, &[1, 2]), (0, &[3])]),
            grant(7, &[(0, &[1, 2]), (0, &[3])]),
            grant(8, &[(0, &[2, 1]), (0, &[3])]),
            grant(8, &[(0, &[1]), (0, &[2, 3])]),
            grant(8, &[(0, &[1, 2, 3])]),
            grant(8, &[(0, &[1, 2]), (1, &[3])]),
            grant(8, &[(0, &[3]), (0, &[1, 2])]),
            grant(8, &[(0, &[1, 2]), (0, &[3]), (0, &[])]),
            grant(8, &[(0, &[1, 2]), (0, &[3, 0])]),
            grant(8, &[]),
            Grant { epoch: 1, ..grant(8, &[]) },
        ];
        for (i, a) in all.iter().enumerate() {
            for (j, b) in all.iter().enumerate() {
                assert_eq!(a.fingerprint() == b.fingerprint(), i == j, "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn a_grant_grows_and_never_changes() {
        let before = grant(8, &[(0, &[1, 2]), (0, &[])]);
        assert!(before.extends(&before));
        assert!(before.extends(&Grant::default()));
        assert!(grant(9, &[(0, &[1, 2, 5]), (3, &[4])]).extends(&before));
        for other in [
            grant(7, &[(0, &[1, 2]), (0, &[])]),
            grant(9, &[(0, &[1]), (0, &[])]),
            grant(9, &[(0, &[1, 5, 2]), (0, &[])]),
            grant(9, &[(1, &[1, 2]), (0, &[])]),
            grant(9, &[(0, &[1, 2])]),
            Grant { epoch: 1, ..before.clone() },
        ] {
            assert!(!other.extends(&before), "{other:?}");
        }
    }
}
