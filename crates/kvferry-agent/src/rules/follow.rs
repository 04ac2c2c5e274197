//! D's side of a lease that grows: what one rank has heard of it, and what it has read.
//!
//! A [`Follower`] is a plain value, like [`Leases`](super::lease::Leases) and [`Life`](super::life::Life).
//! Its owner asks P how far the request is, reads the [`Part`] that is new, and says when that has
//! arrived. When P has started over, everything is read again: nothing may be in flight then, which is so
//! because a follower is told of P's answers only between two parts.
//!
//! P may also say what it is about to complete ([`InFlight`]), and its ranks, of each step, which layers they
//! have written. Those are read while P computes the others ([`Follower::written`]). What is read by such
//! words counts like everything else, and no earlier: when P has granted all of it in the same epoch, by
//! tables that go on from those that it was read by.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use thiserror::Error;

use super::grant::{Grant, InFlight};

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
    grant: Arc<Grant>,
    sealed: bool,
    /// Tokens that this rank has of every layer, of this epoch.
    read: u64,
    /// How many layers there are, where they can be read one by one.
    layers: usize,
    /// The layers of which it has more than that, and how much.
    ahead: (u64, BTreeSet<usize>),
    /// What P computes beyond what is granted.
    in_flight: Vec<InFlight>,
    /// Which layers P has written, by step.
    written: BTreeMap<u64, BTreeSet<usize>>,
    /// The last part has been read.
    done: bool,
}

/// What to read next.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// How far to read.
    pub tokens: u64,
    /// What this rank has already of what only grows.
    pub held: u64,
    /// Whether everything else, which waits for the end of the computation, is to be read too.
    pub last: bool,
    /// Only these layers; `None`: all of them.
    pub layers: Option<BTreeSet<usize>>,
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
    pub fn of(grant: Option<Arc<Grant>>, pace: Pace) -> Self {
        let sealed = grant.is_some();
        Self { pace, grant: grant.unwrap_or_default(), sealed, ..Self::default() }
    }

    /// What P has granted, as far as this rank has heard.
    pub fn grant(&self) -> &Arc<Grant> {
        &self.grant
    }

    /// Whether there may be more to read in one go than this part, which is the next, if it waits.
    pub fn may_grow(&self, part: &Part) -> bool {
        // Layers that lack in what others have are read before anything that is new.
        let rest = part.layers.is_some() && self.whole_steps(self.grant.tokens) >= part.tokens;
        !self.sealed && !rest
    }

    /// So many layers can be read one by one. What is complete is read before that is known, too.
    pub fn by_layer(&mut self, layers: usize) {
        self.layers = layers;
    }

    /// Takes note of what P says. Nothing may be read meanwhile.
    pub fn hear(
        &mut self,
        grant: Arc<Grant>,
        in_flight: Vec<InFlight>,
        sealed: bool,
    ) -> Result<(), Contradiction> {
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
            self.ahead = <_>::default();
        }
        (self.grant, self.in_flight, self.sealed) = (grant, in_flight, sealed);
        // Words may come before P has said what a step is about, and after it is over.
        let first = self.in_flight.first().map_or(0, |first| first.step);
        self.written.retain(|step, _| *step >= first);
        Ok(())
    }

    /// P has written these layers in a step.
    pub fn written(&mut self, step: u64, layers: impl IntoIterator<Item = usize>) {
        if !self.sealed {
            self.written.entry(step).or_default().extend(layers);
        }
    }

    /// What to read next; `None` where P has nothing new.
    pub fn next(&self) -> Option<Part> {
        let held = self.read.max(self.pace.from);
        let (ahead, have) = &self.ahead;
        let complete = self.whole_steps(self.grant.tokens);
        if !have.is_empty() && (self.sealed || complete >= *ahead) {
            // All of them are complete by now.
            let others = (0..self.layers).filter(|layer| !have.contains(layer)).collect();
            return Some(Part { tokens: *ahead, held, last: false, layers: Some(others) });
        }
        if self.sealed {
            let part = Part { tokens: self.pace.to, held, last: true, layers: None };
            return (!self.done).then_some(part);
        }
        if have.is_empty() && complete > held {
            return Some(Part { tokens: complete, held, last: false, layers: None });
        }
        // The step that brings it further, or as far as some layers are already.
        let mut steps = self.in_flight.iter().map(|one| (one.step, self.whole_steps(one.tokens)));
        let (step, tokens) = match have.is_empty() {
            true => steps.find(|(_, tokens)| *tokens > held)?,
            false => (steps.find(|(_, tokens)| tokens >= ahead)?.0, *ahead),
        };
        let written = self.written.get(&step)?.iter().copied();
        let new: BTreeSet<usize> =
            written.filter(|layer| *layer < self.layers && !have.contains(layer)).collect();
        (!new.is_empty()).then_some(Part { tokens, held, last: false, layers: Some(new) })
    }

    /// How much of so many tokens can be read before the end.
    fn whole_steps(&self, tokens: u64) -> u64 {
        let tokens = tokens.min(self.pace.to);
        tokens - tokens % self.pace.step.max(1)
    }

    /// A part is here.
    pub fn arrived(&mut self, part: &Part) {
        self.done = part.last;
        let Some(layers) = &part.layers else {
            self.read = part.tokens;
            return;
        };
        let (ahead, have) = &mut self.ahead;
        *ahead = part.tokens;
        have.extend(layers);
        if have.len() == self.layers {
            have.clear();
            self.read = part.tokens;
        }
    }
}

