use proptest::prelude::*;

use super::*;

const TERM: Duration = Duration::from_secs(10);
const OURS: Origin = Origin([1; 16]);
/// The first epoch of what grows.
const FIRST: u32 = 70;

fn table(blocks: &[u32]) -> Vec<BlockTable> {
    vec![BlockTable { first: 0, blocks: blocks.to_vec() }]
}

fn grant() -> Grant {
    Grant { epoch: 0, tokens: 20, tables: table(&[3, 4]) }
}

fn good() -> Fingerprint {
    grant().fingerprint()
}

/// What the reader that it is meant for says.
fn claim() -> Claim {
    Claim { read_by: good(), origin: Some(OURS) }
}

/// The same of what has grown, in this epoch.
fn claim_in(epoch: u32) -> Claim {
    Claim { read_by: Grant { epoch, ..grant() }.fingerprint(), origin: Some(OURS) }
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn key(nonce: u64) -> LeaseKey {
    LeaseKey { request: "r".to_owned(), nonce }
}

const NOT_GRANTED: Answer = Answer::NotHeld(Loss::NotGranted);

fn rank(rank: u32, attempt: u64) -> Consumer {
    Consumer { engine: "d".to_owned(), rank, ranks: 2, attempt }
}

fn granted() -> Leases {
    let mut leases = Leases::new(TERM, TERM * 3);
    leases.grant(key(1), grant(), Some(OURS), at(0)).unwrap();
    leases
}

#[test]
fn released_when_every_rank_has_confirmed() {
    let mut leases = granted();
    assert_eq!(leases.confirm(&key(1), &rank(0, 7), claim(), at(1)), Answer::Held);
    assert_eq!(leases.take_released(), []);
    assert_eq!(leases.confirm(&key(1), &rank(1, 8), claim(), at(2)), Answer::Held);
    let released = Released { request: "r".to_owned(), why: Ended::Confirmed, after: at(2) };
    assert_eq!(leases.take_released(), [released]);
}

#[test]
fn duplicates_count_once() {
    let mut leases = granted();
    for _ in 0..5 {
        assert_eq!(leases.confirm(&key(1), &rank(0, 7), claim(), at(1)), Answer::Held);
    }
    assert_eq!(leases.open(), 1);
}

#[test]
fn a_lost_answer_is_given_again_but_only_to_the_attempt_that_earned_it() {
    let mut leases = granted();
    leases.confirm(&key(1), &rank(0, 7), claim(), at(1));
    leases.confirm(&key(1), &rank(1, 8), claim(), at(1));
    assert_eq!(leases.confirm(&key(1), &rank(0, 7), claim(), at(2)), Answer::Held);
    let ended = Answer::NotHeld(Loss::Ended(Ended::Confirmed));
    assert_eq!(leases.confirm(&key(1), &rank(0, 9), claim(), at(2)), ended);
    leases.expire(at(11));
    assert_eq!(
        leases.confirm(&key(1), &rank(0, 7), claim(), at(12)),
        Answer::NotHeld(Loss::Unknown),
        "forgotten: nobody can say any more that the bytes were good"
    );
    assert_eq!(leases.remembered(), 0);
}

#[test]
fn expires_unless_extended_and_never_lives_past_its_longest() {
    let mut leases = granted();
    leases.expire(at(9));
    assert_eq!(leases.open(), 1);
    assert_eq!(leases.extend(&key(1), at(9)), Answer::Held);
    leases.expire(at(18));
    assert_eq!(leases.open(), 1);
    for second in 18..30 {
        assert_eq!(leases.extend(&key(1), at(second)), Answer::Held);
    }
    leases.expire(at(30));
    assert_eq!(leases.open(), 0);
    let lost = Answer::NotHeld(Loss::Ended(Ended::Expired));
    assert_eq!(leases.extend(&key(1), at(30)), lost);
    assert_eq!(leases.confirm(&key(1), &rank(0, 7), claim(), at(30)), lost);
}

#[test]
fn messages_for_an_earlier_life_do_not_touch_a_later_one() {
    let mut leases = granted();
    assert!(leases.abandon(&key(1), at(1)));
    leases.grant(key(2), grant(), Some(OURS), at(2)).unwrap();
    assert!(!leases.abandon(&key(1), at(3)));
    for r in 0..2 {
        let lost = Answer::NotHeld(Loss::Ended(Ended::Abandoned));
        assert_eq!(leases.confirm(&key(1), &rank(r, 7), claim(), at(3)), lost);
    }
    assert_eq!(leases.extend(&key(1), at(9)), Answer::NotHeld(Loss::Ended(Ended::Abandoned)));
    assert_eq!(leases.open(), 1);
    leases.expire(at(12));
    assert_eq!(leases.open(), 0, "the earlier life's heartbeat does not keep the later one");
}

#[test]
fn engines_of_another_shape_are_counted_apart() {
    let mut leases = granted();
    let other = Consumer { engine: "d".to_owned(), rank: 1, ranks: 3, attempt: 1 };
    leases.confirm(&key(1), &rank(0, 7), claim(), at(1));
    leases.confirm(&key(1), &other, claim(), at(1));
    assert_eq!(leases.open(), 1);
    let beyond = Consumer { rank: 2, ..rank(0, 7) };
    assert_eq!(leases.confirm(&key(1), &beyond, claim(), at(1)), Answer::NotHeld(Loss::Unknown));
}

#[test]
fn one_lease_per_request() {
    let mut leases = granted();
    assert_eq!(
        leases.grant(key(2), grant(), Some(OURS), at(1)),
        Err(AlreadyGranted("r".to_owned()))
    );
    assert!(leases.revoke("r", at(1)));
    assert!(!leases.revoke("r", at(1)));
    assert_eq!(leases.grant(key(2), grant(), Some(OURS), at(1)), Ok(()));
}

#[test]
fn what_was_not_granted_is_not_held_and_ends_nothing() {
    let mut leases = granted();
    let forged = Claim { read_by: Fingerprint([8; 16]), origin: Some(OURS) };
    for r in 0..2 {
        let refused = Answer::NotHeld(Loss::NotGranted);
        assert_eq!(leases.confirm(&key(1), &rank(r, 7), forged, at(1)), refused);
    }
    assert_eq!(leases.open(), 1, "whoever forged it cannot end it");
    for r in 0..2 {
        let answer = leases.confirm(&key(1), &rank(r, 8), claim(), at(2));
        assert_eq!(answer, Answer::Held, "the rightful reader is served");
    }
    assert_eq!(leases.open(), 0);
    // The attempt that forged did not earn the answer of the one that did not.
    let ended = Answer::NotHeld(Loss::Ended(Ended::Confirmed));
    assert_eq!(leases.confirm(&key(1), &rank(0, 7), forged, at(3)), ended);
}

#[test]
fn what_was_computed_from_something_else_is_not_held_and_ends_nothing() {
    let mut leases = granted();
    for wanted in [Some(Origin([2; 16])), None] {
        let refused = Answer::NotHeld(Loss::OtherOrigin { granted: Some(OURS), wanted });
        for r in 0..2 {
            let claim = Claim { read_by: good(), origin: wanted };
            assert_eq!(leases.confirm(&key(1), &rank(r, 7), claim, at(1)), refused);
        }
    }
    // That the tables are others says more.
    let both = Claim { read_by: Fingerprint([8; 16]), origin: None };
    assert_eq!(leases.confirm(&key(1), &rank(0, 7), both, at(1)), NOT_GRANTED);
    assert_eq!(leases.open(), 1);
    for r in 0..2 {
        assert_eq!(leases.confirm(&key(1), &rank(r, 8), claim(), at(2)), Answer::Held);
    }
    assert_eq!(leases.open(), 0);
    let loss = Loss::OtherOrigin { granted: Some(OURS), wanted: Some(Origin([0xab; 16])) };
    let said = loss.to_string();
    assert!(said.contains(&"01".repeat(16)) && said.contains(&"ab".repeat(16)), "{said}");
}

proptest! {
    /// Whatever is granted, sealed at once or in the end, and whoever asks in whatever order: held means
    /// that all that was said of it is right, and who is refused changes nothing.
    #[test]
    fn held_is_what_was_granted_for_whom_it_was_granted(
        grows in any::<bool>(),
        origin in prop::option::of(0_u8..3),
        asked in prop::collection::vec((0_u32..2, any::<bool>(), 0_u8..2, prop::option::of(0_u8..3)), 1..12),
    ) {
        let named = |origin: Option<u8>| origin.map(|byte| Origin([byte; 16]));
        let (origin, mut leases) = (named(origin), Leases::new(TERM, TERM * 3));
        if grows {
            leases.begin(key(1), None, FIRST, at(0)).unwrap();
            leases.advance("r", 10, table(&[3])).unwrap();
            leases.seal("r", 20, table(&[3, 4]), origin, at(0)).unwrap();
        } else {
            leases.grant(key(1), grant(), origin, at(0)).unwrap();
        }
        for (attempt, (r, knows, tables, wanted)) in asked.into_iter().enumerate() {
            let (right, wanted) = (tables == 0, named(wanted));
            // The first epoch of what grows is known to whoever knows that there is one.
            let epoch = if grows && knows { FIRST } else { 0 };
            let granted = Grant { epoch, ..grant() }.fingerprint();
            let read_by = if right { granted } else { Fingerprint([tables; 16]) };
            let claim = Claim { read_by, origin: wanted };
            let before = leases.clone();
            let answer = leases.confirm(&key(1), &rank(r, attempt as u64), claim, at(1));
            let fits = right && (knows || !grows) && wanted == origin;
            if before.open() == 0 {
                prop_assert_eq!(answer, Answer::NotHeld(Loss::Ended(Ended::Confirmed)));
            } else {
                prop_assert_eq!(answer == Answer::Held, fits);
            }
            if answer != Answer::Held {
                prop_assert_eq!(before, leases.clone());
            }
        }
    }
}

#[test]
fn a_lease_grows_until_it_is_sealed_and_is_a_promise_from_then_on() {
    let mut leases = Leases::new(TERM, TERM * 3);
    leases.begin(key(1), None, FIRST, at(0)).unwrap();
    leases.advance("r", 16, table(&[3])).unwrap();
    assert_eq!(leases.confirm(&key(1), &rank(0, 7), claim_in(FIRST), at(1)), NOT_GRANTED);
    leases.expire(at(100));
    assert_eq!(
        leases.extend(&key(1), at(100)),
        Answer::Held,
        "the engine computes for as long as it takes"
    );
    let Frontier { grant: granted, sealed, .. } = leases.frontier("r").unwrap();
    assert_eq!((granted.tokens, sealed), (16, false));
    leases.seal("r", 20, table(&[3, 4]), Some(OURS), at(100)).unwrap();
    assert!(leases.frontier("r").unwrap().sealed);
    let guessed = leases.confirm(&key(1), &rank(0, 7), claim(), at(101));
    assert_eq!(guessed, NOT_GRANTED, "whoever knows no epoch may have read before the end");
    assert_eq!(leases.confirm(&key(1), &rank(0, 7), claim_in(FIRST), at(101)), Answer::Held);
    leases.expire(at(110));
    assert_eq!(leases.take_released().len(), 1);
    assert_eq!(leases.frontier("r"), None);
}

#[test]
fn what_is_enclosed_is_bounded_and_said_before_the_seal() {
    let mut leases = Leases::new(TERM, TERM * 3);
    let none = NotGrown::NoLease("r".to_owned());
    assert_eq!(leases.enclose("r", vec![1]), Err(none.clone()));
    leases.begin(key(1), None, FIRST, at(0)).unwrap();
    let (request, bytes) = ("r".to_owned(), MOST_ENCLOSED + 1);
    let too_much = NotGrown::TooMuchEnclosed { request, bytes };
    assert_eq!(leases.enclose("r", vec![1; bytes]), Err(too_much));
    leases.enclose("r", vec![1; MOST_ENCLOSED]).unwrap();
    leases.enclose("r", vec![2]).unwrap();
    assert_eq!(leases.frontier("r").unwrap().enclosed, [2]);
    leases.seal("r", 20, table(&[3, 4]), Some(OURS), at(1)).unwrap();
    assert_eq!(leases.enclose("r", vec![3]), Err(none));
    assert_eq!(leases.frontier("r").unwrap().enclosed, [2]);
}

#[test]
fn what_was_granted_cannot_change_within_an_epoch() {
    let mut leases = Leases::new(TERM, TERM * 3);
    leases.begin(key(1), None, FIRST, at(0)).unwrap();
    leases.advance("r", 16, table(&[3])).unwrap();
    for (tokens, blocks) in [(15, &[3][..]), (16, &[4]), (20, &[4, 3]), (20, &[])] {
        let changed = NotGrown::Changed { request: "r".to_owned(), before: 16, after: tokens };
        assert_eq!(leases.advance("r", tokens, table(blocks)), Err(changed));
    }
    leases.restart("r").unwrap();
    let frontier = leases.frontier("r").unwrap();
    assert_eq!((frontier.grant.epoch, frontier.grant.tokens), (FIRST + 1, 0));
    let growing: Vec<_> = leases.iter_growing(at(1)).collect();
    assert_eq!(growing, [("r", at(1), 0, 1)], "it was started over once");
    leases.seal("r", 20, table(&[3, 4]), Some(OURS), at(1)).unwrap();
    assert_eq!(
        leases.confirm(&key(1), &rank(0, 7), claim_in(FIRST), at(1)),
        NOT_GRANTED,
        "the same blocks of an earlier epoch are not the same"
    );
    let again = leases.confirm(&key(1), &rank(0, 7), claim_in(FIRST + 1), at(1));
    assert_eq!(again, Answer::Held);
    let sealed = NotGrown::NoLease("r".to_owned());
    assert_eq!(leases.advance("r", 21, table(&[3, 4])), Err(sealed.clone()));
    assert_eq!(leases.restart("r"), Err(sealed));
}

#[test]
fn steps_in_flight_that_do_not_go_on_change_nothing() {
    let mut leases = Leases::new(TERM, TERM * 3);
    let step = |step, tokens| InFlight { step, tokens };
    let none = NotGrown::NoLease("r".to_owned());
    assert_eq!(leases.advance_with("r", 16, table(&[3]), &[step(1, 16)]), Err(none));
    leases.begin(key(1), None, FIRST, at(0)).unwrap();
    let before = [step(4, 20), step(5, 32)];
    leases.advance_with("r", 16, table(&[3, 4]), &before).unwrap();
    let wrong = [
        (vec![step(0, 32)], (0, 20)),
        (vec![step(6, 20)], (0, 20)),
        (vec![step(6, 32), step(6, 40)], (6, 32)),
        (vec![step(6, 32), step(7, 32)], (6, 32)),
        (vec![step(6, 32), step(5, 40)], (6, 32)),
    ];
    for (in_flight, (number, tokens)) in wrong {
        let refused = NotGrown::StepsDoNotRise {
            request: "r".to_owned(),
            step: *in_flight.last().unwrap(),
            before: step(number, tokens),
        };
        // What is complete would go on from before.
        assert_eq!(leases.advance_with("r", 20, table(&[3, 4]), &in_flight), Err(refused));
        let frontier = leases.frontier("r").unwrap();
        assert_eq!((frontier.grant.tokens, frontier.in_flight), (16, &before[..]));
    }
    // Nor the other way round.
    let changed = NotGrown::Changed { request: "r".to_owned(), before: 16, after: 20 };
    assert_eq!(leases.advance_with("r", 20, table(&[9, 4]), &[step(6, 32)]), Err(changed));
    assert_eq!(leases.frontier("r").unwrap().in_flight, before);
    leases.advance_with("r", 20, table(&[3, 4]), &[step(5, 32)]).unwrap();
    assert_eq!(leases.frontier("r").unwrap().in_flight, [step(5, 32)]);
}

#[test]
fn what_is_given_up_while_it_grows_is_not_kept() {
    let mut leases = Leases::new(TERM, TERM * 3);
    leases.begin(key(1), None, FIRST, at(0)).unwrap();
    assert!(leases.abandon(&key(1), at(1)));
    assert_eq!(leases.take_released(), [], "the engine never promised to keep them");
    let gone = NotGrown::GivenUp("r".to_owned());
    assert_eq!(leases.advance("r", 16, table(&[3])), Err(gone.clone()));
    assert_eq!(leases.restart("r"), Err(gone.clone()));
    assert_eq!(leases.seal("r", 20, table(&[3, 4]), Some(OURS), at(2)), Err(gone));
    leases.expire(at(100));
    assert_eq!(leases.remembered(), 0, "the engine has said its last word of it");
    leases.begin(key(2), None, FIRST, at(0)).unwrap();
    assert!(leases.abandon(&key(2), at(1)));
    leases.begin(key(3), None, FIRST, at(0)).unwrap();
    leases.advance("r", 16, table(&[3])).unwrap();
    assert!(leases.abandon(&key(3), at(1)) && !leases.revoke("r", at(1)));
    assert_eq!(leases.advance("r", 16, table(&[3])), Err(NotGrown::NoLease("r".to_owned())));
}

#[test]
fn a_name_stands_for_the_latest_lease_that_was_begun_by_it() {
    let other = |nonce| LeaseKey { request: "retried".to_owned(), nonce };
    let mut leases = Leases::new(TERM, TERM * 3);
    assert_eq!(leases.named("n"), None);
    leases.begin(key(1), Some("n"), FIRST, at(0)).unwrap();
    assert_eq!(leases.named("n"), Some(key(1)));
    leases.seal("r", 20, table(&[3, 4]), Some(OURS), at(1)).unwrap();
    assert_eq!(leases.named("n"), Some(key(1)), "whoever comes late finds it");
    leases.begin(other(2), Some("n"), FIRST, at(0)).unwrap();
    assert_eq!(leases.named("n"), Some(other(2)));
    assert!(leases.revoke("r", at(2)));
    assert_eq!(leases.named("n"), Some(other(2)), "the earlier one's end does not touch it");
    assert!(leases.abandon(&other(2), at(2)));
    assert_eq!(leases.named("n"), None);
    assert_eq!(leases.look(&key(1)), Err(Loss::Ended(Ended::Revoked)));
    assert_eq!(leases.look(&other(9)), Err(Loss::Unknown));
}
