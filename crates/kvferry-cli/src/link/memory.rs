//! Memory to read from and into, and what it must hold: each byte follows from where it is.

use std::io;

use kvferry::Region;
use kvferry_transport::memory::HostMemory;

use super::words::Came;

/// Bytes that are read from, and as many again that are read into: two of the longest runs.
pub(super) const BYTES: usize = 32 << 20;
const BLOCK: usize = 64 << 10;

/// The first half is what the other end reads; into the second this end does.
pub(super) struct Memory(HostMemory);

impl Memory {
    pub(super) fn new(seed: u64) -> io::Result<Self> {
        let memory = HostMemory::new(2 * BYTES)?;
        memory.write(0, &content(seed));
        Ok(Self(memory))
    }

    pub(super) fn region(&self) -> Region {
        self.0.region()
    }

    /// Makes sure that nothing of what is to come is there already, with one poison after the other.
    pub(super) fn poison(&self, round: usize, bytes: usize) {
        let poison = [0xa5, 0x5a][round % 2];
        self.0.write(2 * BYTES - bytes, &vec![poison; bytes]);
    }

    /// Compares what has come for runs with what the other end holds; the first `count` of them are looked at. Answers what
    /// is wrong.
    pub(super) fn check(&self, content: &[u8], run: usize, count: usize) -> Option<Came> {
        let (mut first, mut wrong) = (None, 0);
        for index in 0..count {
            let sent = &content[index * run..][..run];
            let came = self.0.read(BYTES + place(index, run), run);
            if came != sent {
                let differ = || came.iter().zip(sent).enumerate().filter(|(_, (a, b))| a != b);
                wrong += differ().count() as u64;
                let here =
                    differ().next().map(|(at, (&came, &sent))| (index * run + at, sent, came));
                first = first.or(here);
            }
        }
        let of = (run * count) as u64;
        first.map(|(at, sent, came)| Came::Corrupt { at: at as u64, sent, came, wrong, of })
    }
}

/// Where a run of the source goes: from the last to the first, so that no two become one.
pub(super) fn place(index: usize, run: usize) -> usize {
    BYTES - (index + 1) * run
}

/// What the memory with this seed is read as. All of it by itself would take a second: a block is made word by word, and each
/// of the others begins 129 bytes further on in it (an odd number), so that a run that comes from another place is noticed.
pub(super) fn content(seed: u64) -> Vec<u8> {
    let mut block = Vec::with_capacity(BLOCK);
    for index in 1..=(BLOCK / 8) as u64 {
        // SplitMix64 of the place.
        let mut value = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        block.extend((value ^ (value >> 31)).to_le_bytes());
    }
    let mut content = Vec::with_capacity(BYTES);
    for number in 0..BYTES / BLOCK {
        let (end, start) = block.split_at(129 * number % BLOCK);
        content.extend_from_slice(start);
        content.extend_from_slice(end);
    }
    content
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_two_runs_are_alike() {
        let content = content(3);
        assert_eq!(content.len(), BYTES);
        for run in [2 << 10, 64 << 10, 16 << 20] {
            let runs: HashSet<&[u8]> = content.chunks_exact(run).collect();
            assert_eq!(runs.len(), BYTES / run);
        }
    }

    #[test]
    fn a_wrong_byte_is_found_at_its_place() {
        let memory = Memory::new(1).unwrap();
        let theirs = content(2);
        let run = 64 << 10;
        memory.poison(0, 3 * run);
        // Nothing has come.
        assert!(
            matches!(memory.check(&theirs, run, 1), Some(Came::Corrupt { wrong, .. }) if wrong > 65_000)
        );
        for index in 0..3 {
            memory.0.write(BYTES + place(index, run), &theirs[index * run..][..run]);
        }
        assert_eq!(memory.check(&theirs, run, 3), None);
        memory.0.write(BYTES + place(2, run) + 7, &[!theirs[2 * run + 7]]);
        let at = (2 * run + 7) as u64;
        let (sent, came) = (theirs[2 * run + 7], !theirs[2 * run + 7]);
        let wrong = Came::Corrupt { at, sent, came, wrong: 1, of: 3 * run as u64 };
        assert_eq!(memory.check(&theirs, run, 3), Some(wrong));
    }
}