#[cfg(test)]
mod tests {
    use kvferry_plan::BlockTable;

    use super::*;

    fn grant(epoch: u32, tokens: u64, blocks: &[u32]) -> Arc<Grant> {
        let tables = vec![BlockTable { first: 0, blocks: blocks.to_vec() }];
        Arc::new(Grant { epoch, tokens, tables })
    }

    fn part(tokens: u64, held: u64, last: bool) -> Part {
        Part { tokens, held, last, layers: None }
    }

    fn follower(from: u64, to: u64) -> Follower {
        Follower::of(None, Pace { from, to, step: 16 })
    }

    #[test]
    fn parts_follow_each_other_without_gap_or_overlap() {
        let mut follower = follower(0, 50);
        assert_eq!(follower.next(), None);
        follower.hear(grant(0, 40, &[1, 2, 3]), vec![], false).unwrap();
        let next = follower.next().unwrap();
        assert_eq!(next, part(32, 0, false));
        follower.arrived(&next);
        assert_eq!(follower.next(), None, "a block that is not full waits");
        follower.hear(grant(0, 50, &[1, 2, 3, 4]), vec![], true).unwrap();
        let next = follower.next().unwrap();
        assert_eq!(next, part(50, 32, true));
        follower.arrived(&next);
        assert_eq!(follower.next(), None);
    }

    #[test]
    fn what_it_has_and_what_it_does_not_want_is_not_read() {
        let mut follower = follower(20, 40);
        follower.hear(grant(0, 16, &[1]), vec![], false).unwrap();
        assert_eq!(follower.next(), None, "it has more than that");
        follower.hear(grant(0, 64, &[1, 2, 3, 4]), vec![], false).unwrap();
        let next = follower.next().unwrap();
        assert_eq!(next, part(32, 20, false));
        follower.arrived(&next);
        assert_eq!(follower.next(), None, "it does not want more than 40");
        follower.hear(grant(1, 32, &[5, 6]), vec![], false).unwrap();
        assert_eq!(follower.next(), Some(part(32, 20, false)));
        follower.hear(grant(1, 64, &[5, 6, 7, 8]), vec![], true).unwrap();
        assert_eq!(follower.next(), Some(part(40, 20, true)));
    }

    #[test]
    fn a_new_epoch_is_read_from_the_start() {
        let mut follower = follower(0, 64);
        follower.hear(grant(0, 32, &[1, 2]), vec![], false).unwrap();
        follower.arrived(&follower.next().unwrap());
        follower.hear(grant(2, 16, &[5]), vec![], false).unwrap();
        assert_eq!(follower.next(), Some(part(16, 0, false)));
        let past = Contradiction::PastEpoch { known: 2, found: 1 };
        assert_eq!(follower.hear(grant(1, 48, &[1, 2, 3]), vec![], false), Err(past));
    }

    #[test]
    fn a_frontier_that_goes_back_is_a_contradiction() {
        let mut follower = follower(0, 64);
        follower.hear(grant(0, 32, &[1, 2]), vec![], false).unwrap();
        for (tokens, blocks) in [(16, &[1][..]), (48, &[1, 3, 2]), (32, &[2, 1])] {
            let found = Contradiction::Changed { epoch: 0, known: 32, found: tokens };
            assert_eq!(follower.hear(grant(0, tokens, blocks), vec![], false), Err(found));
        }
        follower.hear(grant(0, 32, &[1, 2]), vec![], true).unwrap();
        assert!(follower.hear(grant(0, 33, &[1, 2, 3]), vec![], true).is_err(), "after the seal");
        assert!(follower.hear(grant(1, 33, &[1, 2, 3]), vec![], false).is_err(), "after the seal");
        assert!(follower.hear(grant(0, 32, &[1, 2]), vec![], true).is_ok());
    }

    #[test]
    fn what_a_ticket_came_with_is_read_at_once() {
        let pace = Pace { from: 0, to: 20, step: 16 };
        let mut follower = Follower::of(Some(grant(0, 20, &[1, 2])), pace);
        let next = follower.next().unwrap();
        assert_eq!(next, part(20, 0, true));
        follower.arrived(&next);
        assert_eq!(follower.next(), None);
    }

