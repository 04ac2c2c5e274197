//! The walk over clusters and segments that yields copies.

use kvferry_layout::ByteCopy;

use crate::compile::{Cluster, Fitted};
use crate::nest::{Loop, MAX_LOOPS, advance};
use crate::summary::Summary;
use crate::walk::{SegmentList, Segments};

/// Walks clusters, their outer loops, segments, repetitions and nests, in this order.
#[derive(Clone, Debug)]
pub(crate) struct Cursor<'t> {
    clusters: &'t [Cluster],
    segments: &'t Segments,
    /// The cluster at hand, its part of the segments, and its loops around them.
    cluster: Option<&'t Cluster>,
    list: SegmentList<'t>,
    around: &'t [Loop],
    /// Its nests fitted to every shape, those of a shape together: in `fits`, or at hand.
    usual: Option<&'t [Fitted]>,
    fits: Vec<Fitted>,
    /// What comes next in it.
    outer: [u64; MAX_LOOPS],
    segment: usize,
    repeat: u64,
    nest: usize,
    /// The nest that is being walked, if one is: its fit, where it starts, and how far it is.
    walking: bool,
    fit: usize,
    start: (u64, u64),
    inner: [u64; MAX_LOOPS],
    /// The copy that the next run may still continue; empty at the start.
    pending: Pending,
}

impl<'t> Cursor<'t> {
    pub(crate) fn new(clusters: &'t [Cluster], segments: &'t Segments) -> Self {
        Self {
            clusters,
            segments,
            cluster: None,
            list: SegmentList::default(),
            around: &[],
            usual: None,
            fits: vec![],
            outer: [0; MAX_LOOPS],
            segment: 0,
            repeat: 0,
            nest: 0,
            walking: false,
            fit: 0,
            start: (0, 0),
            inner: [0; MAX_LOOPS],
            pending: Pending::default(),
        }
    }

