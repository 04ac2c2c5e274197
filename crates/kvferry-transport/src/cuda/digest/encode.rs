//! A digest's program as the kernel reads it: see sum.h.

use std::collections::HashMap;

use kvferry_digest::{Digest, Nest, Program};
use kvferry_layout::Kernel;

/// What is added up before it is folded; as sum.h says.
const MOST_ENTRIES: u64 = 2048;
const LANES: u64 = 32;
const HEADER: usize = 24;
const ENTRY: usize = 32;
/// What a unit's beginning and end take, in entries.
const UNIT: u64 = 16;
const NEST: usize = 80;
const LEVEL: usize = 16;
const PIECES: u32 = 3;
const PIECE_BITS: u32 = 21;

/// The bytes of a program, and which nest its units belong to.
pub(crate) struct Encoded {
    pub(crate) bytes: Vec<u8>,
    pub(crate) units: u32,
    /// For every nest: its number in the program, and its first unit.
    first_units: Vec<(usize, u32)>,
}

impl Encoded {
    /// Encodes a program for so many warps; `None` where it is too long for the kernel's numbers.
    pub(crate) fn new(program: &Program, warps: u64) -> Option<Self> {
        let mut writer = Writer::new(program);
        let nests = program.nests().iter();
        let shapes: Vec<Shape> = nests.map(|nest| Shape::of(program, nest)).collect();
        let chunk = chunk(&shapes, warps.max(1));
        for ((number, nest), shape) in program.nests().iter().enumerate().zip(&shapes) {
            writer.nest(number, nest, shape, chunk)?;
        }
        writer.finish()
    }

    /// The digests of the program's parts, from the sums of its units.
    pub(crate) fn digests(&self, program: &Program, sums: &[[u64; 2]]) -> Vec<Digest> {
        let mut values = vec![Digest::default(); program.parts()];
        let ends = self.first_units.iter().skip(1).map(|(_, first)| *first).chain([self.units]);
        for ((number, first), end) in self.first_units.iter().zip(ends) {
            let nest = &program.nests()[*number];
            let sum: Digest =
                sums[*first as usize..end as usize].iter().map(|sum| Digest(*sum)).sum();
            values[nest.part] += sum.times(nest.scale);
        }
        program.digests(&values.iter().map(|value| value.0).collect::<Vec<_>>())
    }
}

/// How many entries a lane of a unit takes. All warps take as many units, or one less: a last round in
/// which few of them have one would cost as much as any other.
fn chunk(shapes: &[Shape], warps: u64) -> u64 {
    let units = |chunk: u64| shapes.iter().map(|shape| shape.units(chunk)).sum::<u64>();
    let fewest = units(MOST_ENTRIES).div_ceil(warps).max(1);
    // The least that makes no more units than that.
    let of_rounds = |rounds: u64| {
        let (mut least, mut most) = (1, MOST_ENTRIES);
        while least < most {
            let middle = (least + most) / 2;
            if units(middle) > rounds * warps { least = middle + 1 } else { most = middle }
        }
        least
    };
    let candidates = (fewest..fewest + 8).map(|rounds| (rounds, of_rounds(rounds)));
    let best = candidates.min_by_key(|(rounds, chunk)| rounds * (chunk + UNIT));
    best.map_or(MOST_ENTRIES, |(_, chunk)| chunk)
}

/// How a nest's bytes are dealt out.
struct Shape {
    entries: u64,
    columns: u64,
    per_run: u64,
    /// Four words at a time, or one.
    four: bool,
    per_element: u64,
    /// Entries that a warp takes at once.
    at_once: u64,
}

impl Shape {
    fn of(program: &Program, nest: &Nest) -> Self {
        let run = nest.run;
        let strides = nest.levels.iter().map(|level| level.stride).chain([nest.block, nest.entry]);
        let aligned = strides.chain([nest.start, run.bytes]).all(|bytes| bytes.is_multiple_of(16))
            && nest.kernel.is_none_or(|kernel| kernel.stride.is_multiple_of(16));
        let four = aligned && run.count == 1 && run.shift == 0;
        let per_element = (run.bytes + 6) / 4;
        let per_run = if four { run.bytes / 16 } else { run.count * per_element };
        let runs: u64 = nest.levels.iter().map(|level| level.count).product();
        let stretches = &program.course(nest).stretches;
        let entries = stretches.iter().map(|stretch| stretch.count).sum();
        let columns = runs * per_run;
        let at_once = (LANES / columns.max(1)).max(1);
        Self { entries, columns, per_run, four, per_element, at_once }
    }

    /// Groups of columns that a warp has a lane for each of.
    fn groups(&self) -> u64 {
        self.columns.div_ceil(LANES)
    }

