//! A block of memory to move.

use std::io;

use kvferry_transport::Region;

/// Memory that is only touched through its address while others may use it.
pub(super) struct Memory {
    base: *mut u8,
    bytes: usize,
}

impl Memory {
    pub(super) fn new(bytes: usize) -> io::Result<Self> {
        // SAFETY: an anonymous private mapping; the kernel picks the address.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { base: base.cast(), bytes })
    }

    pub(super) fn base(&self) -> u64 {
        self.base as u64
    }

    pub(super) fn region(&self) -> Region {
        Region::host(self.base(), self.bytes as u64)
    }

    /// Fills every 8 bytes with a number that tells where they are; none when `seed` is zero.
    pub(super) fn fill(&self, seed: u64) {
        for at in 0..self.bytes / 8 {
            // SAFETY: inside the mapping, which is aligned; no operation is under way.
            unsafe { self.base.cast::<u64>().add(at).write(word(seed, at)) };
        }
    }

    /// The number at a place.
    pub(super) fn word(&self, at: usize) -> u64 {
        assert!(at < self.bytes / 8, "outside the memory");
        // SAFETY: inside the mapping, which is aligned.
        unsafe { self.base.cast::<u64>().add(at).read() }
    }

    /// Copies a piece of `other` into this memory.
    pub(super) fn copy_from(&self, other: &Self, from: usize, to: usize, bytes: usize) {
        let inside = |memory: &Self, at: usize| at + bytes <= memory.bytes;
        assert!(inside(other, from) && inside(self, to), "outside the memory");
        // SAFETY: both spans lie in their mappings, which are different ones.
        unsafe {
            std::ptr::copy_nonoverlapping(other.base.add(from), self.base.add(to), bytes);
        }
    }
}

/// What `fill` puts at a place.
pub(super) fn word(seed: u64, at: usize) -> u64 {
    seed.wrapping_mul((at as u64 ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}
