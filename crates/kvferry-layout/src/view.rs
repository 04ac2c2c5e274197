//! Where bytes lie: regions, and the views of boxes in them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The most axes that a state may have.
pub const MAX_AXES: usize = 6;

/// Whose memory a region is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// The host's memory.
    Host,
    /// The memory of the GPU with this number.
    Gpu(u32),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Gpu(index) => write!(f, "gpu {index}"),
        }
    }
}

/// A span of memory that is registered as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Region {
    /// Address of its first byte in the rank's address space.
    pub base: u64,
    /// Its length.
    pub bytes: u64,
    /// Whose memory it is.
    pub place: Place,
}

impl Region {
    /// A region of the host's memory.
    pub fn host(base: u64, bytes: u64) -> Self {
        Self { base, bytes, place: Place::Host }
    }

    /// The address after the last byte; `None` when it does not exist.
    pub fn end(&self) -> Option<u64> {
        self.base.checked_add(self.bytes)
    }
}

/// How an attention kernel divides a block: `entries` entries lie in each kernel block, and kernel
/// blocks are `stride` bytes apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernel {
    /// Entries in a kernel block.
    pub entries: u64,
    /// Bytes from one kernel block to the next.
    pub stride: u64,
}

/// Where the bytes of a box lie. The element at index `i` (counted from the box's start on every axis)
/// of the entry in slot `s` of block `b` starts at
///
/// ```text
/// region.base + offset + b * block + s / kernel.entries * kernel.stride + s % kernel.entries * entry
///     + sum(i[a] * axes[a])
/// ```
///
/// where an undivided block is one kernel block. Bytes that no view covers are padding.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct View {
    /// Index of the region.
    pub region: u32,
    /// Bytes from the region's start to the first element of block 0.
    pub offset: u64,
    /// Bytes from one block to the next.
    pub block: u64,
    /// How a block is divided, if it is.
    pub kernel: Option<Kernel>,
    /// Bytes from one entry to the next in a kernel block.
    pub entry: u64,
    /// Bytes from one index to the next, for every axis of the state.
    pub axes: Vec<u64>,
}
