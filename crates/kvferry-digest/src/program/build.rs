//! How a program is made: the parts are looked up among a rank's pieces, and their factors drawn from the key.

use std::collections::HashMap;
use std::ops::Range;

use kvferry_layout::{Phase, Piece, Span, StateBox};

use super::{Course, Held, Level, Nest, Program, Run, Stretch, Weights};
use crate::Part;
use crate::dot::{Chunk, WORDS};
use crate::error::DigestError;
use crate::field::{Pair, add, multiply};
use crate::keys::{Key, Of};

/// Runs that follow each other without a gap are joined up to so many words: their weights must fit in
/// the fastest cache, beside the bytes.
const JOINED_WORDS: usize = 256;

impl Program {
    /// What to add up for each of the parts, on a rank that holds them.
    pub fn new(held: Held<'_>, key: &Key, parts: &[Part]) -> Result<Self, DigestError> {
        let mut builder = Builder::new(held, key)?;
        for part in parts {
            builder.add(part)?;
        }
        Ok(builder.program)
    }

    /// The same for whole pieces of the rank, by group and index, and a range of entries of each.
    pub fn of_pieces(
        held: Held<'_>,
        key: &Key,
        pieces: &[((usize, usize), Span)],
    ) -> Result<Self, DigestError> {
        let mut builder = Builder::new(held, key)?;
        for &(at, entries) in pieces {
            let piece = held.manifest.groups().get(at.0).and_then(|group| group.pieces.get(at.1));
            let Some(Piece { state, bounds, phase, .. }) = piece else {
                return Err(DigestError::Malformed { state: format!("piece {at:?}") });
            };
            let (state, bounds) = (state.clone(), bounds.clone());
            let part = Part { state, bounds, phase: *phase, entries };
            builder.program.presence.push([0, 0]);
            let number = builder.program.presence.len() - 1;
            builder.nest(number, at, &part.bounds, &part)?;
        }
        Ok(builder.program)
    }
}

struct Builder<'a> {
    held: Held<'a>,
    key: &'a Key,
    program: Program,
    /// The factors of axes and entries that were drawn already, by what they are of.
    drawn: HashMap<(u8, u64, u64), usize>,
    courses: HashMap<(usize, u64, u64, Phase, Phase, Span), usize>,
    /// By the axes that make up a run, and the range of words of its rows.
    weights: HashMap<Vec<(usize, Span)>, usize>,
}

impl<'a> Builder<'a> {
    fn new(held: Held<'a>, key: &'a Key) -> Result<Self, DigestError> {
        let (groups, tables) = (held.manifest.groups().len(), held.tables.len());
        // Ranks of one engine may have more groups than this one.
        if groups > tables {
            return Err(DigestError::TableCount { groups, tables });
        }
        Ok(Self {
            held,
            key,
            program: Program::default(),
            drawn: HashMap::new(),
            courses: HashMap::new(),
            weights: HashMap::new(),
        })
    }

    fn add(&mut self, part: &Part) -> Result<(), DigestError> {
        let number = self.program.presence.len();
        self.program.presence.push([0, 0]);
        let state = || part.state.clone();
        let Phase { modulus, held } = part.phase;
        let backwards = part.bounds.0.iter().any(Span::is_empty);
        if backwards || held.is_empty() || held.end > modulus {
            return Err(DigestError::Malformed { state: state() });
        }
        let mut open = vec![part.bounds.clone()];
        let manifest = self.held.manifest;
        for (group, facts) in manifest.groups().iter().enumerate() {
            for (index, piece) in facts.pieces.iter().enumerate() {
                if piece.state != part.state || !holds(piece.phase, part.phase) {
                    continue;
                }
                if piece.bounds.0.len() != part.bounds.0.len() {
                    return Err(DigestError::Malformed { state: state() });
                }
                let mut rest = vec![];
                for bounds in open {
                    match bounds.intersect(&piece.bounds) {
                        Some(both) => {
                            self.nest(number, (group, index), &both, part)?;
                            bounds.subtract(&both, &mut rest);
                        }
                        None => rest.push(bounds),
                    }
                }
                open = rest;
            }
        }
        match open.pop() {
            Some(bounds) => Err(DigestError::NotHeld { state: state(), bounds }),
            None => Ok(()),
        }
    }

