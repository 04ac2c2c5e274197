//! What a plan yields beside loops, and what they amount to.

use kvferry_layout::Loops;

/// A span of the destination's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Area {
    /// Its first byte.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
}

/// What the runs of a request from one source rank amount to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Bytes in all.
    pub bytes: u64,
    /// Number of copies: runs that are in one piece on both sides.
    pub copies: u64,
    /// Bytes of the shortest copy; 0 when there is none.
    pub shortest: u64,
    /// Bytes of the longest copy; 0 when there is none.
    pub longest: u64,
}

impl Summary {
    /// Mean length of a copy in bytes; 0 when there is none.
    pub fn mean(&self) -> f64 {
        if self.copies == 0 { 0.0 } else { self.bytes as f64 / self.copies as f64 }
    }

    /// What loops amount to.
    pub fn of(loops: &Loops) -> Self {
        let lengths = || loops.nests().map(|nest| nest.run);
        Self {
            bytes: loops.bytes(),
            copies: loops.runs(),
            shortest: lengths().min().unwrap_or(0),
            longest: lengths().max().unwrap_or(0),
        }
    }
}
