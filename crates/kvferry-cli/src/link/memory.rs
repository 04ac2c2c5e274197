//! Memory to read from and into, and what it must hold: each byte follows from where it is.

use std::fmt;
use std::str::FromStr;

use kvferry::{Place, Region};
use kvferry_cuda::driver::{Card, Stream};
use kvferry_transport::Error;
use kvferry_transport::memory::HostMemory;

use super::words::Came;

/// Bytes that are read from, and as many again that are read into: two of the longest runs.
pub(super) const BYTES: usize = 32 << 20;
const BLOCK: usize = 64 << 10;

/// Whose memory: `host`, or `gpu:N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Host,
    Gpu(u32),
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let gpu = text.strip_prefix("gpu:").and_then(|number| number.parse().ok());
        match (text, gpu) {
            ("host", _) => Ok(Self::Host),
            ("gpu", _) => Ok(Self::Gpu(0)),
            (_, Some(number)) => Ok(Self::Gpu(number)),
            _ => Err("it is host, or gpu:N for the GPU with that number".to_owned()),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Gpu(number) => write!(f, "gpu:{number}"),
        }
    }
}

/// The first half is what the other end reads; into the second this end does.
pub(super) enum Memory {
    Host(HostMemory),
    Gpu(OnCard),
}

/// Memory of a card.
pub(super) struct OnCard {
    card: Card,
    stream: Stream,
    base: u64,
}

impl Drop for OnCard {
    fn drop(&mut self) {
        // SAFETY: allocated by `Memory::new`, and the transports that knew of it are gone: they keep this alive.
        _ = unsafe { self.card.free(self.base) };
    }
}

impl Memory {
    pub(super) fn new(kind: Kind, seed: u64) -> Result<Self, Error> {
        let memory = match kind {
            Kind::Host => {
                let memory = HostMemory::new(2 * BYTES);
                Self::Host(memory.map_err(|error| Error::system("memory for the test", &error))?)
            }
            Kind::Gpu(number) => {
                let card = Card::open(number)?;
                let (stream, base) = (card.stream(false)?, card.allocate(2 * BYTES as u64)?);
                Self::Gpu(OnCard { card, stream, base })
            }
        };
        memory.write(0, &content(seed))?;
        Ok(memory)
    }

    pub(super) fn region(&self) -> Region {
        match self {
            Self::Host(memory) => memory.region(),
            Self::Gpu(OnCard { card, base, .. }) => {
                Region { base: *base, bytes: 2 * BYTES as u64, place: Place::Gpu(card.ordinal()) }
            }
        }
    }

    fn write(&self, at: usize, content: &[u8]) -> Result<(), Error> {
        debug_assert!(at + content.len() <= 2 * BYTES);
        match self {
            Self::Host(memory) => memory.write(at, content),
            // SAFETY: inside the allocation; whoever reads it meanwhile sees a mixture.
            Self::Gpu(on) => unsafe { on.card.upload(on.base + at as u64, content) }?,
        }
        Ok(())
    }

    fn read(&self, at: usize, bytes: usize) -> Result<Vec<u8>, Error> {
        debug_assert!(at + bytes <= 2 * BYTES);
        Ok(match self {
            Self::Host(memory) => memory.read(at, bytes),
            Self::Gpu(on) => {
                let mut read = vec![0; bytes];
                // SAFETY: inside the allocation.
                unsafe { on.card.download(&mut read, on.base + at as u64) }?;
                read
            }
        })
    }

    /// Makes sure that nothing of what is to come is there already, with one poison after the other.
    pub(super) fn poison(&self, round: usize, bytes: usize) -> Result<(), Error> {
        let (at, poison) = (2 * BYTES - bytes, [0xa5, 0x5a][round % 2]);
        match self {
            Self::Host(memory) => memory.write(at, &vec![poison; bytes]),
            Self::Gpu(OnCard { stream, base, .. }) => {
                // SAFETY: inside the allocation, which is not freed before this has ended.
                unsafe { stream.fill(base + at as u64, poison, bytes as u64) }?;
                stream.synchronize()?;
            }
        }
        Ok(())
    }

    /// Compares what has come for runs with what the other end holds; the first `count` of them are looked at. Answers what
    /// is wrong.
    pub(super) fn check(
        &self,
        content: &[u8],
        run: usize,
        count: usize,
    ) -> Result<Option<Came>, Error> {
        let (mut first, mut wrong) = (None, 0);
        // A card is asked once: each time costs as much as a megabyte.
        let came = self.read(BYTES + place(count - 1, run), run * count)?;
        for index in 0..count {
            let sent = &content[index * run..][..run];
            let came = &came[(count - 1 - index) * run..][..run];
            if came != sent {
                let differ = || came.iter().zip(sent).enumerate().filter(|(_, (a, b))| a != b);
                wrong += differ().count() as u64;
                let here = differ().next();
                first = first.or(here.map(|(at, (&came, &sent))| (index * run + at, sent, came)));
            }
        }
        let of = (run * count) as u64;
        Ok(first.map(|(at, sent, came)| Came::Corrupt { at: at as u64, sent, came, wrong, of }))
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
        let memory = Memory::new(Kind::Host, 1).unwrap();
        let theirs = content(2);
        let run = 64 << 10;
        memory.poison(0, 3 * run).unwrap();
        // Nothing has come.
        assert!(
            matches!(memory.check(&theirs, run, 1).unwrap(), Some(Came::Corrupt { wrong, .. }) if wrong > 65_000)
        );
        for index in 0..3 {
            memory.write(BYTES + place(index, run), &theirs[index * run..][..run]).unwrap();
        }
        assert_eq!(memory.check(&theirs, run, 3).unwrap(), None);
        memory.write(BYTES + place(2, run) + 7, &[!theirs[2 * run + 7]]).unwrap();
        let at = (2 * run + 7) as u64;
        let (sent, came) = (theirs[2 * run + 7], !theirs[2 * run + 7]);
        let wrong = Came::Corrupt { at, sent, came, wrong: 1, of: 3 * run as u64 };
        assert_eq!(memory.check(&theirs, run, 3).unwrap(), Some(wrong));
    }
}
