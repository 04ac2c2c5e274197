//! From block tables to stretches of entries that lie evenly on both sides.

use std::ops::Range;

use kvferry_layout::{Group, Law, Phase, View, Window};

use crate::nest::{Nest, Steps};
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

    /// Goes to where entry `entry` lies.
    fn enter<'a>(
        &'a self,
        side: Side,
        table: &'a Table<'a>,
        entry: u64,
    ) -> Result<Walker<'a>, RequestError> {
        self.enter_local(side, table, self.phase.local(entry))
    }

    /// Goes to where the `local`-th of the entries that this rank holds lies.
    fn enter_local<'a>(
        &'a self,
        side: Side,
        table: &'a Table<'a>,
        local: u64,
    ) -> Result<Walker<'a>, RequestError> {
        let (position, rest) = (local / self.entries, local % self.entries);
        let mut walker =
            Walker { holding: self, side, table, position, kernel: 0, slot: Slot::default() };
        walker.enter_block()?;
        walker.advance(rest)?;
        Ok(walker)
    }
}

/// A walk through the blocks of one side's table.
struct Walker<'a> {
    holding: &'a Holding,
    side: Side,
    table: &'a Table<'a>,
    position: u64,
    /// Kernel block in the block.
    kernel: u64,
    slot: Slot,
}

impl Walker<'_> {
    /// How many entries lie evenly from here on.
    fn even_left(&self) -> u64 {
        self.holding.even - self.slot.within.entry
    }

    /// Goes `entries` on, which must not pass the end of the block.
    fn advance(&mut self, entries: u64) -> Result<(), RequestError> {
        let Holding { entries: in_block, even, split, .. } = *self.holding;
        self.slot.within.entry += entries;
        if self.slot.within.entry < even {
            return Ok(());
        }
        let kernels = self.slot.within.entry / even;
        self.slot.within.entry %= even;
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

    /// How many blocks of both sides, at most `entries` entries of them, can be taken as they come:
    /// their entries lie alike on both sides, and none is dead.
    fn whole_blocks(&self, other: &Self, entries: u64) -> usize {
        let (ours, theirs) = (self.holding, other.holding);
        let alike = (ours.entries, ours.even, ours.split)
            == (theirs.entries, theirs.even, theirs.split)
            && ours.even * ours.split == ours.entries;
        let starts = |walker: &Self| walker.kernel == 0 && walker.slot.within.entry == 0;
        if !alike || !starts(self) || !starts(other) {
            return 0;
        }
        let blocks = usize::try_from(entries / ours.entries).unwrap_or(usize::MAX);
        let live = |walker: &Self, blocks: usize| {
            let ids = walker.ids();
            let ids = &ids[..blocks.min(ids.len())];
            let dead = |id: &u32| walker.holding.null_block == Some(*id);
            ids.iter().position(dead).unwrap_or(ids.len())
        };
        live(other, live(self, blocks))
    }

    /// The ids from here on.
    fn ids(&self) -> &[u32] {
        let index = self.position.saturating_sub(self.table.first);
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        self.table.blocks.get(index..).unwrap_or_default()
    }

    /// Goes `blocks` blocks on.
    fn skip_blocks(&mut self, blocks: usize) -> Result<(), RequestError> {
        self.position += blocks as u64;
        self.enter_block()
    }

    /// Looks the block at `position` up.
    fn enter_block(&mut self) -> Result<(), RequestError> {
        let Self { holding, side, table, position, .. } = *self;
        let index = position.checked_sub(table.first).and_then(|index| usize::try_from(index).ok());
        let id = index.and_then(|index| table.blocks.get(index)).copied();
        let id = id.ok_or(RequestError::TableTooShort {
            side,
            group: holding.group,
            position,
            first: table.first,
            entries: table.blocks.len(),
        })?;
        if holding.null_block == Some(id) {
            return Err(RequestError::DeadBlock { side, group: holding.group, position });
        }
        // Ids beyond the last block are refused before any table is walked.
        self.slot =
            Slot { block: id.wrapping_mul(holding.split as u32), within: Within::default() };
        Ok(())
    }
}

