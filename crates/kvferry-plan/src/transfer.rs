//! One request, and the copies that serve it.

use crate::compile::{Cluster, DestinationGroup, Leftover, Plan};
use crate::copy::{Area, Copy, Summary};
use crate::nest::{Loop, MAX_LOOPS, fuse};
use crate::request::{Request, RequestError, Side, Table};
use crate::walk::{Entries, Holding, Segments, Shape, walk_own_blocks, walk_rest};

/// A request that a plan has checked: yields its copies, any number of times.
#[derive(Clone, Debug)]
pub struct Transfer<'p> {
    plan: &'p Plan,
    /// For every rhythm.
    segments: Vec<Segments>,
    /// For every leftover.
    rest: Vec<Segments>,
}

impl Plan {
    /// Checks a request and prepares its copies, in time proportional to its blocks.
    pub fn transfer(&self, request: &Request<'_>) -> Result<Transfer<'_>, RequestError> {
        self.check(request)?;
        let group_entries = |law, group: usize| {
            Entries::new(law, &self.groups[group].window, request.tokens, request.cached[group])
        };
        let mut segments = Vec::with_capacity(self.rhythms.len());
        for rhythm in &self.rhythms {
            let group = rhythm.destination.group;
            let entries = group_entries(rhythm.law, group);
            let (source, destination) =
                (&request.source[rhythm.source.group], &request.destination[group]);
            segments.push(rhythm.walk(entries.first, entries.end, source, destination)?);
        }
        let mut rest = Vec::with_capacity(self.leftovers.len());
        for leftover in &self.leftovers {
            rest.push(match leftover {
                _ if request.tokens == 0 => Segments::default(),
                Leftover::Entries(law, holding) => {
                    let table = &request.destination[holding.group];
                    walk_rest(holding, &group_entries(*law, holding.group), table)?
                }
                Leftover::Blocks { group } => {
                    let facts = &self.groups[*group];
                    let first_own = facts.holdings.iter().map(|(law, holding)| {
                        let held = group_entries(*law, *group).held;
                        holding.phase.local(held) / holding.entries
                    });
                    let first_own = first_own.min().unwrap_or(u64::MAX);
                    walk_own_blocks(first_own, facts.null_block, &request.destination[*group])
                }
            });
        }
        Ok(Transfer { plan: self, segments, rest })
    }

    fn check(&self, request: &Request<'_>) -> Result<(), RequestError> {
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
        for rhythm in &self.rhythms {
            let Holding { group, blocks, null_block, .. } = rhythm.source;
            let one_slot =
                rhythm.law.entries == 0 && request.cached[rhythm.destination.group] < tokens;
            let table = &request.source[group];
            check_table(Side::Source, (group, blocks, null_block), one_slot, table)?;
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

impl<'p> Transfer<'p> {
    /// The copies from one source rank (by its index in the list that the plan was compiled from), in
    /// the order of the destination's groups and, within one, of addresses and block tables. No two
    /// that follow each other touch on both sides: such are one copy.
    pub fn copies(&self, source: usize) -> Copies<'_> {
        let clusters = self.plan.sources.get(source).map_or(&[][..], |clusters| clusters);
        Copies { cursor: Cursor::new(clusters, &self.segments) }
    }

    /// What the copies from one source rank amount to, without yielding them: takes time in
    /// proportion to the request's blocks.
    pub fn summary(&self, source: usize) -> Summary {
        let clusters = self.plan.sources.get(source).map_or(&[][..], |clusters| clusters);
        Cursor::new(clusters, &self.segments).summary()
    }

    /// What is left of the request's own destination blocks: the bytes of their pieces that no copy
    /// writes and no cached token holds, and their scratch. For engines that want it zeroed.
    pub fn rest(&self) -> Rest<'_> {
        Rest { cursor: Cursor::new(&self.plan.rest, &self.rest) }
    }
}

/// The copies of a request from one source rank. See [`Transfer::copies`].
#[derive(Clone, Debug)]
pub struct Copies<'t> {
    cursor: Cursor<'t>,
}

impl Copies<'_> {
    /// Writes the next copies into `buffer` and returns how many; fewer than fit only at the end.
    /// Never allocates.
    pub fn fill(&mut self, buffer: &mut [Copy]) -> usize {
        self.cursor.fill(buffer)
    }
}

impl Iterator for Copies<'_> {
    type Item = Copy;

    fn next(&mut self) -> Option<Copy> {
        let mut next = [Copy::default()];
        (self.cursor.fill(&mut next) == 1).then_some(next[0])
    }
}

/// What is left of a request's own blocks. See [`Transfer::rest`].
#[derive(Clone, Debug)]
pub struct Rest<'t> {
    cursor: Cursor<'t>,
}

impl Iterator for Rest<'_> {
    type Item = Area;

    fn next(&mut self) -> Option<Area> {
        let mut next = [Copy::default()];
        let found = self.cursor.fill(&mut next) == 1;
        found.then_some(Area { address: next[0].destination, bytes: next[0].bytes })
    }
}

