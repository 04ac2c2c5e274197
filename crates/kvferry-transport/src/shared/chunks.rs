//! An operation that several threads carry out, a chunk at a time.

use std::fmt;
use std::sync::Arc;

use kvferry_layout::{ByteCopy, CutLimits, Cutting, Loops};
use parking_lot::Mutex;

use super::custody::{Custody, Part};
use super::merge::add;
use crate::contract::Error;

/// How many chunks of one operation may be lost to broken connections before it is given up.
const MAX_RETRIES: u32 = 32;

/// An operation and what is left of it to hand out.
pub struct Chunked {
    custody: Arc<Custody>,
    work: Work,
    state: Mutex<State>,
}

/// What there is to do.
enum Work {
    Copies(Vec<ByteCopy>),
    /// To be packed, in parts of this size.
    Packed(Loops, CutLimits),
}

/// What a thread gets to do at a time.
#[derive(Debug)]
pub enum Piece {
    Copies(Vec<ByteCopy>),
    /// To be packed.
    Packed(Loops),
}

#[derive(Default)]
struct State {
    /// Next copy to hand out, and how much of it is handed out already.
    next: usize,
    offset: u64,
    /// The same of what is packed.
    cutting: Cutting,
    /// Chunks that were not carried out.
    returned: Vec<Piece>,
    retries: u32,
}

/// A part of an operation, in the hands of one thread.
#[derive(Debug)]
pub struct Chunk {
    pub piece: Piece,
    pub bytes: u64,
    part: Part,
}

impl Chunked {
    pub fn new(custody: Arc<Custody>, copies: Vec<ByteCopy>) -> Arc<Self> {
        Arc::new(Self { custody, work: Work::Copies(copies), state: Mutex::default() })
    }

    /// An operation that is packed, in parts of this size.
    pub fn packed(custody: Arc<Custody>, loops: Loops, limits: CutLimits) -> Arc<Self> {
        Arc::new(Self { custody, work: Work::Packed(loops, limits), state: Mutex::default() })
    }

    pub fn custody(&self) -> &Arc<Custody> {
        &self.custody
    }

    /// Hands out the next chunk, of at most `max_copies` copies and `max_bytes` bytes or one to be
    /// packed, and whether more is left. `None` when nothing is left to hand out, or the operation has ended.
    pub fn take(&self, max_copies: usize, max_bytes: u64) -> Option<(Chunk, bool)> {
        let part = self.custody.take()?;
        let mut state = self.state.lock();
        let piece = state.returned.pop().or_else(|| match &self.work {
            Work::Copies(copies) => state.cut(copies, max_copies, max_bytes).map(Piece::Copies),
            Work::Packed(loops, limits) => state.cutting.next(loops, limits).map(Piece::Packed),
        });
        let all_begun = match &self.work {
            Work::Copies(copies) => state.next >= copies.len(),
            Work::Packed(loops, _) => state.cutting.is_over(loops),
        };
        let more = !all_begun || !state.returned.is_empty();
        drop(state);
        let Some(piece) = piece else {
            part.give_back();
            return None;
        };
        let bytes = match &piece {
            Piece::Copies(copies) => copies.iter().map(|copy| copy.bytes).sum(),
            Piece::Packed(loops) => loops.bytes(),
        };
        Some((Chunk { piece, bytes, part }, more))
    }

    /// A chunk was not carried out, and nothing of it can land any more. Whether it will be tried
    /// again; otherwise the operation has ended, with `error` if not before. Without an error it was
    /// our own doing, and is tried again however often it happens.
    pub fn try_again(&self, chunk: Chunk, error: Option<&Error>) -> bool {
        let mut state = self.state.lock();
        state.retries += u32::from(error.is_some());
        if let Some(error) = error
            && state.retries > MAX_RETRIES
        {
            drop(state);
            chunk.part.fail(error.clone());
            return false;
        }
        state.returned.push(chunk.piece);
        drop(state);
        chunk.part.give_back();
        !self.custody.is_stopped()
    }

    /// The peer cannot pack a chunk just now: it is handed out again, as copies, at most so many at a
    /// time. Whether it will be, as in [`try_again`](Self::try_again).
    pub fn unpack(&self, chunk: Chunk, max_copies: usize) -> bool {
        let Chunk { piece, part, .. } = chunk;
        let mut copies: Vec<ByteCopy> = vec![];
        match piece {
            Piece::Copies(list) => copies = list,
            Piece::Packed(loops) => loops.copies().for_each(|run| add(&mut copies, 0, run)),
        }
        self.custody.count_copies(copies.len() as u64);
        let pieces = copies.chunks(max_copies).map(|some| Piece::Copies(some.to_vec()));
        self.state.lock().returned.extend(pieces);
        part.give_back();
        !self.custody.is_stopped()
    }
}

impl State {
    fn cut(
        &mut self,
        copies: &[ByteCopy],
        max_copies: usize,
        max_bytes: u64,
    ) -> Option<Vec<ByteCopy>> {
        let rest = copies.get(self.next..)?;
        let mut cut = Vec::with_capacity(rest.len().min(max_copies));
        let mut room = max_bytes;
        for copy in rest.iter().take(max_copies) {
            if room == 0 {
                break;
            }
            let bytes = (copy.bytes - self.offset).min(room);
            cut.push(ByteCopy {
                source: copy.source + self.offset,
                destination: copy.destination + self.offset,
                bytes,
            });
            room -= bytes;
            self.offset += bytes;
            if self.offset < copy.bytes {
                break;
            }
            self.next += 1;
            self.offset = 0;
        }
        (!cut.is_empty()).then_some(cut)
    }
}

