//! Memory to move: the host's, or a card's.

use std::sync::OnceLock;

use kvferry_cuda::driver::{Card, Mapped};
use kvferry_layout::{Place, Region};
use kvferry_transport::memory::HostMemory;

/// A block of memory, touched only through its address.
pub trait Memory {
    /// So many bytes.
    fn new(bytes: usize) -> Self;
    /// As it is registered.
    fn region(&self) -> Region;
    /// All that is in it.
    fn snapshot(&self) -> Vec<u8>;
    /// Writes to it, from so many bytes on.
    fn write(&self, at: usize, content: &[u8]);
    /// One byte of it.
    fn byte(&self, at: usize) -> u8;

    /// Its address.
    fn base(&self) -> u64 {
        self.region().base
    }

    /// Its length.
    fn bytes(&self) -> usize {
        self.region().bytes as usize
    }
}

impl Memory for HostMemory {
    fn new(bytes: usize) -> Self {
        Self::new(bytes).unwrap()
    }

    fn region(&self) -> Region {
        self.region()
    }

    fn snapshot(&self) -> Vec<u8> {
        self.snapshot()
    }

    fn write(&self, at: usize, content: &[u8]) {
        self.write(at, content);
    }

    fn byte(&self, at: usize) -> u8 {
        self.byte(at)
    }
}

/// Memory of the first card.
pub(crate) struct CardMemory {
    base: u64,
    bytes: usize,
}

/// The first card. It stays open: opening one takes the better part of a second.
pub(crate) fn card() -> &'static Card {
    static CARD: OnceLock<Card> = OnceLock::new();
    CARD.get_or_init(|| Card::open(0).unwrap())
}

impl Memory for CardMemory {
    fn new(bytes: usize) -> Self {
        Self { base: card().allocate(bytes as u64).unwrap(), bytes }
    }

    fn region(&self) -> Region {
        Region { base: self.base, bytes: self.bytes as u64, place: Place::Gpu(0) }
    }

    fn snapshot(&self) -> Vec<u8> {
        snapshot(self.base, self.bytes)
    }

    fn write(&self, at: usize, content: &[u8]) {
        write(self.base, self.bytes, at, content);
    }

    fn byte(&self, at: usize) -> u8 {
        byte(self.base, self.bytes, at)
    }
}

impl Drop for CardMemory {
    fn drop(&mut self) {
        // SAFETY: allocated for this value; the tests drop transports first.
        unsafe { card().free(self.base) }.unwrap();
    }
}

/// Memory of the first card from the virtual-memory interface: three allocations in a row.
pub(crate) struct MappedMemory {
    mapped: Mapped,
    bytes: usize,
}

impl Memory for MappedMemory {
    fn new(bytes: usize) -> Self {
        Self { mapped: card().allocate_mapped(bytes as u64, 3).unwrap(), bytes }
    }

    fn region(&self) -> Region {
        Region { base: self.mapped.base(), bytes: self.bytes as u64, place: Place::Gpu(0) }
    }

    fn snapshot(&self) -> Vec<u8> {
        snapshot(self.base(), self.bytes)
    }

    fn write(&self, at: usize, content: &[u8]) {
        write(self.base(), self.bytes, at, content);
    }

    fn byte(&self, at: usize) -> u8 {
        byte(self.base(), self.bytes, at)
    }
}

fn snapshot(base: u64, bytes: usize) -> Vec<u8> {
    let mut content = vec![0; bytes];
    // SAFETY: whoever calls this has allocated so much there.
    unsafe { card().download(&mut content, base) }.unwrap();
    content
}

fn write(base: u64, bytes: usize, at: usize, content: &[u8]) {
    assert!(at + content.len() <= bytes);
    // SAFETY: whoever calls this has allocated so much there, for what transports write.
    unsafe { card().upload(base + at as u64, content) }.unwrap();
}

fn byte(base: u64, bytes: usize, at: usize) -> u8 {
    assert!(at < bytes);
    let mut content = [0];
    // SAFETY: as above.
    unsafe { card().download(&mut content, base + at as u64) }.unwrap();
    content[0]
}