    fn nest(
        &mut self,
        part: usize,
        (group, index): (usize, usize),
        bounds: &StateBox,
        asked: &Part,
    ) -> Result<(), DigestError> {
        let piece = &self.held.manifest.groups()[group].pieces[index];
        let course = self.course((group, index), piece, asked)?;
        let (manifest, view) = (self.held.manifest, &piece.view);
        let width = u64::from(manifest.kind(piece).format.bytes);
        let region = manifest.regions()[view.region as usize];
        let inner = bounds.0.iter().zip(&piece.bounds.0).zip(&view.axes);
        let inner = inner.map(|((part, held), stride)| (part.start - held.start) * stride);
        let start = region.base + view.offset + inner.sum::<u64>();

        // The row: what lies along the last axis.
        let mut axes: Vec<(usize, Span, u64)> = (bounds.0.iter().zip(&view.axes).enumerate())
            .map(|(axis, (span, stride))| (axis, *span, *stride))
            .collect();
        let row = axes.pop();
        let (elements, step) =
            row.map_or((Span::from(0..1), width), |(_, span, step)| (span, step));
        let touching = step == width || elements.len() == 1;
        let first = elements.start * width;
        let mut run = Run {
            count: if touching { 1 } else { elements.len() },
            stride: step,
            bytes: if touching { elements.len() * width } else { width },
            shift: first % 4,
            weights: 0,
        };
        // What touches the row, and what has one index alone.
        let mut scale = self.key.state(&piece.state);
        let words = Span::from(first / 4..(elements.end * width).div_ceil(4));
        let mut joined: Vec<(usize, Span)> = vec![];
        let mut count = words.len() as usize;
        loop {
            let whole = run.count == 1 && run.shift == 0 && run.bytes.is_multiple_of(4);
            let next = axes.iter().position(|(_, span, stride)| {
                let fits = count.saturating_mul(span.len() as usize) <= JOINED_WORDS;
                span.len() == 1 || (whole && fits && *stride == run.bytes)
            });
            let Some(next) = next else { break };
            let (axis, span, _) = axes.remove(next);
            if span.len() == 1 {
                scale = multiply(scale, self.key.factor(Of::Axis(axis), span.start));
                continue;
            }
            joined.push((axis, span));
            run.bytes *= span.len();
            count *= span.len() as usize;
        }
        run.weights = self.run_weights(words, &joined);

        axes.sort_by_key(|(_, _, stride)| std::cmp::Reverse(*stride));
        let levels = axes.iter().map(|(axis, span, stride)| Level {
            count: span.len(),
            stride: *stride,
            keys: self.factors(Of::Axis(*axis), *span),
        });
        let levels: Vec<Level> = levels.collect();
        let course_facts = &self.program.courses[course];
        let runs: u64 = levels.iter().map(|level| level.count).product();
        self.program.bytes += course_facts.entries * runs * run.count * run.bytes;

        // Every byte as if it were 1.
        let mut ones = self.ones(&run, width);
        for level in &levels {
            let keys = &self.program.keys[level.keys..][..level.count as usize];
            ones = multiply(ones, keys.iter().fold([0, 0], |sum, key| add(sum, *key)));
        }
        ones = multiply(multiply(ones, course_facts.sum), scale);
        self.program.presence[part] = add(self.program.presence[part], ones);

        let (place, entry) = (region.place, view.entry);
        let (block, kernel) = (view.block, view.kernel);
        self.program.nests.push(Nest {
            part,
            place,
            start,
            block,
            kernel,
            entry,
            levels,
            course,
            run,
            scale,
        });
        Ok(())
    }