/// A nest for one shape of segment: loops around a run, as few as can be.
#[derive(Clone, Copy, Debug)]
struct Fitted {
    run: u64,
    loops: [Loop; MAX_LOOPS],
    len: usize,
}

impl Fitted {
    fn new(cluster: &Cluster, nest: usize, shape: &Shape) -> Self {
        let nest = &cluster.nests[nest];
        let mut fitted = Self { run: nest.run, loops: [Loop::default(); MAX_LOOPS], len: 0 };
        let entries = Loop {
            count: shape.entries,
            source: cluster.source_steps.entry,
            destination: cluster.destination_steps.entry,
        };
        // Where several nests take turns, so do the repetitions.
        let repeats = Loop {
            count: if cluster.nests.len() == 1 { shape.repeats } else { 1 },
            source: shape.source_step.offset(&cluster.source_steps),
            destination: shape.destination_step.offset(&cluster.destination_steps),
        };
        for repeat in nest.loops.iter().chain([&entries, &repeats]) {
            if repeat.count > 1 {
                let at = fitted.loops[..fitted.len]
                    .iter()
                    .position(|other| other.destination < repeat.destination)
                    .unwrap_or(fitted.len);
                fitted.loops.copy_within(at..fitted.len, at + 1);
                fitted.loops[at] = *repeat;
                fitted.len += 1;
            }
        }
        fitted.len = fuse(&mut fitted.loops[..fitted.len], &mut fitted.run);
        fitted
    }

    fn runs(&self) -> u64 {
        self.loops[..self.len].iter().map(|repeat| repeat.count).product()
    }

    /// Whether a run can touch the next one although no two loops continue each other: when an outer
    /// loop starts again just where the inner ones ended.
    fn touches_itself(&self) -> bool {
        (0..self.len).any(|outer| {
            let inner = crate::nest::extent(&self.loops[outer + 1..self.len], self.run);
            (self.loops[outer].source, self.loops[outer].destination) == inner
        })
    }
}

/// Walks clusters, their outer loops, segments, repetitions and nests, in this order.
#[derive(Clone, Debug)]
struct Cursor<'t> {
    clusters: &'t [Cluster],
    segments: &'t [Segments],
    cluster: usize,
    outer: [u64; MAX_LOOPS],
    segment: usize,
    repeat: u64,
    nest: usize,
    /// The nest at hand, fitted to a shape of its segments.
    fitted: Fitted,
    fitted_to: Option<(usize, usize, u32)>,
    /// Whether a nest is being walked, where it starts, and how far it is.
    walking: bool,
    start: (u64, u64),
    inner: [u64; MAX_LOOPS],
    /// The copy that the next run may still continue; empty at the start.
    pending: Copy,
}

impl<'t> Cursor<'t> {
    fn new(clusters: &'t [Cluster], segments: &'t [Segments]) -> Self {
        Self {
            clusters,
            segments,
            cluster: 0,
            outer: [0; MAX_LOOPS],
            segment: 0,
            repeat: 0,
            nest: 0,
            fitted: Fitted { run: 0, loops: [Loop::default(); MAX_LOOPS], len: 0 },
            fitted_to: None,
            walking: false,
            start: (0, 0),
            inner: [0; MAX_LOOPS],
            pending: Copy::default(),
        }
    }

    /// Moves to the next nest to walk: sets `start` and `fitted`. `false` at the end.
    fn next_nest(&mut self) -> bool {
        let (clusters, segments) = (self.clusters, self.segments);
        while let Some(cluster) = clusters.get(self.cluster) {
            let segments = &segments[cluster.rhythm];
            let Some(segment) = segments.list.get(self.segment) else {
                self.segment = 0;
                if segments.list.is_empty() || !advance(&mut self.outer, &cluster.outer) {
                    self.cluster += 1;
                    self.outer = [0; MAX_LOOPS];
                }
                continue;
            };
            let shape = &segments.shapes[segment.shape as usize];
            let wanted = (self.cluster, self.nest, segment.shape);
            if self.fitted_to != Some(wanted) {
                self.fitted = Fitted::new(cluster, self.nest, shape);
                self.fitted_to = Some(wanted);
            }
            let nest = &cluster.nests[self.nest];
            let (mut source, mut destination) = (nest.source, nest.destination);
            for (index, repeat) in self.outer.iter().zip(&cluster.outer) {
                source = source.wrapping_add(index * repeat.source);
                destination = destination.wrapping_add(index * repeat.destination);
            }
            let steps = (&cluster.source_steps, &cluster.destination_steps);
            source = source.wrapping_add(segment.source.offset(steps.0));
            destination = destination.wrapping_add(segment.destination.offset(steps.1));
            if self.repeat > 0 {
                source = source.wrapping_add(self.repeat * shape.source_step.offset(steps.0));
                destination =
                    destination.wrapping_add(self.repeat * shape.destination_step.offset(steps.1));
            }
            self.start = (source, destination);
            // The one after this: next nest, then next repetition, then next segment.
            self.nest += 1;
            if self.nest == cluster.nests.len() {
                self.nest = 0;
                self.repeat += 1;
                if cluster.nests.len() == 1 || self.repeat == shape.repeats {
                    self.repeat = 0;
                    self.segment += 1;
                }
            }
            return true;
        }
        false
    }

