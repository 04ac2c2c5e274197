//! What a plan yields beside copies, and what they amount to.

/// A span of the destination's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Area {
    /// Its first byte.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
}

/// What the copies of a request from one source rank amount to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Bytes in all.
    pub bytes: u64,
    /// Number of copies.
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

    /// Counts `copies` more copies of `bytes` bytes each.
    pub(crate) fn add(&mut self, copies: u64, bytes: u64) {
        if copies > 0 {
            self.shortest = if self.copies == 0 { bytes } else { self.shortest.min(bytes) };
            self.longest = self.longest.max(bytes);
            self.copies += copies;
            self.bytes += copies * bytes;
        }
    }
}
