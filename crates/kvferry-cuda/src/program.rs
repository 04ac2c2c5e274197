//! Loops as the kernel reads them.
//!
//! A program is a few structures one after the other (loops.h declares them): a header, nests, their
//! dimensions, and pairs of blocks. A nest's runs become *items*, what one lane works out the place of:
//! a run, a chunk of a long run, or a tile of single words that lie across (the words that follow each
//! other on the source are far apart on the destination, and the other way round). All alignment is
//! decided here: a nest moves in the widest words that all its addresses allow.

use kvferry_layout::{BlockPair, Loop, LoopNest, Loops, MAX_LOOPS};

/// As in loops.h.
const WARP: u64 = 32;
const CHUNK_WORDS: u64 = WARP * 8;
pub(crate) const TILE_BYTES: u64 = 2176;
/// Numbers that are divided must be below this, and words of tiles are counted in as many bits.
const MAX_ITEMS: u64 = 1 << 31;

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Header {
    nests: u32,
    dimensions: u32,
    batches: u32,
    narrow: u32,
    ends: Ends,
}

/// What a launch counts in, and where it says that it has ended.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Ends {
    /// [`COUNTS`] bytes of the card's memory, zero before and after; for one launch at a time.
    pub(crate) counts: u64,
    /// A word of the host's memory that the kernel sets to 1.
    pub(crate) signal: u64,
}