    fn fill(&mut self, buffer: &mut [Copy]) -> usize {
        let mut filled = 0;
        let mut pending = self.pending;
        // Adds a run: as a continuation of the pending copy, or as the new pending one.
        // `false` when the buffer is full.
        let mut add = |source: u64, destination: u64, run: u64| {
            if pending.source.wrapping_add(pending.bytes) == source
                && pending.destination.wrapping_add(pending.bytes) == destination
                && pending.bytes > 0
            {
                pending.bytes += run;
                return true;
            }
            if pending.bytes > 0 {
                let Some(slot) = buffer.get_mut(filled) else { return false };
                *slot = pending;
                filled += 1;
            }
            pending = Copy { source, destination, bytes: run };
            true
        };
        let full = 'filling: loop {
            if !self.walking {
                if !self.next_nest() {
                    break false;
                }
                self.walking = true;
                self.inner = [0; MAX_LOOPS];
            }
            let Fitted { run, loops, len } = &self.fitted;
            let Some(last) = len.checked_sub(1) else {
                if !add(self.start.0, self.start.1, *run) {
                    break true;
                }
                self.walking = false;
                continue;
            };
            loop {
                let (mut source, mut destination) = self.start;
                for (index, repeat) in self.inner[..last].iter().zip(&loops[..last]) {
                    source = source.wrapping_add(index * repeat.source);
                    destination = destination.wrapping_add(index * repeat.destination);
                }
                let innermost = loops[last];
                source = source.wrapping_add(self.inner[last] * innermost.source);
                destination = destination.wrapping_add(self.inner[last] * innermost.destination);
                for index in self.inner[last]..innermost.count {
                    if !add(source, destination, *run) {
                        self.inner[last] = index;
                        break 'filling true;
                    }
                    source = source.wrapping_add(innermost.source);
                    destination = destination.wrapping_add(innermost.destination);
                }
                self.inner[last] = 0;
                if !advance(&mut self.inner, &loops[..last]) {
                    break;
                }
            }
            self.walking = false;
        };
        self.pending = pending;
        if !full && pending.bytes > 0 && filled < buffer.len() {
            buffer[filled] = pending;
            filled += 1;
            self.pending = Copy::default();
        }
        filled
    }

    fn summary(mut self) -> Summary {
        let mut summary = Summary::default();
        let mut pending = Copy::default();
        let touches = |pending: &Copy, (source, destination): (u64, u64)| {
            pending.bytes > 0
                && pending.source.wrapping_add(pending.bytes) == source
                && pending.destination.wrapping_add(pending.bytes) == destination
        };
        while self.next_nest() {
            let fitted = self.fitted;
            let run = fitted.run;
            let mut inner = [0; MAX_LOOPS];
            let one_by_one = fitted.touches_itself();
            loop {
                let at = |inner: &[u64; MAX_LOOPS]| {
                    let mut at = self.start;
                    for (index, repeat) in inner.iter().zip(&fitted.loops[..fitted.len]) {
                        at.0 = at.0.wrapping_add(index * repeat.source);
                        at.1 = at.1.wrapping_add(index * repeat.destination);
                    }
                    at
                };
                let first = at(&inner);
                let runs = if one_by_one { 1 } else { fitted.runs() };
                if touches(&pending, first) {
                    pending.bytes += run;
                } else {
                    summary.add(u64::from(pending.bytes > 0), pending.bytes);
                    pending = Copy { source: first.0, destination: first.1, bytes: run };
                }
                if runs > 1 {
                    summary.add(1, pending.bytes);
                    summary.add(runs - 2, run);
                    for (index, repeat) in inner.iter_mut().zip(&fitted.loops[..fitted.len]) {
                        *index = repeat.count - 1;
                    }
                    let last = at(&inner);
                    pending = Copy { source: last.0, destination: last.1, bytes: run };
                }
                if !one_by_one || !advance(&mut inner, &fitted.loops[..fitted.len]) {
                    break;
                }
            }
        }
        summary.add(u64::from(pending.bytes > 0), pending.bytes);
        summary
    }
}

/// Counts `indices` up by one, the last loop fastest. `false`, and all zero, after the last.
fn advance(indices: &mut [u64], loops: &[Loop]) -> bool {
    for (index, repeat) in indices.iter_mut().zip(loops).rev() {
        *index += 1;
        if *index < repeat.count {
            return true;
        }
        *index = 0;
    }
    false
}
