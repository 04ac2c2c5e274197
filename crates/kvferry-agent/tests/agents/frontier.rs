//! A lease that grows: what is read while prefill computes, and what is never used of it.

use std::thread;
use std::time::{Duration, Instant};

use crate::common::*;
use crate::following::*;
use kvferry_agent::lease::NotGrown;
use kvferry_agent::{Ended, Error, Failure, Following, Grant, InFlight, Loss, Outcome};

/// What is complete is read while the rest is computed, whatever the two sides look like, and all of it is
/// right in the end.
#[test]
fn what_is_complete_is_read_while_the_rest_is_computed() {
    for by in [By::Tcp, By::Local, By::Looping] {
        for (p_ranks, d_ranks) in [(1, 1), (1, 2), (2, 1), (4, 2)] {
            let p = Recipe::new("p", p_ranks).by(by).start();
            let d = Recipe::new("d", d_ranks).by(by).start();
            let (source, destination) = ([3, 7, 5, 6], [9, 12, 10, 20]);
            let ticket = p.scheduler.open("r", None).unwrap();
            d.load(&follow("r", &ticket, &destination, 14));
            for (tokens, readable) in [(3, 0), (6, 4), (12, 12)] {
                advance(&p, 1, "r", &source, tokens);
                eventually("what is complete is read", || {
                    d.ranks.iter().all(|rank| rank.wrong(1, &destination, readable) == 0)
                });
            }
            for rank in &d.ranks {
                eventually("it waits for the rest", || {
                    rank.worker.loads() == [("r".to_owned(), "following")]
                });
                assert_eq!(rank.touched() as u64, 12 * (HEADS / d_ranks) * DIM, "and nothing else");
                assert_eq!(rank.worker.notices(), [], "nothing is good before all of it is here");
            }
            assert_eq!(p.scheduler.released(), []);
            p.prefill(1, &source, 14);
            p.scheduler.enclose("r", b"the first token".to_vec()).unwrap();
            assert_eq!(p.grant("r", &source, 14), ticket, "the ticket is still the same");
            for rank in &d.ranks {
                let ending = rank.wait_end("r");
                assert_eq!(ending.outcome, Outcome::Done);
                assert_eq!(ending.enclosed, b"the first token", "on every rank");
                assert_eq!(ending.bytes, 14 * (HEADS / d_ranks) * DIM, "every byte once");
                assert_eq!(rank.wrong(1, &destination, 14), 0);
                assert_eq!(rank.touched() as u64, 14 * (HEADS / d_ranks) * DIM);
            }
            assert_eq!(p.wait_released().why, Ended::Confirmed);
        }
    }
}

/// What takes less time than is worth a read waits for more, and at the latest for the end.
#[test]
fn what_takes_no_time_is_not_read_ahead() {
    let (p, mut d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1));
    d.worker.least_ahead = Duration::from_secs(3600);
    let d = d.start();
    let rank = &d.ranks[0];
    let (source, destination) = ([3, 7, 5, 6], [9, 12, 10, 20]);
    let ticket = p.scheduler.open("r", None).unwrap();
    d.load(&follow("r", &ticket, &destination, 14));
    // Nobody knows before the first part how long one takes.
    advance(&p, 1, "r", &source, 6);
    eventually("the first part is read", || rank.wrong(1, &destination, 4) == 0);
    advance(&p, 1, "r", &source, 12);
    thread::sleep(Duration::from_millis(300));
    assert_eq!(rank.touched() as u64, 4 * HEADS * DIM, "the second would take microseconds");
    let in_flight = |step| [InFlight { step, tokens: 14 }];
    p.scheduler.advance_with("r", 12, table(&source), &in_flight(1)).unwrap();
    eventually("its layers are listened for", || p.ranks[0].worker.is_heard(1));
    p.prefill(1, &source, 14);
    p.grant("r", &source, 14);
    assert_eq!(rank.wait_end("r").outcome, Outcome::Done);
    assert_eq!(rank.wrong(1, &destination, 14), 0);
    assert_eq!(p.wait_released().why, Ended::Confirmed);

    // Of the next one it is known from the start: not even its layers are listened for.
    eventually("nobody listens", || !p.ranks[0].worker.is_heard(2));
    let (source, destination) = ([1, 2, 8, 4], [19, 22, 18, 21]);
    let ticket = p.scheduler.open("s", None).unwrap();
    d.load(&follow("s", &ticket, &destination, 14));
    p.prefill(2, &source, 12);
    p.scheduler.advance_with("s", 12, table(&source), &in_flight(2)).unwrap();
    for _ in 0..30 {
        thread::sleep(Duration::from_millis(10));
        assert!(!p.ranks[0].worker.is_heard(2));
    }
    assert_eq!(rank.touched() as u64, 14 * HEADS * DIM, "nothing of it is read");
    p.prefill(2, &source, 14);
    p.grant("s", &source, 14);
    assert_eq!(rank.wait_end("s").outcome, Outcome::Done);
    assert_eq!(rank.wrong(2, &destination, 14), 0);
}

