//! From block tables to stretches of entries that lie evenly on both sides.

use kvferry_layout::{Group, Law, Phase, View, Window};

use crate::nest::Steps;
use crate::request::{RequestError, Side, Table};

/// How one side's blocks hold the entries of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Holding {
    pub(crate) group: usize,
    /// Entries in a block.
    pub(crate) entries: u64,
    /// Entries that lie evenly: in a kernel block, or in the whole block.
    pub(crate) even: u64,
    /// Kernel blocks are evenly spaced across blocks, so that they can be counted through: this many
    /// in a block. Otherwise 1.
    pub(crate) split: u64,
    pub(crate) phase: Phase,
    pub(crate) blocks: u32,
    pub(crate) null_block: Option<u32>,
}

impl Holding {
    /// How a piece is held, and its steps from one block, kernel block and entry to the next.
    pub(crate) fn new(
        index: usize,
        group: &Group,
        entries: u64,
        phase: Phase,
        view: &View,
    ) -> (Self, Steps) {
        let mut steps = Steps { block: view.block, kernel: 0, entry: view.entry };
        let (mut even, mut split) = (entries, 1);
        if let Some(kernel) = view.kernel {
            if kernel.entries == 1 {
                // Kernel blocks of one entry: their stride is the entries'.
                steps.entry = kernel.stride;
            } else if kernel.entries.checked_mul(view.entry) != Some(kernel.stride) {
                even = kernel.entries;
                let kernels = entries / kernel.entries;
                if kernels.checked_mul(kernel.stride) == Some(view.block) {
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
        let holding = Self {
            group: index,
            entries,
            even,
            split,
            phase,
            blocks: group.blocks,
            null_block: group.null_block,
        };
        (holding, steps)
    }

    /// Where local entry `local` lies, and how many entries from there on lie evenly.
    fn locate(
        &self,
        side: Side,
        table: &Table<'_>,
        local: u64,
    ) -> Result<(Slot, u64), RequestError> {
        let (position, rest) = (local / self.entries, local % self.entries);
        let index = position.checked_sub(table.first).and_then(|index| usize::try_from(index).ok());
        let id = index.and_then(|index| table.blocks.get(index)).copied();
        let id = id.ok_or(RequestError::TableTooShort {
            side,
            group: self.group,
            position,
            first: table.first,
            entries: table.blocks.len(),
        })?;
        if self.null_block == Some(id) {
            return Err(RequestError::DeadBlock { side, group: self.group, position });
        }
        let (kernel, entry) = (rest / self.even, rest % self.even);
        let slot = if self.split > 1 {
            Slot { block: u64::from(id) * self.split + kernel, kernel: 0, entry }
        } else {
            Slot { block: u64::from(id), kernel, entry }
        };
        Ok((slot, self.even - entry))
    }
}

/// A place in one side's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) block: u64,
    pub(crate) kernel: u64,
    pub(crate) entry: u64,
}

impl Slot {
    /// Bytes from slot 0 of block 0.
    pub(crate) fn offset(&self, steps: &Steps) -> u64 {
        self.block
            .wrapping_mul(steps.block)
            .wrapping_add(self.kernel.wrapping_mul(steps.kernel))
            .wrapping_add(self.entry.wrapping_mul(steps.entry))
    }

    /// The step from `self` to `next`, if it goes forward and at most one block on.
    fn step_to(&self, next: &Self) -> Option<Self> {
        let step = Self {
            block: next.block.checked_sub(self.block)?,
            kernel: next.kernel.checked_sub(self.kernel)?,
            entry: next.entry.checked_sub(self.entry)?,
        };
        (step.block <= 1 && step != Self::default()).then_some(step)
    }
}

/// How many entries lie evenly, and how often that repeats at which steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) entries: u64,
    pub(crate) repeats: u64,
    pub(crate) source_step: Slot,
    pub(crate) destination_step: Slot,
}

/// A stretch of entries that lie evenly on both sides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) source: Slot,
    pub(crate) destination: Slot,
    /// Index into [`Segments::shapes`].
    pub(crate) shape: u32,
}

/// The segments of a request for one rhythm, in the order of the tables.
#[derive(Clone, Debug, Default)]
pub(crate) struct Segments {
    pub(crate) shapes: Vec<Shape>,
    pub(crate) list: Vec<Segment>,
    open: Option<(Slot, Slot, Shape)>,
}

impl Segments {
    /// Adds a stretch, as a further repetition of the last one where it continues it.
    fn push(&mut self, source: Slot, destination: Slot, entries: u64) {
        if let Some((first_source, first_destination, shape)) = &mut self.open
            && shape.entries == entries
        {
            let ahead = |first: &Slot, step: &Slot| Slot {
                block: first.block + shape.repeats * step.block,
                kernel: first.kernel + shape.repeats * step.kernel,
                entry: first.entry + shape.repeats * step.entry,
            };
            if shape.repeats == 1 {
                let steps =
                    first_source.step_to(&source).zip(first_destination.step_to(&destination));
                if let Some((source_step, destination_step)) = steps {
                    *shape = Shape { entries, repeats: 2, source_step, destination_step };
                    return;
                }
            } else if ahead(first_source, &shape.source_step) == source
                && ahead(first_destination, &shape.destination_step) == destination
            {
                shape.repeats += 1;
                return;
            }
        }
        self.close();
        let shape = Shape { entries, repeats: 1, ..Shape::default() };
        self.open = Some((source, destination, shape));
    }

