//! The way of programs to the card: pinned memory, and as much on the card, used round and round.

use std::collections::VecDeque;
use std::sync::Arc;

use super::driver::{Card, OnCard, Pinned, Stream};
use super::landing::Landing;
use super::program::{Ends, Program};
use kvferry_transport::Error;

/// Enough for a hundred requests of 128k tokens at a time.
const BYTES: usize = 8 << 20;

pub(super) struct Staging {
    card: Card,
    pinned: Pinned,
    on_card: OnCard,
    /// Where the next program may start.
    next: usize,
    /// Start of each program that a kernel may still read, the oldest first.
    used: VecDeque<(usize, Arc<dyn Landing>)>,
}

impl Staging {
    pub(super) fn new(card: &Card) -> Result<Self, Error> {
        Ok(Self {
            pinned: card.pinned(BYTES)?,
            on_card: OnCard::new(card, BYTES)?,
            card: card.clone(),
            next: 0,
            used: VecDeque::new(),
        })
    }

    /// Starts to upload a program; answers where the kernel finds it. The place is kept until the
    /// launch has landed.
    pub(super) fn put(
        &mut self,
        program: &Program<'_>,
        ends: Ends,
        stream: &Stream,
        launch: &Arc<dyn Landing>,
    ) -> Result<u64, Error> {
        // Launches of a stream end in order, so do they.
        while self.used.front().is_some_and(|(_, launch)| launch.landed()) {
            self.used.pop_front();
        }
        let bytes = program.bytes();
        match room(self.used.front().map(|used| used.0), self.next, bytes) {
            Some(at) => {
                let address = self.on_card.address() + at as u64;
                // SAFETY: `room` found so many bytes of both buffers that no kernel and no upload
                // uses any more, and the launch keeps them from being used until the stream has passed.
                unsafe {
                    let from = self.pinned.memory.add(at);
                    program.write(from, ends);
                    stream.upload(address, from, bytes)?;
                }
                self.next = (at + bytes).next_multiple_of(256);
                self.used.push_back((at, launch.clone()));
                Ok(address)
            }
            None => {
                // Too long, or too much under way: memory of its own, which goes with the launch.
                let (pinned, on_card) = (self.card.pinned(bytes)?, OnCard::new(&self.card, bytes)?);
                let address = on_card.address();
                // SAFETY: the buffers are that long, and the launch keeps them until it has landed.
                unsafe {
                    program.write(pinned.memory, ends);
                    stream.upload(address, pinned.memory, bytes)?;
                }
                launch.keep((pinned, on_card));
                Ok(address)
            }
        }
    }
}

/// Where `bytes` bytes fit that nothing uses: `oldest` is where the oldest program in use starts, `next`
/// where the newest ends.
fn room(oldest: Option<usize>, next: usize, bytes: usize) -> Option<usize> {
    let fits = |at: usize, end: usize| (at + bytes <= end).then_some(at);
    match oldest {
        None => fits(0, BYTES),
        // In use: from the oldest to the next. One byte stays free, so that full is not empty.
        Some(oldest) if oldest < next => {
            fits(next, BYTES).or_else(|| fits(0, oldest.saturating_sub(1)))
        }
        Some(oldest) => fits(next, oldest.saturating_sub(1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Programs that are in use at the same time never overlap.
        #[test]
        fn programs_in_use_never_overlap(
            steps in prop::collection::vec((1usize..BYTES + 2, 0usize..3), 1..60),
        ) {
            let mut used: VecDeque<(usize, usize)> = VecDeque::new();
            let mut next = 0;
            for (bytes, landed) in steps {
                for _ in 0..landed {
                    used.pop_front();
                }
                let Some(at) = room(used.front().map(|used| used.0), next, bytes) else {
                    prop_assert!(bytes > BYTES || !used.is_empty());
                    continue;
                };
                prop_assert!(at + bytes <= BYTES);
                for &(start, end) in &used {
                    prop_assert!(at + bytes <= start || end <= at, "{at} in {start}..{end}");
                }
                next = (at + bytes).next_multiple_of(256);
                used.push_back((at, at + bytes));
            }
        }
    }
}
