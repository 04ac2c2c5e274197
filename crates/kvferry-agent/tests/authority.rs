//! What a router or a client makes of a ticket's tables: only what P granted is used, and the
//! rightful reader is not harmed.

mod common;

use common::*;
use kvferry_agent::{BlockTable, Ended, Failure, Grant, Loss, Origin, Outcome};

const TOKENS: u64 = 10;
/// Ours, and those of another request.
const OURS: [u32; 3] = [3, 4, 5];
const THEIRS: [u32; 3] = [20, 21, 22];
const DESTINATION: [u32; 3] = [9, 10, 11];

fn forged(tokens: u64, first: u64, blocks: &[u32]) -> Grant {
    Grant { epoch: 0, tokens, tables: vec![BlockTable { first, blocks: blocks.to_vec() }] }
}

/// Whatever is changed on the way, as long as it can be read at all: the bytes come, and are not used.
#[test]
fn what_was_not_granted_is_never_used() {
    for by in [By::Tcp, By::Local] {
        let (p, d) = (Recipe::new("p", 2).by(by).start(), Recipe::new("d", 2).by(by).start());
        p.prefill(1, &OURS, TOKENS);
        p.prefill(2, &THEIRS, TOKENS);
        p.grant("theirs", &THEIRS, TOKENS);
        let ticket = p.grant("ours", &OURS, TOKENS);
        let attempts = [
            ("another request's blocks", forged(TOKENS, 0, &THEIRS)),
            ("one block of another request", forged(TOKENS, 0, &[3, 21, 5])),
            ("blocks of nobody", forged(TOKENS, 0, &[40, 41, 42])),
            ("another order", forged(TOKENS, 0, &[4, 3, 5])),
            ("one block more", forged(TOKENS, 0, &[3, 4, 5, 20])),
            ("fewer tokens", forged(TOKENS - 1, 0, &OURS)),
            ("more tokens", forged(TOKENS + 1, 0, &OURS)),
            ("more tokens and blocks", forged(TOKENS + 4, 0, &[3, 4, 5, 20])),
            ("another epoch", Grant { epoch: 1, ..forged(TOKENS, 0, &OURS) }),
        ];
        let mut told = 0;
        for (what, grant) in attempts {
            // Into blocks of its own size.
            let destination = blocks_for(grant.tokens, 9);
            d.load(&load(what, &ticket, grant, &destination));
            let outcomes = d.wait_ends(what);
            assert_eq!(outcomes, [const { Outcome::Expired(Loss::NotGranted) }; 2], "{what}");
            told += 2;
            assert_eq!(p.counter("confirmations_not_granted"), told, "{what}");
            assert_eq!(p.scheduler.released(), [], "{what}: the lease is still held");
            let leases = p.scheduler.status().leases;
            assert!(leases.iter().all(|lease| lease.confirmed == 0), "{what}: nobody is counted");
        }
        // The danger: the bytes of the other request were there for the reading.
        d.load(&load("peek", &ticket, forged(TOKENS, 0, &THEIRS), &DESTINATION));
        assert_eq!(d.wait_ends("peek"), [const { Outcome::Expired(Loss::NotGranted) }; 2]);
        assert_eq!(d.ranks[0].wrong(2, &DESTINATION, TOKENS), 0);
        // Whom it was meant for.
        d.start_load("ours", &ticket, &OURS, &DESTINATION, TOKENS, LONG);
        assert_eq!(d.wait_ends("ours"), [const { Outcome::Done }; 2]);
        assert_eq!(d.ranks[0].wrong(1, &DESTINATION, TOKENS), 0);
        let released = p.wait_released();
        assert_eq!((released.request.as_str(), released.why), ("ours", Ended::Confirmed));
    }
}

/// What cannot be read at all fails before the first byte. That is a load that broke, so D gives the
/// lease up, as whoever has its ticket may.
#[test]
fn what_cannot_be_read_fails_before_the_first_byte() {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).start());
    p.prefill(1, &OURS, TOKENS);
    let table = |blocks: &[u32]| BlockTable { first: 0, blocks: blocks.to_vec() };
    let long: Vec<u32> = (0..10 * BLOCKS).collect();
    let attempts = [
        ("an extra table", Grant { tables: vec![table(&OURS); 2], ..forged(TOKENS, 0, &[]) }),
        ("no table", Grant { tables: vec![], ..forged(TOKENS, 0, &[]) }),
        ("an empty table", forged(TOKENS, 0, &[])),
        ("one block fewer", forged(TOKENS, 0, &OURS[..2])),
        ("another first position", forged(TOKENS, 1, &OURS)),
        ("a first position out of this world", forged(TOKENS, u64::MAX, &OURS)),
        ("blocks that do not exist", forged(TOKENS, 0, &[3, 4, BLOCKS])),
        ("a table longer than the pool", forged(u64::from(10 * BLOCKS) * 4, 0, &long)),
        ("no end of tokens", forged(u64::MAX, 0, &OURS)),
    ];
    for (what, grant) in attempts {
        let ticket = p.grant(what, &OURS, TOKENS);
        d.load(&load(what, &ticket, grant, &DESTINATION));
        let outcome = d.wait_ends(what).remove(0);
        assert!(matches!(outcome, Outcome::Failed(Failure::BadRequest(_))), "{what}: {outcome:?}");
        assert_eq!(d.ranks[0].touched(), 0, "{what}");
        assert_eq!(p.wait_released().why, Ended::Abandoned, "{what}");
    }
    let ticket = p.grant("too many", &OURS, TOKENS);
    let mut one = load("too many", &ticket, granted(&OURS, TOKENS), &DESTINATION);
    one.tokens += 1;
    d.load(&one);
    let outcome = d.wait_ends("too many").remove(0);
    let reason = "11 tokens are to be read, but 10 were granted".to_owned();
    assert_eq!(outcome, Outcome::Failed(Failure::BadRequest(reason)));
    assert_eq!(d.ranks[0].touched(), 0);
    assert_eq!(p.wait_released().why, Ended::Abandoned);
}

