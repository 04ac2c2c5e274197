//! Parts as addresses and weights, by one rank's manifest and block tables.

mod build;

use kvferry_layout::{Kernel, Manifest, Place};

use crate::Digest;
use crate::dot::Chunk;
use crate::field::{Pair, add};

/// What a rank holds of a request: its manifest, so many tokens, and a block table for every group
/// (the position of the first id, and the ids).
#[derive(Clone, Copy, Debug)]
pub struct Held<'a> {
    /// The rank.
    pub manifest: &'a Manifest,
    /// Tokens of the request.
    pub tokens: u64,
    /// For every group.
    pub tables: &'a [(u64, &'a [u32])],
}

/// What to add up: nests of runs, and the weights of their bytes. It has a digest for each part.
#[derive(Debug, Default)]
pub struct Program {
    nests: Vec<Nest>,
    courses: Vec<Course>,
    weights: Vec<Weights>,
    keys: Vec<[u64; 2]>,
    /// For every part: what its elements count without their values.
    presence: Vec<Pair>,
    bytes: u64,
}

/// Runs of one piece, for every stretch of a course.
#[derive(Clone, Debug)]
pub struct Nest {
    /// Which part they belong to.
    pub part: usize,
    /// Whose memory they lie in.
    pub place: Place,
    /// Address of the first run of block 0.
    pub start: u64,
    /// Bytes from one block to the next.
    pub block: u64,
    /// How a block is divided, if it is.
    pub kernel: Option<Kernel>,
    /// Bytes from one entry to the next.
    pub entry: u64,
    /// The loops around a run, but for that over entries: the widest first.
    pub levels: Vec<Level>,
    /// Which [`Course`] says where the entries are.
    pub course: usize,
    /// The bytes themselves.
    pub run: Run,
    /// A factor of all of it.
    pub scale: [u64; 2],
}

/// A loop over an axis.
#[derive(Clone, Copy, Debug)]
pub struct Level {
    /// How often.
    pub count: u64,
    /// Bytes from one to the next.
    pub stride: u64,
    /// Where the factors are among the program's keys, one for each.
    pub keys: usize,
}

/// Bytes that follow each other: one run, or several elements a stride apart.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Elements that do not touch: how many, and bytes from one to the next. Otherwise one.
    pub count: u64,
    /// See `count`.
    pub stride: u64,
    /// Bytes of a run, or of one of its elements.
    pub bytes: u64,
    /// Bytes from the start of the first word to the first byte: 0 to 3.
    pub shift: u64,
    /// Index of its weights.
    pub weights: usize,
}

/// The weights of a run's words.
#[derive(Debug)]
pub struct Weights {
    /// One for each word.
    pub words: Vec<[u64; 2]>,
    /// The same for 64 bytes at a time.
    pub(crate) chunks: Vec<Chunk>,
}

/// Where the entries of a part are, shared by all pieces that are held alike.
#[derive(Debug, Default)]
pub struct Course {
    /// Stretches of entries that lie evenly.
    pub stretches: Vec<Stretch>,
    /// The sum of their factors.
    sum: Pair,
    entries: u64,
}

/// Entries that lie evenly in one block.
#[derive(Clone, Copy, Debug)]
pub struct Stretch {
    /// The block.
    pub block: u32,
    /// The place of the first in the block.
    pub slot: u64,
    /// How many.
    pub count: u64,
    /// Where the factors are among the program's keys, one for each.
    pub keys: usize,
}

impl Nest {
    /// The address of the first run of a stretch.
    pub fn address(&self, stretch: &Stretch) -> u64 {
        let slot = match self.kernel {
            Some(kernel) => {
                stretch.slot / kernel.entries * kernel.stride
                    + stretch.slot % kernel.entries * self.entry
            }
            None => stretch.slot * self.entry,
        };
        self.start + u64::from(stretch.block) * self.block + slot
    }
}

impl Program {
    /// The nests.
    pub fn nests(&self) -> &[Nest] {
        &self.nests
    }

    /// Where the entries of a nest are.
    pub fn course(&self, nest: &Nest) -> &Course {
        &self.courses[nest.course]
    }

    /// All courses.
    pub fn courses(&self) -> &[Course] {
        &self.courses
    }

    /// The weights of a nest's runs.
    pub fn weights(&self, nest: &Nest) -> &Weights {
        &self.weights[nest.run.weights]
    }

    /// The factors that levels and stretches name.
    pub fn keys(&self) -> &[[u64; 2]] {
        &self.keys
    }

    /// Bytes that are looked at.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The digests of the parts, from what the values add up to.
    pub fn digests(&self, values: &[[u64; 2]]) -> Vec<Digest> {
        self.presence.iter().zip(values).map(|(one, other)| Digest(add(*one, *other))).collect()
    }

    /// How many parts there are.
    pub fn parts(&self) -> usize {
        self.presence.len()
    }

    /// For every nest, from the first byte that is looked at to the last: address and length.
    pub fn extents(&self) -> impl Iterator<Item = (u64, u64)> {
        self.nests.iter().filter_map(|nest| {
            let stretches = &self.courses[nest.course].stretches;
            let reach = nest.levels.iter().map(|level| (level.count - 1) * level.stride);
            let run = (nest.run.count - 1) * nest.run.stride + nest.run.bytes;
            let reach = reach.sum::<u64>() + run;
            let ends = stretches.iter().map(|stretch| {
                let first = nest.address(stretch);
                (first, first + (stretch.count - 1) * nest.entry + reach)
            });
            let (first, last) = ends.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))?;
            Some((first, last - first))
        })
    }
}