/// Bytes of what launches count in.
pub(crate) const COUNTS: u64 = 33 * 4;

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Divisor {
    divisor: u32,
    magic: u32,
    shift: u32,
    unused: u32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Dimension {
    source: u64,
    destination: u64,
    count: Divisor,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Nest {
    source: u64,
    destination: u64,
    source_block: u64,
    destination_block: u64,
    source_row: u64,
    destination_row: u64,
    items: u32,
    batch: u32,
    first_batch: u32,
    kind: u32,
    width: u32,
    first_dimension: u32,
    dimensions: u32,
    pair_dimension: u32,
    first_pair: u32,
    across: u32,
    along: u32,
    pitch: u32,
    words: Divisor,
    tile: Divisor,
}

/// A [`BlockPair`] of a program in which all block numbers are below [`NARROW_IDS`].
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct NarrowPair {
    source: u16,
    destination: u16,
}

const NARROW_IDS: u32 = 1 << u16::BITS;

/// The number of the form of programs, which the names of the kernels in copy.cu begin with: one that was
/// compiled for programs of another form is not found. It grows with whatever a program means.
pub(super) const FORM: u32 = 2;

/// For a test that both sides agree.
#[cfg(test)]
pub(super) const SIZES: [u64; 6] = [
    COUNTS,
    size_of::<Header>() as u64,
    size_of::<Nest>() as u64,
    size_of::<Dimension>() as u64,
    size_of::<BlockPair>() as u64,
    size_of::<NarrowPair>() as u64,
];

/// What an item is; also how many of the innermost dimensions count parts of it.
const RUN: u32 = 0;
const CHUNK: u32 = 1;
const TILE: u32 = 2;
/// How much longer a warp takes for a byte of a tile than for one of a long run: on an H200, some 6 µs for 2 KB. So
/// warps take one tile at a time, or a few, and a request does not wait for a warp that was dealt many of them.
const TILE_COST: u64 = 8;
/// Logarithm of more words than any chunk has.
const ONE_ROW: u64 = 31;

/// What the kernel carries out in one launch.
#[derive(Clone, Debug, Default)]
pub(crate) struct Program<'l> {
    nests: Vec<Nest>,
    dimensions: Vec<Dimension>,
    pairs: &'l [BlockPair],
    /// Whether pairs are written as [`NarrowPair`]s.
    narrow: bool,
    batches: u64,
    uses_tiles: bool,
}

impl<'l> Program<'l> {
    /// Writes loops, for warps that take `batch_bytes` bytes at a time. `shift` is added to the source
    /// addresses of a nest, by its index: the way from where the peer sees its memory to where this
    /// process does.
    pub(crate) fn new(loops: &'l Loops, batch_bytes: u64, shift: impl Fn(usize) -> u64) -> Self {
        let limits = Limits { batch_bytes, items: MAX_ITEMS, narrow_ids: NARROW_IDS };
        Self::in_parts(loops, shift, limits)
    }

    /// The same within other limits.
    pub(super) fn in_parts(loops: &'l Loops, shift: impl Fn(usize) -> u64, limits: Limits) -> Self {
        let nests = loops.nests().len();
        let mut program = Self {
            nests: Vec::with_capacity(nests),
            // Few have more.
            dimensions: Vec::with_capacity(4 * nests),
            pairs: loops.pairs(),
            narrow: true,
            ..Self::default()
        };
        for (index, nest) in loops.nests().enumerate() {
            let highest = nest.highest.source.max(nest.highest.destination);
            program.narrow &= highest < limits.narrow_ids;
            let first_pair = loops.table(nest.table).start as u64;
            let source = nest.source.wrapping_add(shift(index));
            program.add(&LoopNest { source, ..nest }, nest.loops, first_pair, limits);
        }
        program
    }

    /// Adds a nest, in parts where it has more items than can be counted.
    fn add(&mut self, nest: &LoopNest<'_>, loops: &[Loop], first_pair: u64, limits: Limits) {
        let shape = Shape::of(nest, loops, limits.items);
        let pairs = nest.pairs.len();
        let long = nest.run / shape.width >= limits.items;
        let wide = shape.kind == TILE
            && shape.rows.is_some_and(|tile| tile.across.max(tile.along) >= limits.items);
        if !long && !wide && shape.items(pairs as u64) < limits.items {
            self.push(nest, &shape, first_pair, limits.batch_bytes);
            return;
        }
        if !long && !wide && pairs > 1 {
            let (first, second) = nest.pairs.split_at(pairs / 2);
            self.add(&LoopNest { pairs: first, ..*nest }, loops, first_pair, limits);
            let first_pair = first_pair + first.len() as u64;
            self.add(&LoopNest { pairs: second, ..*nest }, loops, first_pair, limits);
            return;
        }
        // Its most frequent loop, or its run, in halves. Without a loop, only long runs have many items.
        let repeated = (0..loops.len()).filter(|&at| !long && loops[at].count > 1);
        let Some(largest) = repeated.max_by_key(|&at| loops[at].count) else {
            let run = nest.run / 2 / 16 * 16;
            let (source, destination) = (nest.source + run, nest.destination + run);
            self.add(&LoopNest { run, ..*nest }, loops, first_pair, limits);
            let rest = LoopNest { run: nest.run - run, source, destination, ..*nest };
            self.add(&rest, loops, first_pair, limits);
            return;
        };
        let mut half = loops.to_vec();
        let count = loops[largest].count / 2;
        half[largest].count = count;
        self.add(nest, &half, first_pair, limits);
        half[largest].count = loops[largest].count - count;
        let source = nest.source + count * loops[largest].source;
        let destination = nest.destination + count * loops[largest].destination;
        self.add(&LoopNest { source, destination, ..*nest }, &half, first_pair, limits);
    }

    fn push(&mut self, nest: &LoopNest<'_>, shape: &Shape, first_pair: u64, batch_bytes: u64) {
        let first_dimension = self.dimensions.len();
        let pairs = nest.pairs.len() as u64;
        let mut pair_dimension = u32::MAX;
        let mut add = |count: u64, source, destination| {
            self.dimensions.push(Dimension { source, destination, count: divisor(count) });
        };
        let loops = shape.inner.iter().rev();
        let mut place = 0;
        for repeat in loops {
            // Pairs lie inside of the loops that are wider than a block, and outside of those that
            // count chunks and tiles.
            let wider = place >= shape.kind && repeat.destination >= nest.blocks.1;
            if wider && pair_dimension == u32::MAX && pairs > 1 {
                add(pairs, 0, 0);
                pair_dimension = place;
                place += 1;
            }
            add(repeat.count, repeat.source, repeat.destination);
            place += 1;
        }
        if pair_dimension == u32::MAX && pairs > 1 {
            add(pairs, 0, 0);
            pair_dimension = place;
        }
        let (mut source, mut destination) = (nest.source, nest.destination);
        if pairs == 1 {
            source += u64::from(nest.pairs[0].source) * nest.blocks.0;
            destination += u64::from(nest.pairs[0].destination) * nest.blocks.1;
        }
        let items = shape.items(pairs);
        let batch = (batch_bytes / shape.cost).clamp(1, WARP).min(items);
        let across = shape.rows.unwrap_or_default();
        self.uses_tiles |= shape.kind == TILE;
        self.nests.push(Nest {
            source,
            destination,
            source_block: nest.blocks.0,
            destination_block: nest.blocks.1,
            source_row: across.source_row,
            destination_row: across.destination_row,
            items: items as u32,
            batch: batch as u32,
            first_batch: self.batches as u32,
            kind: shape.kind,
            width: shape.width as u32,
            first_dimension: first_dimension as u32,
            dimensions: (self.dimensions.len() - first_dimension) as u32,
            pair_dimension,
            first_pair: first_pair as u32,
            across: across.across as u32,
            along: across.along as u32,
            pitch: across.pitch as u32,
            words: divisor(match shape.kind {
                TILE => across.columns,
                _ => nest.run / shape.width,
            }),
            tile: divisor(across.rows.max(1)),
        });
        self.batches += items.div_ceil(batch);
    }

    /// How many batches there are: work for as many warps.
    pub(crate) fn batches(&self) -> u64 {
        self.batches
    }

    /// Whether warps need shared memory for tiles.
    pub(crate) fn uses_tiles(&self) -> bool {
        self.uses_tiles
    }

    /// Of each nest: items, words of its run or of a tile's width, and of a tile the words in all rows and columns.
    #[cfg(test)]
    pub(super) fn counts(&self) -> impl Iterator<Item = [u64; 4]> {
        let counts = |nest: &Nest| {
            let tile = |words| if nest.kind == TILE { words } else { 0 };
            [nest.items, nest.words.divisor, tile(nest.across), tile(nest.along)].map(u64::from)
        };
        self.nests.iter().map(counts)
    }

    /// Bytes that [`write`](Self::write) takes.
    pub(crate) fn bytes(&self) -> usize {
        size_of::<Header>()
            + size_of_val(&self.nests[..])
            + size_of_val(&self.dimensions[..])
            + self.pairs.len() * self.pair_bytes()
    }

    fn pair_bytes(&self) -> usize {
        if self.narrow { size_of::<NarrowPair>() } else { size_of::<BlockPair>() }
    }

    /// Writes it where the kernel will read it.
    ///
    /// # Safety
    ///
    /// `to` must be valid for writes of [`bytes`](Self::bytes) bytes.
    pub(crate) unsafe fn write(&self, to: *mut u8, ends: Ends) {
        let header = [Header {
            nests: self.nests.len() as u32,
            dimensions: self.dimensions.len() as u32,
            batches: self.batches as u32,
            narrow: self.narrow.into(),
            ends,
        }];
        let mut at = to;
        let mut put = |from: *const u8, bytes: usize| {
            // SAFETY: the parts add up to `bytes()`, for which the caller vouches; slices are read as
            // the bytes they are.
            unsafe {
                at.copy_from_nonoverlapping(from, bytes);
                at = at.add(bytes);
            }
        };
        put(header.as_ptr().cast(), size_of_val(&header));
        put(self.nests.as_ptr().cast(), size_of_val(&self.nests[..]));
        put(self.dimensions.as_ptr().cast(), size_of_val(&self.dimensions[..]));
        if !self.narrow {
            put(self.pairs.as_ptr().cast(), size_of_val(self.pairs));
            return;
        }
        let narrow = at.cast::<NarrowPair>();
        for (index, pair) in self.pairs.iter().enumerate() {
            let (source, destination) = (pair.source as u16, pair.destination as u16);
            // SAFETY: as above; a program may lie anywhere.
            unsafe { narrow.add(index).write_unaligned(NarrowPair { source, destination }) };
        }
    }
}

/// `number / divisor` is `number * magic >> 31 + shift` for numbers below 2^31.
fn divisor(divisor: u64) -> Divisor {
    let bits = u64::BITS - (divisor - 1).leading_zeros();
    let magic = (1u64 << (31 + bits)).div_ceil(divisor);
    Divisor { divisor: divisor as u32, magic: magic as u32, shift: bits, unused: 0 }
}

/// How far a program is cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// What a warp takes at a time.
    pub(super) batch_bytes: u64,
    /// Items of a nest, words of its run and words of its tiles are fewer than this, which is 32 at least.
    pub(super) items: u64,
    /// Where all block numbers are below this, which is 65,536 at most, pairs are narrow.
    pub(super) narrow_ids: u32,
}