    /// Moves to the next cluster that has segments. `None` at the end.
    fn next_cluster(&mut self) -> Option<&'t Cluster> {
        loop {
            let Some((cluster, rest)) = self.clusters.split_first() else {
                (self.cluster, self.list, self.around) = (None, SegmentList::default(), &[]);
                return None;
            };
            self.clusters = rest;
            self.list = self.segments.of(cluster.pairing);
            if self.list.is_empty() {
                continue;
            }
            // Where there is but one segment, loops around it are loops of its nest.
            let inside = self.list.len() == 1 && cluster.nests.len() == 1;
            let (inside, around) =
                if inside { (&cluster.outer[..], &[][..]) } else { (&[][..], &cluster.outer[..]) };
            self.around = around;
            self.usual = match self.list.shapes {
                [shape] if *shape == cluster.usual.0 && inside.is_empty() => Some(&cluster.usual.1),
                _ => None,
            };
            self.fits.clear();
            if self.usual.is_none() {
                for shape in self.list.shapes {
                    // Where several nests take turns, so do the repetitions.
                    let count = if cluster.nests.len() == 1 { shape.repeats } else { 1 };
                    let nests = cluster.nests.iter();
                    self.fits.extend(nests.map(|nest| Fitted::new(nest, shape, count, inside)));
                }
            }
            (self.segment, self.repeat, self.nest) = (0, 0, 0);
            self.outer = [0; MAX_LOOPS];
            let left = self.cluster.replace(cluster);
            self.pending.sealed |= left.is_some_and(|left| left.regions != cluster.regions);
            return Some(cluster);
        }
    }

    /// Moves to the next nest to walk. `false` at the end.
    fn next_nest(&mut self) -> bool {
        let mut at_hand = self.cluster;
        if self.segment == self.list.len() {
            self.segment = 0;
            if !advance(&mut self.outer, self.around) {
                at_hand = None;
            }
        }
        let Some(cluster) = at_hand.or_else(|| self.next_cluster()) else { return false };
        let segment = self.list.at(self.segment);
        let shape = &self.list.shapes[segment.shape as usize];
        let nests = cluster.nests.len();
        self.fit = segment.shape as usize * nests + self.nest;
        self.start = cluster.at_blocks(self.base(cluster), segment.blocks);
        let offset = self.fits()[self.fit].offset;
        self.start.0 = self.start.0.wrapping_add(offset.0);
        self.start.1 = self.start.1.wrapping_add(offset.1);
        if self.repeat > 0 {
            let (source, destination) = shape.steps(&cluster.nests[self.nest]);
            self.start.0 = self.start.0.wrapping_add(self.repeat * source);
            self.start.1 = self.start.1.wrapping_add(self.repeat * destination);
        }
        // The one after this: next nest, then next repetition, then next segment.
        self.nest += 1;
        if self.nest == nests {
            self.nest = 0;
            self.repeat += 1;
            if nests == 1 || self.repeat == shape.repeats {
                self.repeat = 0;
                self.segment += 1;
            }
        }
        true
    }

    #[inline(always)]
    fn fits(&self) -> &[Fitted] {
        self.usual.unwrap_or(&self.fits)
    }

    /// Where the next nest starts in block 0.
    #[inline(always)]
    fn base(&self, cluster: &Cluster) -> (u64, u64) {
        let nest = &cluster.nests[self.nest];
        let mut base = (nest.source, nest.destination);
        for (index, repeat) in self.outer.iter().zip(self.around) {
            base.0 = base.0.wrapping_add(index * repeat.source);
            base.1 = base.1.wrapping_add(index * repeat.destination);
        }
        base
    }

    /// Writes the next copies into `buffer`; returns how many, fewer than fit only at the end.
    pub(crate) fn fill(&mut self, buffer: &mut [ByteCopy]) -> usize {
        let mut out = Out { buffer, filled: 0, pending: self.pending };
        let ended = loop {
            if !self.walking {
                self.pending = out.pending;
                if !self.next_nest() {
                    break true;
                }
                out.pending = self.pending;
                self.walking = true;
                self.inner = [0; MAX_LOOPS];
            }
            let fitted = &self.fits()[self.fit];
            let all = if fitted.len == 0 {
                self.add_lone_runs(&mut out)
            } else if self.inner == [0; MAX_LOOPS] && out.add_all(fitted, self.start) {
                true
            } else {
                self.add_loops(&mut out)
            };
            if !all {
                break false;
            }
            self.walking = false;
        };
        if ended && out.filled < out.buffer.len() && out.pending.copy.bytes > 0 {
            out.buffer[out.filled] = out.pending.copy;
            out.filled += 1;
            out.pending = Pending::default();
        }
        self.pending = out.pending;
        out.filled
    }

    /// Adds the runs of the nest at hand from where it stopped. `false` when the buffer is full.
    #[inline(always)]
    fn add_loops(&mut self, out: &mut Out<'_>) -> bool {
        let Fitted { run, loops, len, .. } = self.fits()[self.fit];
        let last = len - 1;
        let innermost = loops[last];
        loop {
            let (mut source, mut destination) = self.start;
            for (index, repeat) in self.inner[..len].iter().zip(&loops[..len]) {
                source = source.wrapping_add(index * repeat.source);
                destination = destination.wrapping_add(index * repeat.destination);
            }
            for index in self.inner[last]..innermost.count {
                if !out.add(source, destination, run) {
                    self.inner[last] = index;
                    return false;
                }
                source = source.wrapping_add(innermost.source);
                destination = destination.wrapping_add(innermost.destination);
            }
            self.inner[last] = 0;
            if !advance(&mut self.inner, &loops[..last]) {
                return true;
            }
        }
    }

    /// Adds the one run of the nest at hand and, where the cluster has no other nest, what follows in
    /// the cluster as long as segments have one run each. `false` when the buffer is full.
    #[inline(always)]
    fn add_lone_runs(&mut self, out: &mut Out<'_>) -> bool {
        if !out.add(self.start.0, self.start.1, self.fits()[self.fit].run) {
            return false;
        }
        let Some(cluster) = self.cluster.filter(|cluster| cluster.nests.len() == 1) else {
            return true;
        };
        loop {
            let base = self.base(cluster);
            for index in self.segment..self.list.len() {
                let segment = self.list.at(index);
                let fit = &self.fits()[segment.shape as usize];
                if fit.len > 0 {
                    self.segment = index;
                    return true;
                }
                let (source, destination) = cluster.at_blocks(base, segment.blocks);
                let source = source.wrapping_add(fit.offset.0);
                let destination = destination.wrapping_add(fit.offset.1);
                if !out.add(source, destination, fit.run) {
                    self.start = (source, destination);
                    self.fit = segment.shape as usize;
                    self.segment = index + 1;
                    return false;
                }
            }
            self.segment = 0;
            if !advance(&mut self.outer, self.around) {
                // The cluster is done.
                (self.segment, self.around) = (self.list.len(), &[]);
                return true;
            }
        }
    }

    /// What all copies amount to, nest by nest.
    pub(crate) fn summary(mut self) -> Summary {
        let mut summary = Summary::default();
        while self.next_nest() {
            let fitted = self.fits()[self.fit];
            let run = fitted.run;
            let loops = &fitted.loops[..fitted.len];
            let at = |inner: &[u64]| {
                inner.iter().zip(loops).fold(self.start, |at, (index, repeat)| {
                    let source = at.0.wrapping_add(index * repeat.source);
                    (source, at.1.wrapping_add(index * repeat.destination))
                })
            };
            let mut inner = [0; MAX_LOOPS];
            let one_by_one = fitted.touches_itself;
            loop {
                let (source, destination) = at(&inner);
                if self.pending.continued_by(source, destination) {
                    self.pending.copy.bytes += run;
                } else {
                    let bytes = self.pending.copy.bytes;
                    summary.add(u64::from(bytes > 0), bytes);
                    self.pending = Pending::new(source, destination, run);
                }
                if one_by_one {
                    if advance(&mut inner, loops) {
                        continue;
                    }
                } else if fitted.len > 0 {
                    // No two runs of the nest touch: all between the first and the last are alike.
                    summary.add(1, self.pending.copy.bytes);
                    summary.add(fitted.runs - 2, run);
                    let last: Vec<u64> = loops.iter().map(|repeat| repeat.count - 1).collect();
                    let (source, destination) = at(&last);
                    self.pending = Pending::new(source, destination, run);
                }
                break;
            }
        }
        let bytes = self.pending.copy.bytes;
        summary.add(u64::from(bytes > 0), bytes);
        summary
    }
}