    /// Where the entries of a part are, by the table of its group.
    fn course(
        &mut self,
        (group, index): (usize, usize),
        piece: &Piece,
        asked: &Part,
    ) -> Result<usize, DigestError> {
        let Held { manifest, tokens, tables } = self.held;
        let per_block = manifest.entries_per_block(group, index);
        let even = piece.view.kernel.map_or(per_block, |kernel| kernel.entries);
        let known = (group, per_block, even, piece.phase, asked.phase, asked.entries);
        if let Some(course) = self.courses.get(&known) {
            return Ok(*course);
        }
        let Span { start, end } = asked.entries;
        let entries = manifest.kind(piece).law.entries(tokens);
        if start < end && end > entries {
            let (state, entry) = (asked.state.clone(), end - 1);
            return Err(DigestError::Beyond { state, entry, tokens, entries });
        }
        let keys = self.factors(Of::Entry, asked.entries);
        let null_block = manifest.groups()[group].null_block;
        let (first, blocks) = tables[group];
        let mut course = Course::default();
        let Phase { modulus, held } = asked.phase;
        let mut entry = start;
        while entry < end {
            let residue = entry % modulus;
            if residue < held.start {
                entry += held.start - residue;
                continue;
            }
            if residue >= held.end {
                entry += modulus - residue;
                continue;
            }
            let mut count = end - entry;
            if !asked.phase.is_all() {
                count = count.min(held.end - residue);
            }
            if !piece.phase.is_all() {
                // It holds all that the part has.
                count = count.min(piece.phase.held.end - entry % piece.phase.modulus);
            }
            let local = piece.phase.local(entry);
            let (position, slot) = (local / per_block, local % per_block);
            count = count.min(per_block - slot).min(even - slot % even);
            let block = position.checked_sub(first).and_then(|at| blocks.get(at as usize));
            let alive = block
                .filter(|id| null_block != Some(**id) && **id < manifest.groups()[group].blocks);
            let Some(&block) = alive else {
                let state = asked.state.clone();
                return Err(DigestError::NoBlock { state, group, position });
            };
            let at = keys + (entry - start) as usize;
            for key in &self.program.keys[at..at + count as usize] {
                course.sum = add(course.sum, *key);
            }
            course.entries += count;
            course.stretches.push(Stretch { block, slot, count, keys: at });
            entry += count;
        }
        self.program.courses.push(course);
        let number = self.program.courses.len() - 1;
        self.courses.insert(known, number);
        Ok(number)
    }

    /// The factors of a range, drawn once.
    fn factors(&mut self, of: Of, span: Span) -> usize {
        let kind = match of {
            Of::Entry => 0,
            Of::Word => 1,
            Of::Axis(axis) => 2 + axis as u8,
        };
        *self.drawn.entry((kind, span.start, span.end)).or_insert_with(|| {
            let keys = &mut self.program.keys;
            let start = keys.len();
            keys.extend((span.start..span.end).map(|index| self.key.factor(of, index)));
            start
        })
    }

    /// The weights of a row's words, repeated along the axes that were joined to it, the narrowest
    /// first.
    fn run_weights(&mut self, words: Span, joined: &[(usize, Span)]) -> usize {
        let mut known = joined.to_vec();
        known.push((usize::MAX, words));
        if let Some(weights) = self.weights.get(&known) {
            return *weights;
        }
        let row = (words.start..words.end).map(|word| self.key.factor(Of::Word, word));
        let mut all: Vec<Pair> = row.collect();
        for (axis, span) in joined {
            let inner = std::mem::take(&mut all);
            for index in span.start..span.end {
                let factor = self.key.factor(Of::Axis(*axis), index);
                all.extend(inner.iter().map(|weight| multiply(*weight, factor)));
            }
        }
        let chunks = all.chunks(WORDS).map(Chunk::new).collect();
        self.program.weights.push(Weights { words: all, chunks });
        let number = self.program.weights.len() - 1;
        self.weights.insert(known, number);
        number
    }

    /// What a run's bytes count where each of them is 1.
    fn ones(&self, run: &Run, width: u64) -> Pair {
        let weights = &self.program.weights[run.weights].words;
        let last = run.shift + if run.count == 1 { run.bytes } else { run.count * width };
        let count = |(word, weight): (u64, &Pair)| {
            let inside: Range<u64> = run.shift.max(word * 4)..last.min(word * 4 + 4);
            let ones: u64 = inside.map(|byte| 1 << (8 * (byte % 4))).sum();
            multiply(*weight, [ones, ones])
        };
        (0..).zip(weights).map(count).fold([0, 0], add)
    }
}

/// Whether a piece of these turns holds all entries of others.
fn holds(piece: Phase, part: Phase) -> bool {
    piece.is_all()
        || piece == part
        || (part.modulus.is_multiple_of(piece.modulus)
            && (part.held.start..part.held.end).all(|residue| piece.holds(residue)))
}