/// A place in one side's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) block: u32,
    pub(crate) within: Within,
}

/// A place in a block: kernel block, and entry in it. Also a step from one place to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Within {
    pub(crate) kernel: u64,
    pub(crate) entry: u64,
}

/// A step forward from one slot to another, by at most one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) blocks: u32,
    pub(crate) within: Within,
}

impl Within {
    /// Bytes from the block's start.
    pub(crate) fn offset(&self, steps: &Steps) -> u64 {
        self.kernel.wrapping_mul(steps.kernel).wrapping_add(self.entry.wrapping_mul(steps.entry))
    }
}

impl Step {
    /// The step to the block that follows.
    const BLOCK: Self = Self { blocks: 1, within: Within { kernel: 0, entry: 0 } };

    /// Bytes that the step passes.
    pub(crate) fn offset(&self, steps: &Steps) -> u64 {
        u64::from(self.blocks).wrapping_mul(steps.block).wrapping_add(self.within.offset(steps))
    }
}

impl Slot {
    /// The place `times` steps on.
    fn ahead(&self, step: &Step, times: u64) -> Option<Self> {
        let blocks = u64::from(self.block) + times * u64::from(step.blocks);
        Some(Self {
            block: u32::try_from(blocks).ok()?,
            within: Within {
                kernel: self.within.kernel + times * step.within.kernel,
                entry: self.within.entry + times * step.within.entry,
            },
        })
    }

    /// The step from `self` to `next`, if it goes forward and at most one block on.
    fn step_to(&self, next: &Self) -> Option<Step> {
        let step = Step {
            blocks: next.block.checked_sub(self.block)?,
            within: Within {
                kernel: next.within.kernel.checked_sub(self.within.kernel)?,
                entry: next.within.entry.checked_sub(self.within.entry)?,
            },
        };
        (step.blocks <= 1 && step != Step::default()).then_some(step)
    }
}

/// How a segment lies in its blocks: where it starts, how many entries lie evenly, and how often that
/// repeats at which steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) entries: u64,
    pub(crate) repeats: u64,
    pub(crate) source: Within,
    pub(crate) source_step: Step,
    pub(crate) destination: Within,
    pub(crate) destination_step: Step,
}

impl Shape {
    /// Bytes from one repetition to the next for a nest, on the source and on the destination.
    pub(crate) fn steps(&self, nest: &Nest) -> (u64, u64) {
        (
            self.source_step.offset(&nest.steps.source),
            self.destination_step.offset(&nest.steps.destination),
        )
    }
}

/// A stretch of entries that lie evenly on both sides: the blocks it starts in, and its shape.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) source: u32,
    pub(crate) destination: u32,
    /// Index among the shapes of its rhythm.
    pub(crate) shape: u32,
}

/// The segments of a request, for one rhythm after the other, each in the order of its tables.
#[derive(Clone, Debug, Default)]
pub(crate) struct Segments {
    shapes: Vec<Shape>,
    list: Vec<Segment>,
    /// Where in `shapes` and in `list` each rhythm's part ends.
    ends: Vec<(usize, usize)>,
    /// The segment that the next stretch may still continue.
    open: Option<(Slot, Slot, Shape)>,
}

impl Segments {
    /// The segments of rhythm `index`, and the shapes that they name.
    pub(crate) fn of(&self, index: usize) -> (&[Segment], &[Shape]) {
        let start = self.start(index);
        let end = self.ends[index];
        (&self.list[start.1..end.1], &self.shapes[start.0..end.0])
    }

    fn start(&self, index: usize) -> (usize, usize) {
        if index == 0 { (0, 0) } else { self.ends[index - 1] }
    }

    /// Ends a rhythm.
    pub(crate) fn end(&mut self) {
        self.close();
        self.ends.push((self.shapes.len(), self.list.len()));
    }

