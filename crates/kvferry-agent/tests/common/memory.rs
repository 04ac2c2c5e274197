//! Memory that tests and transports write from several threads on purpose.

use std::sync::Arc;
use std::time::Instant;

use kvferry_digest::{Digest, Program, host};
use kvferry_transport::Error;

/// What memory holds that nobody has written.
pub const UNTOUCHED: u8 = 0xEE;

/// A pool of one rank.
pub struct Memory {
    base: *mut u8,
    pub bytes: usize,
}

// SAFETY: a plain span of memory, accessed by volatile reads and writes alone; tests and transports
// write it from several threads on purpose.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new(bytes: usize) -> Arc<Self> {
        let base = Box::leak(vec![UNTOUCHED; bytes].into_boxed_slice()).as_mut_ptr();
        Arc::new(Self { base, bytes })
    }

    pub fn base(&self) -> u64 {
        self.base as u64
    }

    pub fn read(&self, offset: usize) -> u8 {
        assert!(offset < self.bytes);
        // SAFETY: inside the span, which is never freed.
        unsafe { self.base.add(offset).read_volatile() }
    }

    pub fn write(&self, offset: usize, value: u8) {
        assert!(offset < self.bytes);
        // SAFETY: inside the span, which is never freed.
        unsafe { self.base.add(offset).write_volatile(value) }
    }

    pub fn fill(&self, value: u8) {
        (0..self.bytes).for_each(|offset| self.write(offset, value));
    }
}

/// The digests of a program whose parts lie in test memory.
pub fn look(program: &Program, deadline: Instant) -> Result<Vec<Digest>, Error> {
    // SAFETY: plans and manifests name only addresses of test memory, which is never freed and accessed
    // without references.
    let digests = unsafe { host::digest(program, &|| Instant::now() >= deadline) };
    digests.ok_or(Error::DeadlinePassed)
}