/// Whoever comes late reads all at once.
#[test]
fn a_lease_that_is_sealed_already_can_be_followed_too() {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).start());
    p.prefill(1, &[3, 4], 8);
    let ticket = p.grant("r", &[3, 4], 8);
    d.load(&follow("r", &ticket, &[9, 10], 7));
    assert_eq!(d.wait_ends("r"), [Outcome::Done]);
    assert_eq!(d.ranks[0].wrong(1, &[9, 10], 7), 0);
    assert_eq!(d.ranks[0].touched() as u64, 7 * HEADS * DIM, "no more than it wants");
    assert_eq!(p.wait_released().why, Ended::Confirmed);
}

/// What decode holds already is neither read nor touched.
#[test]
fn what_is_held_already_is_not_read() {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).start());
    let (source, destination) = ([3, 4, 5], [9, 10, 11]);
    let ticket = p.scheduler.open("r", None).unwrap();
    d.load(&follow("r", &ticket, &destination, 12).cached(vec![6]));
    advance(&p, 1, "r", &source, 4);
    advance(&p, 1, "r", &source, 8);
    eventually("two tokens are read", || d.ranks[0].touched() as u64 == 2 * HEADS * DIM);
    p.prefill(1, &source, 12);
    p.grant("r", &source, 12);
    let ending = d.ranks[0].wait_end("r");
    assert_eq!((ending.outcome, ending.bytes), (Outcome::Done, 6 * HEADS * DIM));
    assert_eq!(d.ranks[0].touched() as u64, 6 * HEADS * DIM);
}

/// P starts over in mid-read: what is in flight lands before anything is read anew, and nothing of the
/// first try is used.
#[test]
fn a_request_that_starts_over_is_read_anew() {
    let (p, d) = held_pair();
    let (first, second, destination) = ([3, 4, 5], [13, 14, 15], [9, 10, 11]);
    let ticket = p.scheduler.open("r", None).unwrap();
    d.load(&follow("r", &ticket, &destination, 12));
    advance(&p, 1, "r", &first, 8);
    let held = d.ranks[0].held.as_ref().unwrap();
    let read = held.next();
    p.scheduler.restart("r").unwrap();
    assert_eq!(p.scheduler.status().growing[0].restarts, 1);
    // Its blocks go to another request at once.
    p.prefill(9, &first, 12);
    advance(&p, 1, "r", &second, 8);
    thread::sleep(SHORT);
    assert!(held.is_empty(), "nothing is read while bytes may still land");
    read.land(0, read.copies.len());
    read.finish();
    let again = held.next();
    assert_eq!(d.ranks[0].wrong(9, &destination, 8), 0, "the danger: another request's bytes");
    again.land(0, again.copies.len());
    again.finish();
    eventually("it is read anew", || d.ranks[0].wrong(1, &destination, 8) == 0);
    p.prefill(1, &second, 12);
    let granted = p.grant("r", &second, 12);
    assert_eq!(granted, ticket);
    let last = held.next();
    last.land(0, last.copies.len());
    last.finish();
    assert_eq!(d.wait_ends("r"), [Outcome::Done]);
    assert_eq!(d.ranks[0].wrong(1, &destination, 12), 0);
    assert_eq!(p.wait_released().why, Ended::Confirmed);
}

/// Tables that a router carried are those of the last epoch: whoever does not say so is refused.
#[test]
fn tables_of_an_earlier_epoch_are_not_granted() {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).start());
    p.scheduler.open("r", None).unwrap();
    advance(&p, 1, "r", &[3, 4], 4);
    p.scheduler.restart("r").unwrap();
    p.prefill(1, &[3, 4], 8);
    let ticket = p.grant("r", &[3, 4], 8);
    d.load(&load("old", &ticket, granted(&[3, 4], 8), &[9, 10]));
    assert_eq!(d.wait_ends("old"), [Outcome::Expired(Loss::NotGranted)]);
    d.load(&load("new", &ticket, p.scheduler.granted("r").unwrap(), &[9, 10]));
    assert_eq!(d.wait_ends("new"), [Outcome::Done]);
    assert_eq!(d.ranks[0].wrong(1, &[9, 10], 8), 0);
}