    /// Some layers of a part.
    fn of(layers: &[usize], tokens: u64, held: u64) -> Part {
        let layers = Some(layers.iter().copied().collect());
        Part { tokens, held, last: false, layers }
    }

    fn step(step: u64, tokens: u64) -> InFlight {
        InFlight { step, tokens }
    }

    #[test]
    fn layers_are_read_as_they_are_written() {
        let mut follower = follower(0, 64);
        let in_flight = vec![step(7, 40), step(8, 64)];
        follower.hear(grant(0, 16, &[1, 2, 3, 4]), in_flight.clone(), false).unwrap();
        follower.written(7, [0]);
        let next = follower.next().unwrap();
        assert_eq!(next, part(16, 0, false), "what is complete comes first");
        follower.arrived(&next);
        assert_eq!(follower.next(), None, "it is not known that there are layers");
        follower.by_layer(3);
        assert_eq!(follower.next(), Some(of(&[0], 32, 16)));
        follower.arrived(&follower.next().unwrap());
        assert_eq!(follower.next(), None);
        follower.written(6, [0, 1, 2]);
        assert_eq!(follower.next(), None, "that was another step");
        follower.written(7, [0, 2]);
        assert_eq!(follower.next(), Some(of(&[2], 32, 16)));
        follower.arrived(&follower.next().unwrap());
        // The step is over: the frontier covers it.
        follower.hear(grant(0, 40, &[1, 2, 3, 4]), vec![step(8, 64)], false).unwrap();
        assert_eq!(follower.next(), Some(of(&[1], 32, 16)));
        follower.arrived(&follower.next().unwrap());
        assert_eq!(follower.next(), None);
        follower.written(8, [1]);
        assert_eq!(follower.next(), Some(of(&[1], 64, 32)), "with the block that was not full");
        follower.arrived(&follower.next().unwrap());
        follower.hear(grant(0, 64, &[1, 2, 3, 4]), vec![], true).unwrap();
        assert_eq!(follower.next(), Some(of(&[0, 2], 64, 32)));
        follower.arrived(&follower.next().unwrap());
        let last = follower.next().unwrap();
        assert_eq!(last, part(64, 64, true));
        follower.arrived(&last);
        assert_eq!(follower.next(), None);
    }

    #[test]
    fn a_step_that_is_written_is_gone_on_from_before_it_is_complete() {
        let mut follower = follower(0, 64);
        follower.by_layer(2);
        // The words are there before what they are about.
        follower.written(7, [0, 1]);
        follower.hear(grant(0, 0, &[1, 2]), vec![step(7, 16), step(8, 32)], false).unwrap();
        let next = follower.next().unwrap();
        assert_eq!(next, of(&[0, 1], 16, 0));
        follower.arrived(&next);
        follower.written(8, [1]);
        assert_eq!(follower.next(), Some(of(&[1], 32, 16)));
        follower.arrived(&follower.next().unwrap());
        // It is complete as far as some layers are not read yet.
        follower.hear(grant(0, 16, &[1, 2]), vec![step(8, 32)], false).unwrap();
        assert_eq!(follower.next(), None);
    }

    #[test]
    fn what_cannot_grow_need_not_wait() {
        let mut follower = follower(0, 64);
        let grows = |follower: &Follower| follower.may_grow(&follower.next().unwrap());
        follower.by_layer(2);
        follower.hear(grant(0, 16, &[1, 2]), vec![step(7, 32)], false).unwrap();
        assert!(grows(&follower), "by the next step");
        follower.arrived(&follower.next().unwrap());
        follower.written(7, [0]);
        assert!(grows(&follower), "by the other layer");
        follower.arrived(&follower.next().unwrap());
        follower.hear(grant(0, 48, &[1, 2, 3]), vec![], false).unwrap();
        assert!(!grows(&follower), "before the other layer is there, too, nothing new is read");
        follower.arrived(&follower.next().unwrap());
        assert!(grows(&follower));
        follower.hear(grant(0, 64, &[1, 2, 3, 4]), vec![], true).unwrap();
        assert!(!grows(&follower));
    }

    #[test]
    fn layers_of_an_epoch_that_is_over_are_read_again() {
        let mut follower = follower(0, 32);
        follower.by_layer(2);
        follower.hear(grant(0, 0, &[1, 2]), vec![step(7, 32)], false).unwrap();
        follower.written(7, [0]);
        follower.arrived(&follower.next().unwrap());
        follower.hear(grant(1, 0, &[5, 6]), vec![step(9, 32)], false).unwrap();
        assert_eq!(follower.next(), None, "nothing is written");
        follower.written(7, [1]);
        assert_eq!(follower.next(), None);
        follower.written(9, [0]);
        assert_eq!(follower.next(), Some(of(&[0], 32, 0)));
        follower.hear(grant(1, 32, &[5, 6]), vec![], true).unwrap();
        assert_eq!(follower.next(), Some(part(32, 0, true)), "all at once");
    }
}