    /// Adds a stretch, as a further repetition of the last one where it continues it.
    fn push(&mut self, source: Slot, destination: Slot, entries: u64) {
        if let Some((first_source, first_destination, shape)) = &mut self.open
            && shape.entries == entries
        {
            if shape.repeats == 1 {
                let steps =
                    first_source.step_to(&source).zip(first_destination.step_to(&destination));
                if let Some((source_step, destination_step)) = steps {
                    *shape = Shape { repeats: 2, source_step, destination_step, ..*shape };
                    return;
                }
            } else if first_source.ahead(&shape.source_step, shape.repeats) == Some(source)
                && first_destination.ahead(&shape.destination_step, shape.repeats)
                    == Some(destination)
            {
                shape.repeats += 1;
                return;
            }
        }
        self.open(source, destination, entries);
    }

    /// Adds `repeats` stretches that fill blocks in a row on both sides.
    fn push_blocks(&mut self, source: u32, destination: u32, entries: u64, repeats: u64) {
        let slot = |block| Slot { block, within: Within::default() };
        self.push(slot(source), slot(destination), entries);
        let mut left = repeats - 1;
        let in_a_row = |shape: &Shape| {
            shape.repeats == 1
                || (shape.source_step, shape.destination_step) == (Step::BLOCK, Step::BLOCK)
        };
        if left > 0 && !self.open.as_ref().is_some_and(|(_, _, shape)| in_a_row(shape)) {
            // The first one continued something else; the others follow by themselves.
            self.open(slot(source + 1), slot(destination + 1), entries);
            left -= 1;
        }
        if let Some((_, _, shape)) = self.open.as_mut().filter(|_| left > 0) {
            (shape.source_step, shape.destination_step) = (Step::BLOCK, Step::BLOCK);
            shape.repeats += left;
        }
    }

    /// Adds stretches that fill one block each, none of which continues another or the one before.
    fn push_scattered(&mut self, sources: &[u32], destinations: &[u32], entries: u64) {
        if sources.is_empty() {
            return;
        }
        self.close();
        let shape = self.number(Shape { entries, repeats: 1, ..Shape::default() });
        let pairs = sources.iter().zip(destinations);
        let segment = |(&source, &destination)| Segment { source, destination, shape };
        self.list.extend(pairs.map(segment));
    }

    /// Starts a new segment.
    fn open(&mut self, source: Slot, destination: Slot, entries: u64) {
        self.close();
        let shape = Shape {
            entries,
            repeats: 1,
            source: source.within,
            destination: destination.within,
            ..Shape::default()
        };
        self.open = Some((source, destination, shape));
    }

    fn close(&mut self) {
        let Some((source, destination, shape)) = self.open.take() else { return };
        let shape = self.number(shape);
        let (source, destination) = (source.block, destination.block);
        self.list.push(Segment { source, destination, shape });
    }

    /// The index of a shape among those of the rhythm at hand.
    fn number(&mut self, shape: Shape) -> u32 {
        // Mostly the shape of the segment before; where block sizes differ, some take turns.
        let known = &self.shapes[self.start(self.ends.len()).0..];
        let recent = known.iter().rposition(|known| *known == shape);
        let index = recent.unwrap_or(known.len());
        if recent.is_none() {
            self.shapes.push(shape);
        }
        index as u32
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
    /// The entries that share a block of both sides with the one before `end`.
    pub(crate) fn last_block(&self, end: u64) -> Range<u64> {
        if !self.phase.is_all() {
            return end..end;
        }
        let blocks = [self.source.entries, self.destination.entries];
        let start = blocks.map(|entries| (end - 1) / entries * entries);
        let after = blocks.map(|entries| end.checked_next_multiple_of(entries).unwrap_or(end));
        start[0].max(start[1])..after[0].min(after[1])
    }

    /// Adds the segments of entries `first..end`.
    pub(crate) fn walk(
        &self,
        first: u64,
        end: u64,
        (source, destination): (&Table<'_>, &Table<'_>),
        segments: &mut Segments,
    ) -> Result<(), RequestError> {
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
            let mut source = self.source.enter(Side::Source, source, entry)?;
            let mut destination = self.destination.enter(Side::Destination, destination, entry)?;
            loop {
                let blocks = source.whole_blocks(&destination, turn_end - entry);
                if blocks > 0 {
                    push_whole_blocks(&source, &destination, blocks, segments);
                    let entries = blocks as u64 * source.holding.entries;
                    entry += entries;
                    if entry >= turn_end {
                        break;
                    }
                    source.skip_blocks(blocks)?;
                    destination.skip_blocks(blocks)?;
                    continue;
                }
                let even = source.even_left().min(destination.even_left());
                let entries = even.min(turn_end - entry);
                segments.push(source.slot, destination.slot, entries);
                entry += entries;
                if entry >= turn_end {
                    break;
                }
                source.advance(entries)?;
                destination.advance(entries)?;
            }
        }
        Ok(())
    }
}