/// A caller's buffer, and the copy that may still grow.
struct Out<'b> {
    buffer: &'b mut [ByteCopy],
    filled: usize,
    pending: Pending,
}

impl Out<'_> {
    /// Adds a run: to the pending copy where it continues it, or as the new pending one. `false`,
    /// and nothing is added, when the buffer is full.
    #[inline(always)]
    fn add(&mut self, source: u64, destination: u64, run: u64) -> bool {
        if self.pending.continued_by(source, destination) {
            self.pending.copy.bytes += run;
            return true;
        }
        if self.pending.copy.bytes > 0 {
            let Some(slot) = self.buffer.get_mut(self.filled) else { return false };
            *slot = self.pending.copy;
            self.filled += 1;
        }
        self.pending = Pending::new(source, destination, run);
        true
    }

    /// Adds all runs of a nest at once; `false`, and nothing is added, where the buffer may be too
    /// short for that or where they might continue each other.
    #[inline(always)]
    fn add_all(&mut self, fitted: &Fitted, start: (u64, u64)) -> bool {
        let (buffer, runs) = (&mut self.buffer[self.filled..], fitted.runs as usize);
        if fitted.touches_itself || buffer.len() <= runs {
            return false;
        }
        let continued = self.pending.continued_by(start.0, start.1);
        let ended = usize::from(!continued && self.pending.copy.bytes > 0);
        if ended > 0 {
            buffer[0] = self.pending.copy;
        }
        let slots = &mut buffer[ended..ended + runs];
        fitted.write(start, slots);
        if continued {
            let bytes = self.pending.copy.bytes + fitted.run;
            slots[0] = ByteCopy { bytes, ..self.pending.copy };
        }
        self.pending = Pending { copy: slots[runs - 1], sealed: false };
        self.filled += ended + runs - 1;
        true
    }
}

/// A copy that the next run may continue; none when it has no bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Pending {
    copy: ByteCopy,
    /// The next run lies in another region, which is registered by itself: it makes a new copy even
    /// where it touches.
    sealed: bool,
}

impl Pending {
    #[inline(always)]
    fn continued_by(&self, source: u64, destination: u64) -> bool {
        let ByteCopy { source: from, destination: to, bytes } = self.copy;
        from.wrapping_add(bytes) == source
            && to.wrapping_add(bytes) == destination
            && bytes > 0
            && !self.sealed
    }

    fn new(source: u64, destination: u64, bytes: u64) -> Self {
        Self { copy: ByteCopy { source, destination, bytes }, sealed: false }
    }
}
