//! All the facts of one rank, checked.

use std::collections::BTreeMap;

use crate::check::{Checked, check};
use crate::draft::{Draft, Group, Piece};
use crate::error::ManifestError;
use crate::state::{Kind, Writer};
use crate::view::Region;

/// The checked facts of one rank. Whatever one holds is sound: every view lies in its region, every
/// box in its state, no two pieces of a group share a byte, and where groups overlay each other every
/// byte has the same block id in each of them.
#[derive(Clone, Debug)]
pub struct Manifest {
    draft: Draft,
    /// `entries[group][piece]`: entries of the piece in one block.
    entries: Vec<Vec<u64>>,
    /// The pool of every group: groups whose blocks share bytes have the same.
    pools: Vec<usize>,
}

impl PartialEq for Manifest {
    fn eq(&self, other: &Self) -> bool {
        self.draft == other.draft
    }
}

impl Eq for Manifest {}

impl Manifest {
    /// Checks a draft.
    pub fn new(draft: Draft) -> Result<Self, ManifestError> {
        let Checked { entries, pools } = check(&draft)?;
        Ok(Self { draft, entries, pools })
    }

    /// What makes equal shapes mean equal things.
    pub fn identity(&self) -> &BTreeMap<String, String> {
        &self.draft.identity
    }

    /// The engine's name.
    pub fn engine(&self) -> &str {
        &self.draft.engine
    }

    /// The rank's number in its engine.
    pub fn rank(&self) -> u32 {
        self.draft.rank
    }

    /// The rank's place in its engine.
    pub fn label(&self) -> &str {
        &self.draft.label
    }

    /// The regions.
    pub fn regions(&self) -> &[Region] {
        &self.draft.regions
    }

    /// The kinds of states.
    pub fn kinds(&self) -> &[Kind] {
        &self.draft.kinds
    }

    /// The groups.
    pub fn groups(&self) -> &[Group] {
        &self.draft.groups
    }

    /// The kind of a piece's state.
    pub fn kind(&self, piece: &Piece) -> &Kind {
        &self.draft.kinds[piece.kind as usize]
    }

    /// What writes a piece's state, where it is said.
    pub fn writer(&self, piece: &Piece) -> Option<&Writer> {
        self.draft.writers.get(&piece.kind)
    }

    /// Entries of a piece in one block, by the indices of its group and of itself.
    pub fn entries_per_block(&self, group: usize, piece: usize) -> u64 {
        self.entries[group][piece]
    }

    /// The pool that a group's blocks lie in: two groups have the same pool when a block of one can
    /// share bytes with a block of the other, so that one block id must not serve both.
    pub fn pool(&self, group: usize) -> usize {
        self.pools[group]
    }

    /// The facts, to be changed and checked again.
    pub fn into_draft(self) -> Draft {
        self.draft
    }

    pub(crate) fn draft(&self) -> &Draft {
        &self.draft
    }
}
