//! What plans yield and transports carry out.

/// Move `bytes` bytes from an address of the source rank to an address of the destination rank. Each
/// address is one of the process that registered the memory there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(C)]
pub struct ByteCopy {
    /// First byte to read.
    pub source: u64,
    /// First byte to write.
    pub destination: u64,
    /// How many.
    pub bytes: u64,
}