/// A client has the ticket before all is complete, and guesses the tables: D reads what is not written yet. That P
/// grants the very same tables in the end makes it no better.
#[test]
fn what_was_read_before_it_was_complete_is_not_confirmed() {
    for restarts in [0, 1] {
        let (p, d) = held_pair();
        let ticket = p.scheduler.open("r", None).unwrap();
        for _ in 0..restarts {
            p.scheduler.restart("r").unwrap();
        }
        advance(&p, 1, "r", &[3, 4], 4);
        let guessed = Grant { epoch: restarts, ..granted(&[3, 4], 8) };
        d.load(&load("early", &ticket, guessed, &[9, 10]));
        let read = d.ranks[0].held.as_ref().unwrap().next();
        read.land(0, read.copies.len());
        p.prefill(1, &[3, 4], 8);
        assert_eq!(p.grant("r", &[3, 4], 8), ticket);
        read.finish();
        assert_eq!(d.wait_ends("early"), [Outcome::Expired(Loss::NotGranted)]);
        assert_ne!(d.ranks[0].wrong(1, &[9, 10], 8), 0, "the danger: bytes that P had not written");
    }
}

/// The load's deadline counts from when P has something to give, and the wait for that has a bound of its
/// own.
#[test]
fn a_deadline_does_not_run_while_prefill_computes() {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).start());
    // They know each other: what is left to do is short.
    assert_eq!(p.hand_over(&d, "first", 9, p.scheduler.address()), [Outcome::Done]);
    let ticket = p.scheduler.open("r", None).unwrap();
    let patient = follow("r", &ticket, &[9, 10, 11], 12);
    d.load(&patient.within(SHORT, LONG));
    for tokens in [4, 8] {
        thread::sleep(SHORT * 2);
        advance(&p, 1, "r", &[3, 4, 5], tokens);
    }
    thread::sleep(SHORT * 2);
    p.prefill(1, &[3, 4, 5], 12);
    p.grant("r", &[3, 4, 5], 12);
    assert_eq!(d.wait_ends("r"), [Outcome::Done]);

    let ticket = p.scheduler.open("never", None).unwrap();
    let began = Instant::now();
    let impatient = follow("never", &ticket, &[9, 10, 11], 12);
    d.load(&impatient.within(LONG, SHORT));
    let late = Failure::Deadline { stage: "following".to_owned() };
    assert_eq!(d.wait_ends("never"), [Outcome::Failed(late)]);
    assert!(began.elapsed() >= SHORT);
}

/// More tokens than there are cannot be held already.
#[test]
fn what_cannot_be_held_is_refused() {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).start());
    let ticket = p.scheduler.open("r", None).unwrap();
    d.load(&follow("r", &ticket, &[9, 10], 8).cached(vec![9]));
    advance(&p, 1, "r", &[3, 4], 4);
    p.grant("r", &[3, 4], 8);
    let outcome = d.wait_ends("r").remove(0);
    assert!(matches!(outcome, Outcome::Failed(Failure::BadRequest(_))), "{outcome:?}");
}

/// Fewer tokens than decode wants: an error, before the last byte.
#[test]
fn prefill_ends_before_what_decode_wants() {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).start());
    let ticket = p.scheduler.open("r", None).unwrap();
    d.load(&follow("r", &ticket, &[9, 10, 11], 12));
    p.grant("r", &[3, 4], 8);
    let reason = "12 tokens are to be read, but 8 were granted".to_owned();
    assert_eq!(d.wait_ends("r"), [Outcome::Failed(Failure::BadRequest(reason))]);
    assert_eq!(p.wait_released().why, Ended::Abandoned);
}

/// Loads that wait for P leave their turn to others.
#[test]
fn many_are_followed_at_once_and_none_waits_for_another() {
    let p = Recipe::new("p", 1).start();
    let mut d = Recipe::new("d", 1);
    d.worker.concurrent = 2;
    let d = d.start();
    // Backwards: those that were asked for last are computed first.
    let names: Vec<String> = (0..32).rev().map(|n| format!("r{n}")).collect();
    let blocks = |n: usize| [2 * n as u32, 2 * n as u32 + 1];
    for (n, name) in names.iter().enumerate().rev() {
        let ticket = p.scheduler.open(name, None).unwrap();
        d.load(&follow(name, &ticket, &blocks(n), 8));
    }
    for (n, name) in names.iter().enumerate() {
        advance(&p, n as u64, name, &blocks(n), 4);
    }
    eventually("all first halves are read", || d.ranks[0].touched() as u64 == 32 * 4 * HEADS * DIM);
    for (n, name) in names.iter().enumerate() {
        p.prefill(n as u64, &blocks(n), 8);
        p.grant(name, &blocks(n), 8);
        assert_eq!(d.wait_ends(name), [Outcome::Done]);
        assert_eq!(d.ranks[0].wrong(n as u64, &blocks(n), 8), 0);
    }
}

