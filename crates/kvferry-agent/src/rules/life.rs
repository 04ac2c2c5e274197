//! D's side of a request: its life on one rank.
//!
//! A [`Life`] is a plain value. Whoever owns it tells it what has happened ([`Event`]) and does what
//! it asks for ([`Action`]); an exhaustive check drives the same code as a serving engine does.
//!
//! | from | event | to | who brings it |
//! |---|---|---|---|
//! | shaking hands | known | waiting | the handshake |
//! | shaking hands | failed | failed | the handshake |
//! | waiting | admitted | following | the worker's queue |
//! | following | grown | reading | P, or the grant that a ticket came with |
//! | following | not held | expired | P |
//! | reading | arrived | following; after the last part: auditing | the transport |
//! | reading | settled | reading: nothing will land, and that it failed comes next | the transport |
//! | reading | failed | failed | the transport |
//! | auditing | passed | confirming | the audit, or that none is due |
//! | auditing | failed | failed | the audit |
//! | auditing | not held | expired | P |
//! | confirming | held | done | P |
//! | confirming | not held | expired | P |
//! | any of these | abort | aborted | the engine |
//! | any of these | deadline | failed | the clock |
//!
//! The turn comes after the handshake: whoever waits for an engine that does not answer keeps nobody from reading.
//! Whatever comes later than the end is ignored. Beside its stage a life knows whether bytes may
//! still land in its blocks: they are handed back when it has ended *and* nothing can land.

use super::failure::Failure;
use super::lease::Loss;

/// Where a request stands on one rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The engine to read from is not known yet.
    ShakingHands,
    /// In the worker's queue.
    Waiting,
    /// The engine to read from is asked how far it is.
    Following,
    /// Bytes are on their way.
    Reading {
        /// Whether all bytes are here when these are.
        last: bool,
    },
    /// All bytes are here, and may be compared with those of the engine they came from.
    Auditing,
    /// The engine they came from is asked whether they are good.
    Confirming,
    /// They are.
    Done,
    /// Something broke.
    Failed(Failure),
    /// The engine does not want the request any more.
    Aborted,
    /// The lease did not hold: the bytes must not be used.
    Expired(Loss),
}

impl Stage {
    /// Whether nothing follows.
    pub fn is_end(&self) -> bool {
        match self {
            Self::Waiting | Self::ShakingHands | Self::Following => false,
            Self::Reading { .. } | Self::Auditing | Self::Confirming => false,
            Self::Done | Self::Failed(_) | Self::Aborted | Self::Expired(_) => true,
        }
    }

    /// As a word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::ShakingHands => "shaking hands",
            Self::Following => "following",
            Self::Reading { .. } => "reading",
            Self::Auditing => "auditing",
            Self::Confirming => "confirming",
            Self::Done => "done",
            Self::Failed(_) => "failed",
            Self::Aborted => "aborted",
            Self::Expired(_) => "expired",
        }
    }
}

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The engine to read from is known and fits.
    Known,
    /// Its turn has come.
    Admitted,
    /// There is something to read.
    Grown {
        /// Whether it is all that is left.
        last: bool,
    },
    /// Every byte of it is at its place, and nothing more will land.
    Arrived,
    /// What is here is what the source holds, or was not to be compared.
    Passed,
    /// The handshake, the reads or the audit broke, or an audit found a difference. Bytes may still land.
    Failed(Failure),
    /// Nothing will land any more.
    Settled,
    /// The lease held until now.
    Held,
    /// It did not.
    NotHeld(Loss),
    /// The engine does not want the request any more.
    Abort,
    /// Its time is up.
    Deadline,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Wait for its turn.
    Queue,
    /// Find out what there is to read.
    Follow,
    /// Start to read it.
    Read,
    /// Compare what is here with what the source holds, if that is due.
    Audit,
    /// Ask whether the lease held.
    Confirm,
    /// Stop the reads.
    Cancel,
    /// Tell P that the request is not wanted any more: it need not wait for the lease to expire.
    Abandon,
    /// Tell the engine how it ended.
    Report,
    /// The blocks are the engine's again: nothing will land in them.
    HandBack,
}

/// The life of one request on one rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Life {
    stage: Stage,
    landing: bool,
}

