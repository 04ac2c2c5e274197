//! The one thing a transport moves.

/// `bytes` bytes from `source` to `destination`.
///
/// Both are addresses, each in the address space of the process that registered the memory there:
/// for a read the source is the peer's and the destination ours, for a write the other way round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C)]
pub struct Copy {
    /// Where the bytes come from.
    pub source: u64,
    /// Where the bytes go.
    pub destination: u64,
    /// How many there are.
    pub bytes: u64,
}