/// Adds `blocks` whole blocks of both sides, in runs of ids that follow each other.
fn push_whole_blocks(
    source: &Walker<'_>,
    destination: &Walker<'_>,
    blocks: usize,
    segments: &mut Segments,
) {
    let Holding { even, split, .. } = *source.holding;
    let (sources, destinations) = (&source.ids()[..blocks], &destination.ids()[..blocks]);
    let mut start = 0;
    while start < blocks {
        let mut end = start + 1;
        while end < blocks
            && sources[end] == sources[end - 1].wrapping_add(1)
            && destinations[end] == destinations[end - 1].wrapping_add(1)
        {
            end += 1;
        }
        let first = |ids: &[u32]| ids[start].wrapping_mul(split as u32);
        let repeats = (end - start) as u64 * split;
        segments.push_blocks(first(sources), first(destinations), even, repeats);
        start = end;
        if repeats == 1 {
            // Most often blocks lie scattered: those that neither continue the one before nor are
            // continued by the one after. The last may still be continued by what comes.
            let alone = |at: usize| {
                sources[at + 1] != sources[at].wrapping_add(1)
                    || destinations[at + 1] != destinations[at].wrapping_add(1)
            };
            let mut end = start;
            while end + 1 < blocks && alone(end) {
                end += 1;
            }
            segments.push_scattered(&sources[start..end], &destinations[start..end], even);
            start = end;
        }
    }
}

/// Adds the part of a destination group's blocks that a request neither fills nor finds filled.
pub(crate) fn walk_rest(
    holding: &Holding,
    entries: &Entries,
    table: &Table<'_>,
    segments: &mut Segments,
) -> Result<(), RequestError> {
    let local = |index| holding.phase.local(index);
    let (held, first, end) = (local(entries.held), local(entries.first), local(entries.end));
    // Own blocks before the first needed entry, then those from the last one on.
    let before = held / holding.entries..first.div_ceil(holding.entries);
    let after = (end / holding.entries).max(before.end)..u64::MAX;
    for positions in [before, after] {
        let blocks = own_blocks(positions.start, holding.null_block, table);
        for (position, _) in blocks.take_while(|(position, _)| *position < positions.end) {
            let block = position.saturating_mul(holding.entries);
            let after = block.saturating_add(holding.entries);
            for (from, to) in [(held, first), (end, after)] {
                let (mut at, to) = (from.max(block), to.min(after));
                while at < to {
                    let walker = holding.enter_local(Side::Destination, table, at)?;
                    let count = walker.even_left().min(to - at);
                    segments.push(walker.slot, walker.slot, count);
                    at += count;
                }
            }
        }
    }
    Ok(())
}

/// Adds the live blocks of a table, whole, from position `first_own` on.
pub(crate) fn walk_own_blocks(
    first_own: u64,
    null_block: Option<u32>,
    table: &Table<'_>,
    segments: &mut Segments,
) {
    for (_, id) in own_blocks(first_own, null_block, table) {
        let slot = Slot { block: id, within: Within::default() };
        segments.push(slot, slot, 1);
    }
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
