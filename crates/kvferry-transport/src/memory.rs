//! A block of host memory to register, for examples, benchmarks and tests.
//!
//! Registered memory changes while it is looked at. So there is no slice of it to be had: it is only
//! touched through its address, byte by byte or by copying.

use std::io;

use kvferry_layout::Region;

/// A block of memory of its own.
#[derive(Debug)]
pub struct HostMemory {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: the block belongs to this value alone, whichever thread has it. It is not `Sync`: two
// threads that write the same bytes at once would race.
unsafe impl Send for HostMemory {}

impl HostMemory {
    /// Maps so many bytes, all zero. None is not possible.
    pub fn new(bytes: usize) -> io::Result<Self> {
        // SAFETY: an anonymous private mapping; the kernel picks the address, and refuses a length
        // of zero.
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
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { base: base.cast(), bytes })
    }

    /// Address of the first byte.
    pub fn base(&self) -> u64 {
        self.base as u64
    }

    /// How many bytes there are.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// All of it, to be registered.
    pub fn region(&self) -> Region {
        Region::host(self.base(), self.bytes as u64)
    }

    /// A copy of `bytes` bytes from `at` on: a mixture where somebody writes them meanwhile.
    ///
    /// # Panics
    ///
    /// When they do not lie in the block.
    pub fn read(&self, at: usize, bytes: usize) -> Vec<u8> {
        self.check(at, bytes);
        let mut out = vec![0; bytes];
        // SAFETY: inside the block, as was checked, and as many bytes on both sides.
        unsafe { std::ptr::copy_nonoverlapping(self.base.add(at), out.as_mut_ptr(), bytes) };
        out
    }

    /// A copy of all of it.
    pub fn snapshot(&self) -> Vec<u8> {
        self.read(0, self.bytes)
    }

    /// Puts bytes at a place. Nobody else should write them meanwhile.
    ///
    /// # Panics
    ///
    /// When they do not fit into the block there.
    pub fn write(&self, at: usize, content: &[u8]) {
        self.check(at, content.len());
        // SAFETY: inside the block, as was checked, and as many bytes on both sides.
        unsafe {
            std::ptr::copy_nonoverlapping(content.as_ptr(), self.base.add(at), content.len());
        }
    }

    /// The byte at a place, read anew each time.
    ///
    /// # Panics
    ///
    /// When it does not lie in the block.
    pub fn byte(&self, at: usize) -> u8 {
        self.check(at, 1);
        // SAFETY: inside the block; volatile, because others may be writing it.
        unsafe { self.base.add(at).read_volatile() }
    }

    fn check(&self, at: usize, bytes: usize) {
        let end = at.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "{bytes} bytes at {at} do not lie in a block of {}",
            self.bytes
        );
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, of which no reference was ever given out.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let memory = HostMemory::new(100).unwrap();
        memory.write(10, &[1, 2, 3]);
        assert_eq!(memory.read(9, 5), [0, 1, 2, 3, 0]);
        assert_eq!((memory.byte(11), memory.byte(99)), (2, 0));
        assert_eq!(memory.snapshot().len(), memory.bytes());
        assert!(HostMemory::new(0).is_err());
    }

    #[test]
    #[should_panic(expected = "2 bytes at 99 do not lie in a block of 100")]
    fn outside_is_a_panic() {
        HostMemory::new(100).unwrap().write(99, &[1, 2]);
    }
}
