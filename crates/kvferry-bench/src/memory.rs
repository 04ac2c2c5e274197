//! What is moved: memory in which every 8 bytes tell where they are.

use std::io;

use kvferry_transport::memory::HostMemory;

/// Words that are written at once.
const BATCH: usize = 8192;

/// Zeros, all of whose pages are there: no measurement pays for page faults.
pub(super) fn zeros(bytes: usize) -> io::Result<HostMemory> {
    let memory = HostMemory::new(bytes)?;
    fill(&memory, 0);
    Ok(memory)
}

/// Fills every 8 bytes with a number that tells where they are; with zeros when `seed` is zero.
pub(super) fn fill(memory: &HostMemory, seed: u64) {
    let words = memory.bytes() / 8;
    let mut content = vec![0; BATCH * 8];
    for first in (0..words).step_by(BATCH) {
        let count = BATCH.min(words - first);
        if seed != 0 {
            for (at, bytes) in content.chunks_exact_mut(8).take(count).enumerate() {
                bytes.copy_from_slice(&word(seed, first + at).to_ne_bytes());
            }
        }
        memory.write(first * 8, &content[..count * 8]);
    }
}

/// Whether there is this word at a place.
pub(super) fn holds(memory: &HostMemory, at: usize, word: u64) -> bool {
    memory.read(at * 8, 8) == word.to_ne_bytes()
}

/// Copies a piece of one memory into another.
pub(super) fn copy(
    (source, from): (&HostMemory, usize),
    (destination, to): (&HostMemory, usize),
    bytes: usize,
) {
    let inside = |memory: &HostMemory, at: usize| at + bytes <= memory.bytes();
    assert!(inside(source, from) && inside(destination, to), "outside the memory");
    let from = (source.base() + from as u64) as *const u8;
    let to = (destination.base() + to as u64) as *mut u8;
    // SAFETY: both spans lie in their blocks, as was checked, and the blocks are different ones.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
}

/// What `fill` puts at a place.
pub(super) fn word(seed: u64, at: usize) -> u64 {
    seed.wrapping_mul((at as u64 ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
}