    fn close(&mut self) {
        let Some((source, destination, shape)) = self.open.take() else { return };
        // Mostly the shape of the segment before; where block sizes differ, a few take turns.
        let recent = self.shapes.iter().rev().take(16).position(|known| *known == shape);
        let index = match recent {
            Some(back) => self.shapes.len() - 1 - back,
            None => {
                self.shapes.push(shape);
                self.shapes.len() - 1
            }
        };
        self.list.push(Segment { source, destination, shape: index as u32 });
    }
}

/// How a part's entries follow each other on the two sides. All parts with the same rhythm walk the
/// same segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rhythm {
    pub(crate) law: Law,
    /// Which entries.
    pub(crate) phase: Phase,
    pub(crate) source: Holding,
    pub(crate) destination: Holding,
}

impl Rhythm {
    /// The segments of entries `first..end`.
    pub(crate) fn walk(
        &self,
        first: u64,
        end: u64,
        source: &Table<'_>,
        destination: &Table<'_>,
    ) -> Result<Segments, RequestError> {
        let mut segments = Segments::default();
        let (all, modulus, held) = (self.phase.is_all(), self.phase.modulus, self.phase.held);
        let mut entry = first;
        while entry < end {
            let mut turn_end = end;
            if !all {
                let cycle = entry - entry % modulus;
                entry = entry.max(cycle.saturating_add(held.start));
                turn_end = turn_end.min(cycle.saturating_add(held.end));
                if entry >= turn_end {
                    entry = cycle.saturating_add(modulus);
                    continue;
                }
            }
            let local = self.source.phase.local(entry);
            let (source, even_source) = self.source.locate(Side::Source, source, local)?;
            let local = self.destination.phase.local(entry);
            let (destination, even_destination) =
                self.destination.locate(Side::Destination, destination, local)?;
            let entries = (turn_end - entry).min(even_source).min(even_destination);
            segments.push(source, destination, entries);
            entry += entries;
        }
        segments.close();
        Ok(segments)
    }
}

/// The part of a destination group's blocks that a request neither fills nor finds filled.
pub(crate) fn walk_rest(
    holding: &Holding,
    entries: &Entries,
    table: &Table<'_>,
) -> Result<Segments, RequestError> {
    let mut segments = Segments::default();
    let local = |index| holding.phase.local(index);
    let (held, first, end) = (local(entries.held), local(entries.first), local(entries.end));
    for (position, _) in own_blocks(held / holding.entries, holding.null_block, table) {
        let block = position.saturating_mul(holding.entries);
        let after = block.saturating_add(holding.entries);
        for (from, to) in [(held, first), (end, after)] {
            let (mut at, to) = (from.max(block), to.min(after));
            while at < to {
                let (slot, even) = holding.locate(Side::Destination, table, at)?;
                let count = even.min(to - at);
                segments.push(slot, slot, count);
                at += count;
            }
        }
    }
    segments.close();
    Ok(segments)
}

/// The live blocks of a table, whole, from position `first_own` on.
pub(crate) fn walk_own_blocks(
    first_own: u64,
    null_block: Option<u32>,
    table: &Table<'_>,
) -> Segments {
    let mut segments = Segments::default();
    for (_, id) in own_blocks(first_own, null_block, table) {
        let slot = Slot { block: u64::from(id), ..Slot::default() };
        segments.push(slot, slot, 1);
    }
    segments.close();
    segments
}

/// Position and id of the live blocks of a table from position `first_own` on.
fn own_blocks<'a>(
    first_own: u64,
    null_block: Option<u32>,
    table: &'a Table<'_>,
) -> impl Iterator<Item = (u64, u32)> + use<'a> {
    let first = table.first;
    let skipped = usize::try_from(first_own.saturating_sub(first)).unwrap_or(usize::MAX);
    let live = table.blocks.iter().copied().enumerate().skip(skipped);
    let live = live.filter(move |(_, id)| null_block != Some(*id));
    live.map(move |(index, id)| (first.saturating_add(index as u64), id))
}

/// Which entries of a state a request needs, and which it finds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entries {
    /// Entries `0..held` are there already, where they are live.
    pub(crate) held: u64,
    /// Entries `first..end` are to be copied.
    pub(crate) first: u64,
    /// See `first`.
    pub(crate) end: u64,
}

impl Entries {
    pub(crate) fn new(law: Law, window: &Window, tokens: u64, cached: u64) -> Self {
        let (held, end) = (law.held(cached, tokens), law.entries(tokens));
        let live = law.closed(window.first_live(tokens));
        Self { held, first: held.max(live).min(end), end }
    }
}