/// An engine may need fewer tokens than P has computed.
#[test]
fn fewer_tokens_than_were_granted_may_be_read() {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).start());
    p.prefill(1, &OURS, TOKENS);
    let ticket = p.grant("r", &OURS, TOKENS);
    let mut one = load("r", &ticket, granted(&OURS, TOKENS), &DESTINATION);
    one.tokens -= 3;
    d.load(&one);
    assert_eq!(d.wait_ends("r"), [Outcome::Done]);
    assert_eq!(d.ranks[0].wrong(1, &DESTINATION, TOKENS - 3), 0);
    assert_eq!(p.wait_released().why, Ended::Confirmed);
}

/// A ticket of one engine opens nothing at another, and nothing in a later life.
#[test]
fn a_ticket_of_another_engine() {
    let (p, other) = (Recipe::new("p", 1).start(), Recipe::new("other", 1).start());
    let d = Recipe::new("d", 1).start();
    other.prefill(2, &OURS, TOKENS);
    let mut ticket = p.grant("r", &OURS, TOKENS);
    ticket.address = other.scheduler.address().to_owned();
    d.start_load("r", &ticket, &OURS, &DESTINATION, TOKENS, LONG);
    assert_eq!(d.wait_ends("r"), [Outcome::Failed(Failure::Restarted)]);
    // With everything of the other's but the nonce, which cannot be guessed.
    let theirs = other.grant("r", &OURS, TOKENS);
    ticket.incarnation = theirs.incarnation;
    d.start_load("again", &ticket, &OURS, &DESTINATION, TOKENS, LONG);
    assert_eq!(d.wait_ends("again"), [Outcome::Expired(Loss::Unknown)]);
    assert_eq!(other.scheduler.status().leases.len(), 1);
}

/// A ticket with all that belongs to it, but for another request than the one that it comes with: in the
/// same blocks, granted at once or followed while they were computed.
#[test]
fn a_ticket_of_another_request() {
    let (p, d) = (Recipe::new("p", 2).start(), Recipe::new("d", 2).start());
    let [ours, theirs] = [Origin([1; 16]), Origin([2; 16])];
    p.prefill(1, &OURS, TOKENS);
    for (round, followed) in [false, true].into_iter().enumerate() {
        let name = format!("r{round}");
        let grant = granted(&OURS, TOKENS);
        if followed {
            p.scheduler.open(&name, None).unwrap();
            p.scheduler.advance(&name, 8, table(&OURS[..2])).unwrap();
        }
        let ticket = p.scheduler.grant_from(&name, grant.clone(), ours).unwrap();
        let by_ticket = load("r", &ticket, grant, &DESTINATION);
        let given = by_ticket.grant.clone().filter(|_| !followed);
        for (what, wanted) in [("another prompt", Some(theirs)), ("of nothing", None)] {
            let before = p.counter("confirmations_not_granted");
            let mut other = by_ticket.clone().granted(given.clone()).origin(wanted);
            other.request = what.to_owned();
            d.load(&other);
            let loss = Loss::OtherOrigin { granted: Some(ours), wanted };
            let expired = [Outcome::Expired(loss), Outcome::Expired(loss)];
            assert_eq!(d.wait_ends(what), expired, "{what}");
            assert_eq!(p.counter("confirmations_not_granted"), before + 2);
            assert_eq!(p.scheduler.released(), [], "{what}: the lease is still held");
        }
        // Whom it was meant for, who may read less of it.
        let tokens = TOKENS - 3;
        let mut less = by_ticket.clone().granted(given).origin(ours);
        less.tokens = tokens;
        d.load(&less);
        assert_eq!(d.wait_ends("r"), [const { Outcome::Done }; 2]);
        assert_eq!(d.ranks[0].wrong(1, &DESTINATION, tokens), 0);
        assert_eq!(p.wait_released().why, Ended::Confirmed);
    }
    // What P does not bind is not for whoever wants to be sure.
    let ticket = p.grant("unbound", &OURS, TOKENS);
    let one = load("unbound", &ticket, granted(&OURS, TOKENS), &DESTINATION);
    d.load(&one.origin(ours));
    let loss = Loss::OtherOrigin { granted: None, wanted: Some(ours) };
    assert_eq!(d.wait_ends("unbound"), [Outcome::Expired(loss), Outcome::Expired(loss)]);
}

/// Two engines with one ticket: one of them has it, and what the other has is right or not used.
#[test]
fn one_ticket_at_two_engines_at_once() {
    let p = Recipe::new("p", 1).start();
    let readers = [Recipe::new("d1", 1).start(), Recipe::new("d2", 2).start()];
    p.prefill(1, &OURS, TOKENS);
    for round in 0..20 {
        let name = format!("r{round}");
        let ticket = p.grant(&name, &OURS, TOKENS);
        for d in &readers {
            d.start_load(&name, &ticket, &OURS, &DESTINATION, TOKENS, LONG);
        }
        let ends = readers.each_ref().map(|d| d.wait_ends(&name));
        assert!(ends.iter().any(|ends| ends.iter().all(|end| *end == Outcome::Done)), "{ends:?}");
        for end in ends.iter().flatten() {
            let late = Outcome::Expired(Loss::Ended(Ended::Confirmed));
            assert!(*end == Outcome::Done || *end == late, "{end:?}");
        }
        assert_eq!(p.wait_released().why, Ended::Confirmed);
    }
}