impl Chunk {
    /// Its copies, where it is not to be packed.
    pub fn copies(&self) -> &[ByteCopy] {
        match &self.piece {
            Piece::Copies(copies) => copies,
            Piece::Packed(_) => &[],
        }
    }

    /// All of it is in place.
    pub fn in_place(self) {
        match self.piece {
            Piece::Copies(_) => self.part.in_place(self.bytes),
            Piece::Packed(_) => self.part.packed_in_place(self.bytes),
        }
    }

    /// It failed for good, and nothing of it can land any more.
    pub fn fail(self, error: Error) {
        self.part.fail(error);
    }
}

impl fmt::Debug for Chunked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Chunked").field(&self.custody).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Status;
    use crate::shared::custody::tests::open;
    use kvferry_layout::BlockPair;
    use proptest::prelude::*;

    fn chunked(copies: Vec<ByteCopy>) -> Arc<Chunked> {
        let bytes = copies.iter().map(|copy| copy.bytes).sum();
        Chunked::new(open(bytes, &Arc::default()), copies)
    }

    fn one(bytes: u64) -> Vec<ByteCopy> {
        vec![ByteCopy { source: 1000, destination: 5000, bytes }]
    }

    #[test]
    fn a_chunk_is_not_retried_for_ever() {
        let chunked = chunked(one(100));
        let mut tries = 0;
        while let Some((chunk, _)) = chunked.take(10, 1000) {
            tries += 1;
            chunked.try_again(chunk, Some(&Error::Disconnected));
        }
        assert_eq!(tries, MAX_RETRIES + 1);
        assert_eq!(chunked.custody.status(), Status::Failed(Error::Disconnected));
    }

    /// What the peer did not pack is read as the short copies that it is, and reported so.
    #[test]
    fn what_is_not_packed_is_not_reported_as_packed() {
        let mut loops = Loops::default();
        let table = loops.add_table((0..1000).map(|at| BlockPair { source: at, destination: at }));
        loops.add_nest((4096, 8192), 100, (200, 300), &[], table).unwrap();
        let limits = CutLimits { bytes: 10_000, nests: 10, pairs: 1000 };
        let custody = open(loops.bytes(), &Arc::default());
        let chunked = Chunked::packed(custody.clone(), loops, limits);
        let (mut packed, mut runs) = (0, 0);
        while let Some((chunk, _)) = chunked.take(7, u64::MAX) {
            match &chunk.piece {
                Piece::Packed(loops) if packed > 30_000 => {
                    runs += loops.runs();
                    assert!(chunked.unpack(chunk, 7));
                }
                Piece::Packed(_) => {
                    packed += chunk.bytes;
                    chunk.in_place();
                }
                Piece::Copies(_) => chunk.in_place(),
            }
        }
        let Status::Done(report) = custody.status() else { panic!("{custody:?}") };
        assert!(packed < report.bytes && runs > 100, "{packed} bytes were packed, {runs} runs not");
        assert_eq!((report.bytes, report.packed), (100_000, packed));
        assert_eq!(report.copies_posted, 1 + runs);
    }

    #[test]
    fn our_own_doing_does_not_count() {
        let chunked = chunked(one(100));
        for _ in 0..10 * MAX_RETRIES {
            let (chunk, _) = chunked.take(10, 1000).unwrap();
            assert!(chunked.try_again(chunk, None));
        }
        let (chunk, _) = chunked.take(10, 1000).unwrap();
        chunk.in_place();
        assert!(matches!(chunked.custody.status(), Status::Done(_)));
    }

    #[test]
    fn a_stopped_operation_hands_out_nothing_and_takes_back_everything() {
        let chunked = chunked(one(100));
        let (chunk, more) = chunked.take(10, 40).unwrap();
        assert!(more);
        chunked.custody.stop(Error::Cancelled);
        assert!(chunked.take(10, 40).is_none());
        assert!(!chunked.try_again(chunk, Some(&Error::Disconnected)));
        assert_eq!(chunked.custody.status(), Status::Failed(Error::Cancelled));
    }

    proptest! {
        /// Whatever the limits and however chunks are given back, the chunks that end up in place
        /// cover every byte of every copy exactly once.
        #[test]
        fn chunks_cover_every_byte_once(
            lengths in prop::collection::vec(1u64..40, 1..20),
            limits in prop::collection::vec((1usize..6, 1u64..50, any::<bool>()), 1..40),
        ) {
            let mut at = 0;
            let copies: Vec<ByteCopy> = lengths
                .iter()
                .map(|&bytes| {
                    at += bytes + 3;
                    ByteCopy { source: at, destination: at + 7, bytes }
                })
                .collect();
            let chunked = chunked(copies.clone());
            let mut seen = Vec::new();
            let mut retries = 0;
            for (max_copies, max_bytes, retry) in limits.into_iter().cycle() {
                let Some((chunk, _)) = chunked.take(max_copies, max_bytes) else { break };
                prop_assert_eq!(chunk.bytes, chunk.copies().iter().map(|c| c.bytes).sum::<u64>());
                if retry && retries < MAX_RETRIES {
                    retries += 1;
                    chunked.try_again(chunk, None);
                    continue;
                }
                for c in chunk.copies() {
                    seen.extend((0..c.bytes).map(|i| (c.source + i, c.destination + i)));
                }
                chunk.in_place();
            }
            let mut all: Vec<_> = copies
                .iter()
                .flat_map(|c| (0..c.bytes).map(|i| (c.source + i, c.destination + i)))
                .collect();
            seen.sort_unstable();
            all.sort_unstable();
            prop_assert_eq!(seen, all);
            prop_assert!(matches!(chunked.custody.status(), Status::Done(_)));
        }
    }
}