    /// Units, where each lane takes so many entries.
    fn units(&self, chunk: u64) -> u64 {
        self.groups() * self.entries.div_ceil(self.at_once * chunk)
    }
}

struct Writer<'p> {
    program: &'p Program,
    nests: Vec<u8>,
    levels: Vec<u8>,
    pairs: Vec<u8>,
    entries: Vec<u8>,
    units: u64,
    first_units: Vec<(usize, u32)>,
    /// What was written already: where the weights and entries are.
    weights: HashMap<usize, u32>,
    known_entries: HashMap<(usize, u64, Option<Kernel>, u64), u32>,
}

impl<'p> Writer<'p> {
    fn new(program: &'p Program) -> Self {
        let mut pairs = vec![];
        program.keys().iter().for_each(|key| put_pair(&mut pairs, *key));
        Self {
            program,
            nests: vec![],
            levels: vec![],
            pairs,
            entries: vec![],
            units: 0,
            first_units: vec![],
            weights: HashMap::new(),
            known_entries: HashMap::new(),
        }
    }

    fn nest(&mut self, number: usize, nest: &Nest, shape: &Shape, chunk: u64) -> Option<()> {
        if shape.units(chunk) == 0 {
            return Some(());
        }
        let first_unit = u32::try_from(self.units).ok()?;
        self.units += shape.units(chunk);
        self.first_units.push((number, first_unit));
        let first_level = (self.levels.len() / LEVEL) as u32;
        for level in &nest.levels {
            self.levels.extend(level.stride.to_le_bytes());
            put(
                &mut self.levels,
                &[u32::try_from(level.count).ok()?, u32::try_from(level.keys).ok()?],
            );
        }
        let weights = *self.weights.entry(nest.run.weights).or_insert_with(|| {
            let first = (self.pairs.len() / 16) as u32;
            let words = &self.program.weights(nest).words;
            words.iter().for_each(|weight| put_pair(&mut self.pairs, *weight));
            first
        });
        let entries = self.entries(nest);
        self.nests.extend(nest.start.to_le_bytes());
        self.nests.extend(nest.run.stride.to_le_bytes());
        let numbers = [
            u64::from(first_unit),
            u64::from(!shape.four),
            shape.columns,
            shape.per_run,
            shape.groups(),
            shape.entries,
            chunk * shape.at_once,
            shape.at_once,
            entries.into(),
            weights.into(),
            first_level.into(),
            nest.levels.len() as u64,
            nest.run.bytes,
            nest.run.shift,
            shape.per_element,
            0,
        ];
        for number in numbers {
            put(&mut self.nests, &[u32::try_from(number).ok()?]);
        }
        Some(())
    }

    /// The entries of a nest: their factors, in pieces, and where they start, from its start on.
    fn entries(&mut self, nest: &Nest) -> u32 {
        let known = (nest.course, nest.block, nest.kernel, nest.entry);
        *self.known_entries.entry(known).or_insert_with(|| {
            let first = (self.entries.len() / ENTRY) as u32;
            for stretch in &self.program.course(nest).stretches {
                let start = nest.address(stretch) - nest.start;
                let keys = &self.program.keys()[stretch.keys..][..stretch.count as usize];
                for (key, entry) in keys.iter().zip(0..) {
                    for whole in key {
                        for piece in 0..PIECES {
                            let bits = (whole >> (PIECE_BITS * piece)) as u32;
                            put(&mut self.entries, &[bits & ((1 << PIECE_BITS) - 1)]);
                        }
                    }
                    self.entries.extend((start + entry * nest.entry).to_le_bytes());
                }
            }
            first
        })
    }

    fn finish(self) -> Option<Encoded> {
        let Self { nests, levels, pairs, entries, units, first_units, .. } = self;
        let units = u32::try_from(units).ok()?;
        let mut bytes = vec![0; HEADER];
        // The widest first, so that all are aligned.
        bytes.extend(&nests);
        let mut starts = [0; 4];
        for (start, part) in starts.iter_mut().zip([&levels, &pairs, &entries]) {
            bytes.resize(bytes.len().next_multiple_of(16), 0);
            *start = u32::try_from(bytes.len()).ok()?;
            bytes.extend(part);
        }
        let mut header = vec![];
        put(&mut header, &[(nests.len() / NEST) as u32, units]);
        put(&mut header, &starts);
        bytes[..HEADER].copy_from_slice(&header);
        Some(Encoded { bytes, units, first_units })
    }
}

fn put(out: &mut Vec<u8>, numbers: &[u32]) {
    out.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
}

fn put_pair(out: &mut Vec<u8>, pair: [u64; 2]) {
    out.extend(pair.iter().flat_map(|number| number.to_le_bytes()));
}