/// Two engines follow one ticket: one of them has it, and what the other has is right or not used.
#[test]
fn one_ticket_is_followed_by_two_engines() {
    let p = Recipe::new("p", 1).start();
    let readers = [Recipe::new("d1", 1).start(), Recipe::new("d2", 2).start()];
    let (source, destination) = ([3, 4, 5], [9, 10, 11]);
    for round in 0..10 {
        let name = format!("r{round}");
        let ticket = p.scheduler.open(&name, None).unwrap();
        for d in &readers {
            d.load(&follow(&name, &ticket, &destination, 10));
        }
        advance(&p, round, &name, &source, 8);
        p.prefill(round, &source, 10);
        p.grant(&name, &source, 10);
        let ends = readers.each_ref().map(|d| d.wait_ends(&name));
        assert!(ends.iter().any(|ends| ends.iter().all(|end| *end == Outcome::Done)), "{ends:?}");
        for (d, ends) in readers.iter().zip(&ends) {
            for (rank, end) in d.ranks.iter().zip(ends) {
                match end {
                    Outcome::Done => assert_eq!(rank.wrong(round, &destination, 10), 0),
                    end => assert_eq!(*end, Outcome::Expired(Loss::Ended(Ended::Confirmed))),
                }
            }
        }
        assert_eq!(p.wait_released().why, Ended::Confirmed);
    }
}

/// Heartbeats and confirmations do not wait behind a question that waits for news.
#[test]
fn a_long_question_does_not_hold_up_the_others() {
    let term = Duration::from_secs(8);
    let p = patient().term(term).start();
    let d = Recipe::new("d", 1).start();
    let quiet = p.scheduler.open("quiet", None).unwrap();
    d.scheduler.follow("quiet", Following::Ticket(quiet.clone()), LONG).unwrap();
    d.load(&follow("quiet", &quiet, &[9, 10], 8));
    heard(&d, "quiet", |_| true);
    let kept = p.grant("kept", &[1], 4);
    d.scheduler.hold(&kept, LONG);
    thread::sleep(term * 3 / 2);
    assert_eq!(p.scheduler.released(), [], "it was kept alive on the same connection");
    let began = Instant::now();
    d.start_load("kept", &kept, &[1], &[11], 4, LONG);
    assert_eq!(d.wait_ends("kept"), [Outcome::Done]);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

/// What an engine may not say of a request that it computes.
#[test]
fn what_does_not_go_on_is_an_error() {
    let p = Recipe::new("p", 1).start();
    let none = |name: &str| Err(Error::NotGrown(NotGrown::NoLease(name.to_owned())));
    assert_eq!(p.scheduler.advance("r", 4, table(&[1])), none("r"));
    assert_eq!(p.scheduler.restart("r"), none("r"));
    p.scheduler.open("r", None).unwrap();
    let twice = p.scheduler.open("r", None).unwrap_err();
    assert_eq!(twice.to_string(), "request 'r' has a lease already");
    p.scheduler.advance("r", 8, table(&[1, 2])).unwrap();
    let changed = |after| {
        Err(Error::NotGrown(NotGrown::Changed { request: "r".to_owned(), before: 8, after }))
    };
    assert_eq!(p.scheduler.advance("r", 7, table(&[1, 2])), changed(7));
    assert_eq!(p.scheduler.advance("r", 12, table(&[1, 3, 4])), changed(12));
    assert_eq!(p.scheduler.advance("r", 12, table(&[1])), changed(12));
    assert_eq!(p.scheduler.grant("r", granted(&[2, 1], 8)).map(|_| ()), changed(8));
    let step = InFlight { step: 1, tokens: 9 };
    let before = InFlight { step: 0, tokens: 9 };
    let request = "r".to_owned();
    assert_eq!(
        p.scheduler.advance_with("r", 9, table(&[1, 2, 3]), &[step]),
        Err(Error::NotGrown(NotGrown::StepsDoNotRise { request, step, before }))
    );
    let long: Vec<u32> = (0..=BLOCKS).collect();
    let too_long = Error::TableTooLong {
        request: "r".to_owned(),
        group: 0,
        named: BLOCKS as usize + 1,
        blocks: BLOCKS,
    };
    assert_eq!(p.scheduler.advance("r", 12, table(&long)), Err(too_long.clone()));
    assert_eq!(p.scheduler.grant("r", granted(&long, 12)).unwrap_err(), too_long);
    // Nothing of that has changed anything.
    let so_far = p.scheduler.granted("r").unwrap();
    assert_eq!(so_far, Grant { epoch: so_far.epoch, ..granted(&[1, 2], 8) });
    p.scheduler.restart("r").unwrap();
    p.scheduler.advance("r", 4, table(&[7])).unwrap();
    p.grant("r", &[7, 8], 8);
    assert_eq!(p.scheduler.advance("r", 12, table(&[7, 8, 9])), none("r"));
    assert_eq!(p.scheduler.restart("r"), none("r"));
    assert!(p.scheduler.revoke("r"));
}
