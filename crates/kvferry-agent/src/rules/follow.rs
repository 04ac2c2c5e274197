//! D's side of a lease that grows: what one rank has heard of it, and what it has read.
//!
//! A [`Follower`] is a plain value, like [`Leases`](super::lease::Leases) and [`Life`](super::life::Life).
//! Its owner asks P how far the request is, reads the [`Part`] that is new, and says when that has
//! arrived. When P has started over, everything is read again: nothing may be in flight then, which is so
//! because a follower is told of P's answers only between two parts.

use thiserror::Error;

use super::grant::Grant;

/// How one rank reads a request that grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Pace {
    /// What it has, of what only grows, before it reads anything.
    pub from: u64,
    /// How far it reads.
    pub to: u64,
    /// In steps of so many tokens, before the end.
    pub step: u64,
}

/// What one rank knows and has of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Follower {
    pace: Pace,
    grant: Grant,
    sealed: bool,
    /// Tokens that this rank has, of this epoch.
    read: u64,
    /// The last part has been read.
    done: bool,
}

/// What to read next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// How far to read.
    pub tokens: u64,
    /// What this rank has already of what only grows.
    pub held: u64,
    /// Whether everything else, which waits for the end of the computation, is to be read too.
    pub last: bool,
}

/// P contradicts what it said before.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Contradiction {
    /// An epoch that is over.
    ///
    /// What to do: report it, with the versions of both sides; the request is not loaded.
    #[error("the engine speaks of epoch {found} after epoch {known}")]
    PastEpoch {
        /// What is known.
        known: u32,
        /// What it says now.
        found: u32,
    },
    /// What was granted cannot become anything else.
    ///
    /// What to do: report it, with the versions of both sides; the request is not loaded.
    #[error(
        "the engine had granted {known} tokens in epoch {epoch}, and now grants {found} that do not go on from there"
    )]
    Changed {
        /// The epoch.
        epoch: u32,
        /// Tokens granted before.
        known: u64,
        /// Tokens granted now.
        found: u64,
    },
}

impl Follower {
    /// Follows a request from the start, or takes what is known of it already: the grant that a ticket
    /// came with is all there is.
    pub fn of(grant: Option<Grant>, pace: Pace) -> Self {
        let sealed = grant.is_some();
        Self { pace, grant: grant.unwrap_or_default(), sealed, ..Self::default() }
    }

    /// What P has granted, as far as this rank has heard.
    pub fn grant(&self) -> &Grant {
        &self.grant
    }

    /// Takes note of what P says. Nothing may be in flight.
    pub fn hear(&mut self, grant: Grant, sealed: bool) -> Result<(), Contradiction> {
        if grant.epoch < self.grant.epoch {
            let (known, found) = (self.grant.epoch, grant.epoch);
            return Err(Contradiction::PastEpoch { known, found });
        }
        let same_epoch = grant.epoch == self.grant.epoch;
        let final_word = !self.sealed || (sealed && grant == self.grant);
        if !final_word || (same_epoch && !grant.extends(&self.grant)) {
            return Err(Contradiction::Changed {
                epoch: self.grant.epoch,
                known: self.grant.tokens,
                found: grant.tokens,
            });
        }
        if !same_epoch {
            self.read = 0;
        }
        (self.grant, self.sealed) = (grant, sealed);
        Ok(())
    }

    /// What to read next; `None` where P has nothing new.
    pub fn next(&self) -> Option<Part> {
        let Pace { from, to, step } = self.pace;
        let (held, last) = (self.read.max(from), self.sealed);
        if last {
            return (!self.done).then_some(Part { tokens: to, held, last });
        }
        let tokens = self.grant.tokens.min(to);
        let tokens = tokens - tokens % step.max(1);
        (tokens > held).then_some(Part { tokens, held, last })
    }

    /// A part is here.
    pub fn arrived(&mut self, part: &Part) {
        self.read = part.tokens;
        self.done = part.last;
    }
}

#[cfg(test)]
mod tests {
    use kvferry_plan::BlockTable;