impl Default for Life {
    fn default() -> Self {
        Self { stage: Stage::ShakingHands, landing: false }
    }
}

impl Life {
    /// Where it stands.
    pub fn stage(&self) -> &Stage {
        &self.stage
    }

    /// Whether bytes may still land in its blocks.
    pub fn landing(&self) -> bool {
        self.landing
    }

    /// Takes note of what has happened, and says what to do.
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        if self.stage.is_end() {
            // What matters after the end is only that the blocks are at rest. The last byte may have
            // been on its way to be reported when the end came.
            let at_rest = matches!(event, Event::Settled | Event::Arrived);
            if !at_rest || !self.landing {
                return vec![];
            }
            self.landing = false;
            return vec![Action::HandBack];
        }
        match (&self.stage, event) {
            (_, Event::Abort) => self.end(Stage::Aborted),
            (stage, Event::Deadline) => {
                let failure = Failure::Deadline { stage: stage.name().to_owned() };
                self.end(Stage::Failed(failure))
            }
            (Stage::ShakingHands, Event::Known) => self.go(Stage::Waiting, Action::Queue),
            (Stage::Waiting, Event::Admitted) => self.go(Stage::Following, Action::Follow),
            (Stage::Following, Event::Grown { last }) => {
                self.landing = true;
                self.go(Stage::Reading { last }, Action::Read)
            }
            (Stage::Following, Event::NotHeld(loss)) => self.end(Stage::Expired(loss)),
            (Stage::Reading { last }, Event::Arrived) => {
                self.landing = false;
                match last {
                    true => self.go(Stage::Auditing, Action::Audit),
                    false => self.go(Stage::Following, Action::Follow),
                }
            }
            (Stage::Reading { .. }, Event::Settled) => {
                self.landing = false;
                vec![]
            }
            (Stage::Auditing, Event::Passed) => self.go(Stage::Confirming, Action::Confirm),
            (Stage::Auditing, Event::NotHeld(loss)) => self.end(Stage::Expired(loss)),
            (Stage::Confirming, Event::Held) => self.end(Stage::Done),
            (Stage::Confirming, Event::NotHeld(loss)) => self.end(Stage::Expired(loss)),
            (_, Event::Failed(failure)) => self.end(Stage::Failed(failure)),
            // Late, repeated or out of order.
            _ => vec![],
        }
    }

    fn go(&mut self, stage: Stage, action: Action) -> Vec<Action> {
        self.stage = stage;
        vec![action]
    }

    fn end(&mut self, stage: Stage) -> Vec<Action> {
        let mut actions = vec![Action::Report];
        if self.landing {
            actions.push(Action::Cancel);
        } else {
            actions.push(Action::HandBack);
        }
        match stage {
            // P has ended the lease, or never knew it.
            Stage::Done | Stage::Expired(_) => {}
            _ => actions.push(Action::Abandon),
        }
        self.stage = stage;
        actions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All there is can be read.
    const ALL: Event = Event::Grown { last: true };

    fn through(events: &[Event]) -> (Life, Vec<Action>) {
        let mut life = Life::default();
        let actions = events.iter().flat_map(|event| life.on(event.clone())).collect();
        (life, actions)
    }

    #[test]
    fn a_good_life() {
        let (life, actions) = through(&[
            Event::Known,
            Event::Admitted,
            ALL,
            Event::Arrived,
            Event::Passed,
            Event::Held,
        ]);
        assert_eq!(life.stage(), &Stage::Done);
        use Action::*;
        assert_eq!(actions, [Queue, Follow, Read, Audit, Confirm, Report, HandBack]);
    }

    #[test]
    fn what_grows_is_read_part_by_part_and_never_two_at_once() {
        let some = Event::Grown { last: false };
        let (mut life, actions) =
            through(&[Event::Known, Event::Admitted, some.clone(), some.clone(), ALL]);
        use Action::*;
        assert_eq!(actions, [Queue, Follow, Read], "one part has to arrive before the next");
        assert_eq!(life.on(Event::Held), [], "nothing is good before all of it is here");
        assert_eq!(life.on(Event::Arrived), [Follow]);
        assert!(!life.landing());
        assert_eq!(life.on(some), [Read]);
        assert_eq!(life.on(Event::Arrived), [Follow]);
        assert_eq!(life.on(ALL), [Read]);
        assert_eq!(life.on(Event::Arrived), [Audit]);
        assert_eq!(life.on(Event::Passed), [Confirm]);
    }

    #[test]
    fn a_lease_that_ends_while_it_is_followed_ends_the_load() {
        let lost = Event::NotHeld(Loss::Unknown);
        let (life, actions) = through(&[Event::Known, Event::Admitted, lost]);
        assert_eq!(life.stage(), &Stage::Expired(Loss::Unknown));
        assert!(actions.ends_with(&[Action::Report, Action::HandBack]));
    }

    #[test]
    fn bytes_are_never_used_without_a_confirmation() {
        let (life, _) = through(&[Event::Known, Event::Admitted, ALL, Event::Held]);
        assert_eq!(
            life.stage(),
            &Stage::Reading { last: true },
            "an answer before the question means nothing"
        );
        let lost = Event::NotHeld(Loss::Unknown);
        let arrived = [Event::Known, Event::Admitted, ALL, Event::Arrived];
        for before in [&[][..], &[Event::Passed]] {
            let all = [&arrived[..], before, &[lost.clone(), Event::Held]].concat();
            assert_eq!(through(&all).0.stage(), &Stage::Expired(Loss::Unknown));
        }
    }

    #[test]
    fn what_an_audit_finds_wrong_is_never_confirmed() {
        let wrong = Event::Failed(Failure::Mismatch("layers.0/k".into()));
        let (mut life, actions) =
            through(&[Event::Known, Event::Admitted, ALL, Event::Arrived, Event::Held, wrong]);
        assert!(matches!(life.stage(), Stage::Failed(Failure::Mismatch(_))));
        use Action::*;
        assert!(actions.ends_with(&[Audit, Report, HandBack, Abandon]), "{actions:?}");
        assert_eq!(life.on(Event::Passed), [], "too late");
    }

    #[test]
    fn blocks_stay_in_quarantine_while_bytes_may_land() {
        for end in [Event::Abort, Event::Deadline, Event::Failed(Failure::PeerGone("x".into()))] {
            let (mut life, actions) = through(&[Event::Known, Event::Admitted, ALL, end]);
            assert!(life.stage().is_end());
            assert!(!actions.contains(&Action::HandBack));
            assert!(actions.contains(&Action::Cancel));
            assert!(actions.contains(&Action::Abandon));
            assert_eq!(life.on(Event::Settled), [Action::HandBack]);
            assert_eq!(life.on(Event::Settled), [], "handed back once");
        }
    }

    #[test]
    fn an_abort_may_cross_the_last_byte() {
        let (mut life, _) = through(&[Event::Known, Event::Admitted, ALL, Event::Abort]);
        assert_eq!(life.on(Event::Arrived), [Action::HandBack]);
        assert_eq!(life.stage(), &Stage::Aborted);
    }

    #[test]
    fn no_quarantine_for_what_is_at_rest() {
        let failed = Event::Failed(Failure::BadRequest("x".into()));
        let (life, actions) =
            through(&[Event::Known, Event::Admitted, ALL, Event::Settled, failed]);
        assert!(!life.landing());
        assert!(actions.contains(&Action::HandBack));
    }

    #[test]
    fn an_abort_ends_it_in_every_stage() {
        let steps = [Event::Known, Event::Admitted, ALL, Event::Arrived, Event::Passed];
        for n in 0..=steps.len() {
            let (mut life, _) = through(&steps[..n]);
            let actions = life.on(Event::Abort);
            assert_eq!(life.stage(), &Stage::Aborted);
            assert_eq!(actions[0], Action::Report);
            assert_eq!(life.on(Event::Abort), []);
            assert_eq!(life.on(Event::Deadline), []);
        }
    }

    #[test]
    fn a_deadline_says_where_the_time_ran_out() {
        let (life, _) = through(&[Event::Deadline]);
        let failure = Failure::Deadline { stage: "shaking hands".to_owned() };
        assert_eq!(life.stage(), &Stage::Failed(failure));
    }

    #[test]
    fn no_turn_is_taken_before_the_engine_is_known() {
        let (life, actions) = through(&[Event::Admitted]);
        assert_eq!((life.stage(), &actions[..]), (&Stage::ShakingHands, &[][..]));
    }
}
