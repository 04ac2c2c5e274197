//! A digest's program as the kernel reads it: see sum.h.

use std::collections::HashMap;

use kvferry_digest::{Digest, Nest, Program, Stretch};
use kvferry_layout::Kernel;

/// What is added up before it is folded; as sum.h says.
const MOST_ENTRIES: u64 = 2048;
const LANES: u64 = 32;
/// Of a tile: entries, and columns of 16 bytes.
const TILE_ENTRIES: usize = 32;
const TILE_COLUMNS: u64 = 8;
/// What a unit's beginning and end take, in entries.
const UNIT: u64 = 256;
const PIECES: u32 = 3;
const PIECE_BITS: u32 = 21;
/// Bytes of each, as in sum.h.
const HEADER: usize = 24;
const NEST: usize = 80;
const LEVEL: usize = 16;
const ENTRY: usize = 32;
const BATCH: usize = (LANES as usize) * 16 + TILE_ENTRIES * 4;

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
    /// By tiles, or by words.
    tiled: bool,
    per_element: u64,
    /// Entries that a warp takes at once, by words.
    at_once: u64,
}

impl Shape {
    fn of(program: &Program, nest: &Nest) -> Self {
        let run = nest.run;
        let strides = nest.levels.iter().map(|level| level.stride).chain([nest.block, nest.entry]);
        let aligned = strides.chain([nest.start, run.bytes]).all(|bytes| bytes.is_multiple_of(16))
            && nest.kernel.is_none_or(|kernel| kernel.stride.is_multiple_of(16));
        let stretches = &program.course(nest).stretches;
        // Where an entry starts is told in 32 bits.
        let far = |stretch: &Stretch| {
            let last = stretch.count.saturating_sub(1) * nest.entry;
            (nest.address(stretch) - nest.start + last) / 16 > u64::from(u32::MAX)
        };
        let tiled = aligned && run.count == 1 && run.shift == 0 && !stretches.iter().any(far);
        let per_element = (run.bytes + 6) / 4;
        let per_run = if tiled { run.bytes / 16 } else { run.count * per_element };
        let runs: u64 = nest.levels.iter().map(|level| level.count).product();
        let entries = stretches.iter().map(|stretch| stretch.count).sum();
        let columns = runs * per_run;
        let at_once = if tiled { 1 } else { (LANES / columns.max(1)).max(1) };
        Self { entries, columns, per_run, tiled, per_element, at_once }
    }

    /// Groups of columns that a warp takes at once.
    fn groups(&self) -> u64 {
        self.columns.div_ceil(if self.tiled { TILE_COLUMNS } else { LANES })
    }

    /// What a unit takes, where `chunk` entries are asked for: batches, or entries.
    fn of_unit(&self, chunk: u64) -> u64 {
        if self.tiled { chunk.div_ceil(TILE_ENTRIES as u64) } else { chunk * self.at_once }
    }

    /// Units, where each takes so many entries.
    fn units(&self, chunk: u64) -> u64 {
        let each = if self.tiled { TILE_ENTRIES as u64 } else { 1 };
        self.groups() * self.entries.div_ceil(self.of_unit(chunk) * each)
    }
}

struct Writer<'p> {
    program: &'p Program,
    nests: Vec<u8>,
    levels: Vec<u8>,
    pairs: Vec<u8>,
    entries: Vec<u8>,
    batches: Vec<u8>,
    units: u64,
    first_units: Vec<(usize, u32)>,
    /// What was written already: where the weights and entries are.
    weights: HashMap<usize, u32>,
    known_entries: HashMap<(Entries, bool), u32>,
}

/// What entries depend on: a course, and the strides of blocks, of their parts and of entries.
type Entries = (usize, u64, Option<Kernel>, u64);

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
            batches: vec![],
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
        let entries = self.entries(nest, shape.tiled);
        self.nests.extend(nest.start.to_le_bytes());
        self.nests.extend(nest.run.stride.to_le_bytes());
        let numbers = [
            u64::from(first_unit),
            u64::from(!shape.tiled),
            shape.columns,
            shape.per_run,
            shape.groups(),
            shape.entries,
            shape.of_unit(chunk),
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

    /// The entries of a nest, or their batches: the index of the first.
    fn entries(&mut self, nest: &Nest, tiled: bool) -> u32 {
        let known = ((nest.course, nest.block, nest.kernel, nest.entry), tiled);
        if let Some(first) = self.known_entries.get(&known) {
            return *first;
        }
        let mut entries = vec![];
        for stretch in &self.program.course(nest).stretches {
            let start = nest.address(stretch) - nest.start;
            let keys = &self.program.keys()[stretch.keys..][..stretch.count as usize];
            entries.extend(keys.iter().zip(0..).map(|(key, at)| (*key, start + at * nest.entry)));
        }
        let first = if tiled {
            let first = self.batches.len() / BATCH;
            entries.chunks(TILE_ENTRIES).for_each(|entries| put_batch(&mut self.batches, entries));
            first
        } else {
            let first = self.entries.len() / ENTRY;
            entries.iter().for_each(|entry| put_entry(&mut self.entries, *entry));
            first
        };
        self.known_entries.insert(known, first as u32);
        first as u32
    }

    fn finish(self) -> Option<Encoded> {
        let Self { nests, levels, pairs, entries, batches, units, first_units, .. } = self;
        let units = u32::try_from(units).ok()?;
        let mut bytes = vec![0; HEADER];
        // The widest first, so that all are aligned.
        bytes.extend(&nests);
        let mut starts = [0; 4];
        for (start, part) in starts.iter_mut().zip([&levels, &pairs, &entries, &batches]) {
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

/// The factor of an entry, and where it starts.
type Entry = ([u64; 2], u64);

/// An entry for words: its factor in pieces.
fn put_entry(out: &mut Vec<u8>, (factor, offset): Entry) {
    for whole in factor {
        for piece in 0..PIECES {
            let bits = (whole >> (PIECE_BITS * piece)) as u32;
            put(out, &[bits & ((1 << PIECE_BITS) - 1)]);
        }
    }
    out.extend(offset.to_le_bytes());
}

/// The entries of a tile: each lane's part of their factors, byte by byte, as the card's matrix units want
/// them, and where they start. Those that are missing count nothing, but something is read.
fn put_batch(out: &mut Vec<u8>, entries: &[Entry]) {
    let at = |number: usize| entries.get(number).copied();
    for lane in 0..LANES as usize {
        let (byte, quarter) = (lane / 4, lane % 4 * 4);
        for half in [0, TILE_ENTRIES / 2] {
            for which in 0..2 {
                out.extend((0..4).map(|number| {
                    let entry = at(half + quarter + number);
                    entry.map_or(0, |(factor, _)| factor[which].to_le_bytes()[byte])
                }));
            }
        }
    }
    let last = entries.last().map_or(0, |entry| entry.1);
    for number in 0..TILE_ENTRIES {
        let offset = at(number).map_or(last, |entry| entry.1);
        put(out, &[(offset / 16) as u32]);
    }
}