/// How a nest is cut into items.
struct Shape {
    kind: u32,
    width: u64,
    /// Bytes that a warp moves in long runs in the time of one item.
    cost: u64,
    /// Loops over items within a pair, the innermost last.
    inner: Vec<Loop>,
    rows: Option<Rows>,
}

/// Of a tile, words that lie across: `across` in a row on the source, `along` in a row on the
/// destination. Of a chunk: `across` words in all rows, and the logarithm of the words in each.
#[derive(Clone, Copy, Debug, Default)]
struct Rows {
    across: u64,
    along: u64,
    /// Of one tile.
    columns: u64,
    rows: u64,
    pitch: u64,
    source_row: u64,
    destination_row: u64,
}

impl Shape {
    fn of(nest: &LoopNest<'_>, loops: &[Loop], most: u64) -> Self {
        let width = width(nest, loops);
        let mut inner = Vec::with_capacity(MAX_LOOPS + 2);
        inner.extend(loops.iter().filter(|repeat| repeat.count > 1).copied());
        if let Some((tile, across, along)) = tile(nest, width, &inner) {
            let (row, column) = (inner[along], inner[across]);
            inner.remove(across.max(along));
            inner.remove(across.min(along));
            let step = |repeat: Loop, words: u64| Loop {
                count: repeat.count.div_ceil(words),
                source: repeat.source * words,
                destination: repeat.destination * words,
            };
            inner.extend([step(row, tile.rows), step(column, tile.columns)]);
            let cost = TILE_COST * tile.rows * tile.columns * width;
            return Self { kind: TILE, width, cost, inner, rows: Some(tile) };
        }
        let words = nest.run / width;
        let item_bytes = CHUNK_WORDS * width;
        if words > CHUNK_WORDS {
            let count = words.div_ceil(CHUNK_WORDS);
            inner.push(Loop { count, source: item_bytes, destination: item_bytes });
            let rows = Rows { across: words, along: ONE_ROW, ..Rows::default() };
            return Self { kind: CHUNK, width, cost: item_bytes, inner, rows: Some(rows) };
        }
        // Short runs that are evenly apart, enough of them for a chunk.
        let row = inner.last().copied().unwrap_or_default();
        let all = row.count.saturating_mul(words);
        if width == 16 && words.is_power_of_two() && (CHUNK_WORDS / 2..most).contains(&all) {
            inner.pop();
            let rows = CHUNK_WORDS / words;
            inner.push(Loop {
                count: row.count.div_ceil(rows),
                source: row.source * rows,
                destination: row.destination * rows,
            });
            let rows = Rows {
                across: all,
                along: words.trailing_zeros().into(),
                source_row: row.source,
                destination_row: row.destination,
                ..Rows::default()
            };
            return Self { kind: CHUNK, width, cost: item_bytes, inner, rows: Some(rows) };
        }
        Self { kind: RUN, width, cost: nest.run, inner, rows: None }
    }

