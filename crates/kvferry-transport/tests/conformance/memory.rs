//! Memory to move, and patterns to know it by.

use kvferry_transport::Region;

/// A block of memory that is only ever touched through its address.
pub(crate) struct Memory {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: a block of plain bytes; who touches it when is up to the tests.
unsafe impl Send for Memory {}

impl Memory {
    pub(crate) fn new(bytes: usize) -> Self {
        // SAFETY: an anonymous private mapping, of a length that is not zero.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED, "out of memory");
        Self { base: base.cast(), bytes }
    }

    pub(crate) fn base(&self) -> u64 {
        self.base as u64
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn region(&self) -> Region {
        Region::host(self.base(), self.bytes as u64)
    }

    /// A copy of what is there now.
    pub(crate) fn snapshot(&self) -> Vec<u8> {
        let mut out = vec![0; self.bytes];
        // SAFETY: both blocks are of this length. Others may be writing ours: what is copied then
        // is some mixture, which is what the tests want to see.
        unsafe { std::ptr::copy_nonoverlapping(self.base, out.as_mut_ptr(), self.bytes) };
        out
    }

    pub(crate) fn set(&self, content: &[u8]) {
        assert_eq!(content.len(), self.bytes);
        // SAFETY: both blocks are of this length.
        unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), self.base, self.bytes) };
    }

    pub(crate) fn byte(&self, at: usize) -> u8 {
        assert!(at < self.bytes);
        // SAFETY: inside the block; volatile, because others may be writing it.
        unsafe { self.base.add(at).read_volatile() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

/// Bytes that differ everywhere, and with every seed.
pub(crate) fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random(seed);
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        out.extend(random.next().to_le_bytes());
    }
    out.truncate(bytes);
    out
}

pub(crate) fn hash(bytes: &[u8]) -> u64 {
    let mut words = bytes.chunks_exact(8);
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut mix = |word: u64| hash = (hash.rotate_left(5) ^ word).wrapping_mul(0x100_0000_01b3);
    for word in &mut words {
        mix(u64::from_le_bytes([
            word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7],
        ]));
    }
    for &byte in words.remainder() {
        mix(byte.into());
    }
    hash
}

/// A small generator: the same numbers for the same seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}
