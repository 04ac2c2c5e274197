//! NIXL by itself: a bare loop over its C interface, in the way that suits NIXL best. Lists are prepared
//! beforehand, requests are made of their entries, and the loop polls.

use std::ffi::CString;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_nixl as nixl;
use kvferry_nixl::capi::{Agent, AgentSettings, Nixl, Prepared, Span};
use kvferry_transport::{ByteCopy, Place};

use super::Failure;

/// Longer than any read takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// An agent of NIXL's with memory registered, and a peer that it reads.
pub(super) struct Bare {
    agent: Arc<Agent>,
    memory: Vec<Span>,
    peer: CString,
}

/// What can be read, and where to: entry by entry.
pub(super) struct Lists {
    ours: Prepared,
    theirs: Prepared,
}

impl Bare {
    /// Registers memory, and loads the peer that [`Nixl`](nixl::Nixl) described.
    ///
    /// # Safety
    ///
    /// The memory must be there until this is dropped, and is only touched through its address.
    pub(super) unsafe fn new(
        settings: &AgentSettings,
        memory: Vec<Span>,
        description: &[u8],
    ) -> Result<Self, Failure> {
        // SAFETY: the library that the user has named or installed.
        let library = unsafe { Nixl::load(&nixl::find(None)?)? };
        let agent = Agent::new(&library, "bare", settings)
            .map_err(|error| format!("NIXL gives no agent: {error:?}"))?;
        let agent = Arc::new(agent);
        for &span in &memory {
            // SAFETY: the caller keeps the memory.
            unsafe { agent.register(span) }?;
        }
        // The metadata is the last block of the description, behind 8 + 16 bytes of names, 4 of a
        // count, 20 for each region and 4 of a length.
        let count = description.get(24..28).ok_or("a short description")?;
        let regions = count.iter().rev().fold(0, |count, byte| count << 8 | usize::from(*byte));
        let metadata = description.get(32 + 20 * regions..).ok_or("a short description")?;
        let peer = agent.load(metadata)?;
        Ok(Self { agent, memory, peer })
    }

    /// Lists of copies, all in one kind of place on both sides.
    ///
    /// # Safety
    ///
    /// The copies must be from memory that the peer has registered to memory that is registered here.
    pub(super) unsafe fn prepare(
        &self,
        copies: &[ByteCopy],
        place: Place,
    ) -> Result<Lists, Failure> {
        let ours = copies.iter().map(|copy| (copy.destination, copy.bytes, place));
        let theirs = copies.iter().map(|copy| (copy.source, copy.bytes, place));
        // SAFETY: the caller's promise is the same.
        unsafe {
            Ok(Lists {
                ours: self.agent.prepare(None, place, ours)?,
                theirs: self.agent.prepare(Some(&self.peer), place, theirs)?,
            })
        }
    }

    /// How long copies take that are all prepared: the median of some rounds, after one that does not count.
    ///
    /// # Safety
    ///
    /// As of [`prepare`](Self::prepare).
    pub(super) unsafe fn median(
        &self,
        copies: &[ByteCopy],
        place: Place,
        rounds: usize,
    ) -> Result<Duration, Failure> {
        // SAFETY: the caller's promise is the same.
        let lists = unsafe { self.prepare(copies, place)? };
        let entries: Vec<i32> = (0..copies.len() as i32).collect();
        let read = |_| Ok(self.read(&lists, &entries, &entries)?.0);
        read(0)?;
        let mut times: Vec<Duration> =
            (0..rounds.max(1)).map(read).collect::<Result<_, Failure>>()?;
        times.sort();
        Ok(times[times.len() / 2])
    }

    /// Reads entries of the peer's list into entries of the own. How long it took, and how much of it
    /// until it was posted.
    pub(super) fn read(
        &self,
        lists: &Lists,
        ours: &[i32],
        theirs: &[i32],
    ) -> Result<(Duration, Duration), Failure> {
        let began = Instant::now();
        let mut request = self.agent.request_prepared(&lists.ours, ours, &lists.theirs, theirs)?;
        let mut ended = request.post()?;
        let post = began.elapsed();
        while !ended {
            if began.elapsed() > PATIENCE {
                return Err(format!("NIXL does not end a read within {PATIENCE:?}").into());
            }
            std::thread::yield_now();
            ended = request.ended()?;
        }
        Ok((began.elapsed(), post))
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        for &span in &self.memory {
            // The agent goes with its last list: whatever it says, nothing is read any more.
            let _ = self.agent.deregister(span);
        }
    }
}

#[cfg(test)]
mod tests {
    use kvferry_nixl::{Nixl, NixlOptions};
    use kvferry_transport::Transport;
    use kvferry_transport::memory::HostMemory;

    use super::*;
    use crate::memory;

    const BYTES: usize = 1 << 16;
    const SEED: u64 = 0x0123_4567_89ab_cdef;

    /// Copies of many lengths, in no order, with gaps between them on both sides.
    fn copies(from: u64, to: u64) -> Vec<ByteCopy> {
        let copy = |number: u64| ByteCopy {
            source: from + (number * 37 % 64) * 1024 + number % 7,
            destination: to + number * 1024 + number % 5,
            bytes: 1 + number * 15,
        };
        (0..64).map(copy).collect()
    }

    /// The copies and nothing else, as [`Bare`] carries them out in memory that is said to be in a place.
    fn reads_exactly(place: Place) {
        nixl::install(None).unwrap();
        let source = Nixl::new(&NixlOptions::default()).unwrap();
        let (theirs, ours) = (HostMemory::new(BYTES).unwrap(), HostMemory::new(BYTES).unwrap());
        memory::fill(&theirs, SEED);
        // SAFETY: the memory outlives the transport, and is only touched through its address.
        unsafe { source.register(theirs.region()).unwrap() };
        let description = source.describe().unwrap();
        // What is said to be a card's memory is the host's here.
        let settings = AgentSettings { cards_are_host: true, ..NixlOptions::default().settings() };
        let copies = copies(theirs.base(), ours.base());
        ours.write(0, &[0xa5; BYTES]);
        let span = (ours.base(), BYTES as u64, place);
        // SAFETY: as above; both sides of the copies lie in memory that is registered.
        unsafe {
            let bare = Bare::new(&settings, vec![span], &description).unwrap();
            bare.median(&copies, place, 3).unwrap();
        }
        let (content, mut expected) = (theirs.snapshot(), vec![0xa5; BYTES]);
        for copy in &copies {
            let (from, to) = (copy.source - theirs.base(), copy.destination - ours.base());
            let (from, to, bytes) = (from as usize, to as usize, copy.bytes as usize);
            expected[to..to + bytes].copy_from_slice(&content[from..from + bytes]);
        }
        assert!(ours.snapshot() == expected, "other bytes than those that were asked for");
        drop(source);
    }

    #[test]
    fn reads_what_it_is_told_and_nothing_else() {
        reads_exactly(Place::Host);
        reads_exactly(Place::Gpu(0));
    }
}