    fn items(&self, pairs: u64) -> u64 {
        self.inner.iter().fold(pairs, |items, repeat| items.saturating_mul(repeat.count))
    }
}

/// The widest words that the run and all addresses are multiples of.
fn width(nest: &LoopNest<'_>, loops: &[Loop]) -> u64 {
    let mut all = nest.run | nest.source | nest.destination;
    for repeat in loops.iter().filter(|repeat| repeat.count > 1) {
        all |= repeat.source | repeat.destination;
    }
    if nest.highest != nest.lowest {
        all |= nest.blocks.0 | nest.blocks.1;
    } else {
        all |= nest.blocks.0.wrapping_mul(nest.highest.source.into());
        all |= nest.blocks.1.wrapping_mul(nest.highest.destination.into());
    }
    1 << all.trailing_zeros().min(4)
}

/// Whether single words lie across: the tile to move them in, and which loops are its rows.
fn tile(nest: &LoopNest<'_>, width: u64, loops: &[Loop]) -> Option<(Rows, usize, usize)> {
    if nest.run != width || width > 8 {
        return None;
    }
    let across = loops.iter().position(|repeat| repeat.source == width)?;
    let along = loops.iter().position(|repeat| repeat.destination == width)?;
    if across == along {
        return None;
    }
    let (in_row, in_column) = (loops[across].count, loops[along].count);
    // Rows are a little apart in shared memory, so that a column does not lie in one bank.
    let spare = (4 / width).max(1);
    let rows = in_column.min(if width <= 2 { WARP } else { 64 / width });
    let mut columns = (TILE_BYTES / width / rows - spare).min(in_row);
    if columns > WARP {
        columns = columns / WARP * WARP;
    }
    let tile = Rows {
        across: in_row,
        along: in_column,
        columns,
        rows,
        pitch: columns + spare,
        source_row: loops[along].source,
        destination_row: loops[across].destination,
    };
    Some((tile, across, along))
}