    use super::*;

    fn grant(epoch: u32, tokens: u64, blocks: &[u32]) -> Grant {
        Grant { epoch, tokens, tables: vec![BlockTable { first: 0, blocks: blocks.to_vec() }] }
    }

    fn follower(from: u64, to: u64) -> Follower {
        Follower::of(None, Pace { from, to, step: 16 })
    }

    #[test]
    fn parts_follow_each_other_without_gap_or_overlap() {
        let mut follower = follower(0, 50);
        assert_eq!(follower.next(), None);
        follower.hear(grant(0, 40, &[1, 2, 3]), false).unwrap();
        let part = follower.next().unwrap();
        assert_eq!(part, Part { tokens: 32, held: 0, last: false });
        follower.arrived(&part);
        assert_eq!(follower.next(), None, "a block that is not full waits");
        follower.hear(grant(0, 50, &[1, 2, 3, 4]), true).unwrap();
        let part = follower.next().unwrap();
        assert_eq!(part, Part { tokens: 50, held: 32, last: true });
        follower.arrived(&part);
        assert_eq!(follower.next(), None);
    }

    #[test]
    fn what_it_has_and_what_it_does_not_want_is_not_read() {
        let mut follower = follower(20, 40);
        follower.hear(grant(0, 16, &[1]), false).unwrap();
        assert_eq!(follower.next(), None, "it has more than that");
        follower.hear(grant(0, 64, &[1, 2, 3, 4]), false).unwrap();
        let part = follower.next().unwrap();
        assert_eq!(part, Part { tokens: 32, held: 20, last: false });
        follower.arrived(&part);
        assert_eq!(follower.next(), None, "it does not want more than 40");
        follower.hear(grant(1, 32, &[5, 6]), false).unwrap();
        assert_eq!(follower.next(), Some(Part { tokens: 32, held: 20, last: false }));
        follower.hear(grant(1, 64, &[5, 6, 7, 8]), true).unwrap();
        assert_eq!(follower.next(), Some(Part { tokens: 40, held: 20, last: true }));
    }

    #[test]
    fn a_new_epoch_is_read_from_the_start() {
        let mut follower = follower(0, 64);
        follower.hear(grant(0, 32, &[1, 2]), false).unwrap();
        follower.arrived(&follower.next().unwrap());
        follower.hear(grant(2, 16, &[5]), false).unwrap();
        assert_eq!(follower.next(), Some(Part { tokens: 16, held: 0, last: false }));
        let past = Contradiction::PastEpoch { known: 2, found: 1 };
        assert_eq!(follower.hear(grant(1, 48, &[1, 2, 3]), false), Err(past));
    }

    #[test]
    fn a_frontier_that_goes_back_is_a_contradiction() {
        let mut follower = follower(0, 64);
        follower.hear(grant(0, 32, &[1, 2]), false).unwrap();
        for (tokens, blocks) in [(16, &[1][..]), (48, &[1, 3, 2]), (32, &[2, 1])] {
            let found = Contradiction::Changed { epoch: 0, known: 32, found: tokens };
            assert_eq!(follower.hear(grant(0, tokens, blocks), false), Err(found));
        }
        follower.hear(grant(0, 32, &[1, 2]), true).unwrap();
        assert!(follower.hear(grant(0, 33, &[1, 2, 3]), true).is_err(), "after the seal");
        assert!(follower.hear(grant(1, 33, &[1, 2, 3]), false).is_err(), "after the seal");
        assert!(follower.hear(grant(0, 32, &[1, 2]), true).is_ok());
    }

    #[test]
    fn what_a_ticket_came_with_is_read_at_once() {
        let pace = Pace { from: 0, to: 20, step: 16 };
        let mut follower = Follower::of(Some(grant(0, 20, &[1, 2])), pace);
        let part = follower.next().unwrap();
        assert_eq!(part, Part { tokens: 20, held: 0, last: true });
        follower.arrived(&part);
        assert_eq!(follower.next(), None);
    }
}
