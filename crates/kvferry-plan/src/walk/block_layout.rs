//! How one side's blocks hold entries, and the way through them by a block table.

use kvferry_layout::{Manifest, Phase, Piece, Window};

use crate::nest::Steps;
use crate::request::{RequestError, Side, Table};
use crate::walk::slot::{Slot, Within};

/// How one side's blocks hold the entries of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockLayout {
    pub(crate) group: usize,
    /// Entries in a block.
    pub(crate) entries: u64,
    /// Entries that lie evenly: in a kernel block, or in the whole block.
    pub(crate) even: u64,
    /// Kernel blocks are evenly spaced across blocks, so that they can be counted through: this many
    /// in a block. Otherwise 1.
    pub(crate) split: u64,
    pub(crate) phase: Phase,
    /// Which tokens are copied to it, or kept by it where it is read.
    pub(crate) window: Window,
    pub(crate) blocks: u32,
    pub(crate) null_block: Option<u32>,
}

impl BlockLayout {
    /// How a piece is held, and its steps from one block, kernel block and entry to the next.
    /// `window` says which tokens of it are copied, or kept.
    pub(crate) fn new(
        manifest: &Manifest,
        (index, number): (usize, usize),
        window: Window,
    ) -> (Self, Steps) {
        let group = &manifest.groups()[index];
        let Piece { phase, view, .. } = &group.pieces[number];
        let entries = manifest.entries_per_block(index, number);
        let mut steps = Steps { block: view.block, kernel: 0, entry: view.entry };
        let (mut even, mut split) = (entries, 1);
        if let Some(kernel) = view.kernel {
            if kernel.entries == 1 {
                // Kernel blocks of one entry: their stride is the entries'.
                steps.entry = kernel.stride;
            } else if kernel.entries.checked_mul(view.entry) != Some(kernel.stride) {
                even = kernel.entries;
                let kernels = entries / kernel.entries;
                let countable = kernels.saturating_mul(group.blocks.into()) <= u32::MAX.into();
                if countable && kernels.checked_mul(kernel.stride) == Some(view.block) {
                    split = kernels;
                    steps.block = kernel.stride;
                } else {
                    steps.kernel = kernel.stride;
                }
            }
        }
        if even == 1 {
            steps.entry = 0;
        }
        if even * split == entries {
            steps.kernel = 0;
        }
        let layout = Self {
            group: index,
            entries,
            even,
            split,
            phase: *phase,
            window,
            blocks: group.blocks,
            null_block: group.null_block,
        };
        (layout, steps)
    }

    /// Goes to where entry `entry` lies.
    pub(crate) fn enter<'a>(
        &'a self,
        side: Side,
        table: &'a Table<'a>,
        entry: u64,
    ) -> Result<Walker<'a>, RequestError> {
        self.enter_local(side, table, self.phase.local(entry))
    }

    /// Goes to where the `local`-th of the entries that this rank holds lies.
    pub(crate) fn enter_local<'a>(
        &'a self,
        side: Side,
        table: &'a Table<'a>,
        local: u64,
    ) -> Result<Walker<'a>, RequestError> {
        let (position, rest) = (local / self.entries, local % self.entries);
        let mut walker =
            Walker { layout: self, side, table, position, kernel: 0, slot: Slot::default() };
        walker.enter_block()?;
        walker.advance(rest)?;
        Ok(walker)
    }
}

/// A walk through the blocks of one side's table.
pub(crate) struct Walker<'a> {
    pub(crate) layout: &'a BlockLayout,
    side: Side,
    table: &'a Table<'a>,
    position: u64,
    /// Kernel block in the block.
    kernel: u64,
    pub(crate) slot: Slot,
}

impl Walker<'_> {
    /// How many entries lie evenly from here on.
    pub(crate) fn even_left(&self) -> u64 {
        self.layout.even - self.slot.within.entry
    }

    /// Goes `entries` on, which must not pass the end of the block.
    pub(crate) fn advance(&mut self, entries: u64) -> Result<(), RequestError> {
        let BlockLayout { entries: in_block, even, split, .. } = *self.layout;
        self.slot.within.entry += entries;
        if self.slot.within.entry < even {
            return Ok(());
        }
        // Mostly to the end of what lies evenly, and that without a division.
        let entry = self.slot.within.entry;
        let (kernels, entry) = if entry == even { (1, 0) } else { (entry / even, entry % even) };
        self.slot.within.entry = entry;
        self.kernel += kernels;
        if self.kernel * even >= in_block {
            self.kernel = 0;
            self.position += 1;
            return self.enter_block();
        }
        if split > 1 {
            self.slot.block = self.slot.block.wrapping_add(kernels as u32);
        } else {
            self.slot.within.kernel = self.kernel;
        }
        Ok(())
    }

    /// How many blocks of both sides, at most `entries` entries of them, can be taken as they come: their entries
    /// lie evenly and alike on both sides, and none is dead.
    pub(crate) fn whole_blocks(&self, other: &Self, entries: u64) -> usize {
        let (ours, theirs) = (self.layout, other.layout);
        let alike = (ours.entries, ours.even) == (theirs.entries, theirs.even);
        let at_start = |walker: &Self| walker.kernel == 0 && walker.slot.within.entry == 0;
        if !alike || ours.even != ours.entries || !at_start(self) || !at_start(other) {
            return 0;
        }
        let blocks = usize::try_from(entries / ours.entries).unwrap_or(usize::MAX);
        other.live(self.live(blocks))
    }

    /// How many of the next blocks, at most so many, are there and not dead.
    fn live(&self, blocks: usize) -> usize {
        let ids = &self.ids()[..blocks.min(self.ids().len())];
        let null = self.layout.null_block;
        let dead = null.and_then(|null| ids.iter().position(|id| *id == null));
        dead.unwrap_or(ids.len())
    }

    /// The ids from here on.
    pub(crate) fn ids(&self) -> &[u32] {
        let index = self.position.saturating_sub(self.table.first);
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        self.table.blocks.get(index..).unwrap_or_default()
    }

    /// Goes `blocks` blocks on.
    pub(crate) fn skip_blocks(&mut self, blocks: usize) -> Result<(), RequestError> {
        self.position += blocks as u64;
        self.enter_block()
    }

    /// Looks the block at `position` up.
    fn enter_block(&mut self) -> Result<(), RequestError> {
        let Self { layout, side, table, position, .. } = *self;
        let index = position.checked_sub(table.first).and_then(|index| usize::try_from(index).ok());
        let id = index.and_then(|index| table.blocks.get(index)).copied();
        let id = id.ok_or(RequestError::TableTooShort {
            side,
            group: layout.group,
            position,
            first: table.first,
            entries: table.blocks.len(),
        })?;
        if layout.null_block == Some(id) {
            return Err(RequestError::DeadBlock { side, group: layout.group, position });
        }
        // Ids beyond the last block are refused before any table is walked.
        self.slot = Slot { block: id.wrapping_mul(layout.split as u32), within: Within::default() };
        Ok(())
    }
}
