//! A lease that grows, and what comes between: one side dies, takes it back or gives up, or the link is cut.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::common::*;
use crate::following::*;
use kvferry_agent::lease::NotGrown;
use kvferry_agent::{
    Ended, Error, Failure, Following, InFlight, Loss, Lost, LostWhy, Notice, Outcome,
};

/// P goes away while it computes, or starts again at its old address.
#[test]
fn prefill_dies_while_it_computes() {
    for comes_back in [false, true] {
        let address = quiet_address();
        let p = Recipe::new("p", 1).at(address).start();
        let mut d = Recipe::new("d", 1);
        if !comes_back {
            d.worker.handshake = Duration::from_secs(5);
        }
        let d = d.start();
        let ticket = p.scheduler.open("r", None).unwrap();
        d.load(&follow("r", &ticket, &[9, 10], 8));
        d.scheduler.follow("r", Following::Ticket(ticket.clone()), LONG).unwrap();
        advance(&p, 1, "r", &[3], 4);
        eventually("it is read", || d.ranks[0].wrong(1, &[9], 4) == 0);
        drop(p);
        let again = comes_back.then(|| Recipe::new("p", 1).at(address).start());
        let ending = d.ranks[0].wait_end("r");
        match comes_back {
            true => {
                assert_eq!(ending.outcome, Outcome::Expired(Loss::Restarted));
                let why = LostWhy::NotHeld(Loss::Restarted);
                let follows = Some("r".to_owned());
                assert_eq!(lost(&d), [Lost { ticket: Some(ticket), follows, why }]);
            }
            false => {
                let gone = matches!(ending.outcome, Outcome::Failed(Failure::PeerGone(_)));
                assert!(gone, "{:?}", ending.outcome);
                let lost = lost(&d);
                assert!(matches!(lost[0].why, LostWhy::Unreachable(_)), "{lost:?}");
                assert_eq!(d.scheduler.frontier("r"), None);
            }
        }
        assert!(!ending.quarantined);
        assert_eq!(d.ranks[0].worker.loads(), []);
        drop(again);
    }
}

/// A request that D follows and reads over a wire that can be cut.
fn over_a_wire() -> (Engine, Engine, Wire) {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).start());
    let wire = Wire::to(p.scheduler.address());
    let mut ticket = p.scheduler.open("r", None).unwrap();
    ticket.address = wire.address.clone();
    d.load(&follow("r", &ticket, &[9, 10, 11], 12));
    d.scheduler.follow("r", Following::Ticket(ticket.clone()), LONG).unwrap();
    (p, d, wire)
}

/// A connection that breaks is made again, and what was heard before counts.
#[test]
fn the_link_is_cut_while_a_lease_is_followed() {
    let (p, d, wire) = over_a_wire();
    for tokens in [4, 8] {
        advance(&p, 1, "r", &[3, 4, 5], tokens);
        heard(&d, "r", |progress| progress.tokens == tokens);
        eventually("it is read", || d.ranks[0].wrong(1, &[9, 10], tokens) == 0);
        wire.cut();
    }
    p.prefill(1, &[3, 4, 5], 12);
    p.grant("r", &[3, 4, 5], 12);
    let ending = d.ranks[0].wait_end("r");
    assert_eq!((ending.outcome, ending.bytes), (Outcome::Done, 12 * HEADS * DIM));
    assert_eq!(d.ranks[0].wrong(1, &[9, 10, 11], 12), 0);
    assert_eq!(d.scheduler.lost(), []);
}

/// What ranks say of their layers is heard again, too, when the connection is.
#[test]
fn the_link_is_cut_while_layers_are_read() {
    let (p, d, wire) = over_a_wire();
    assert!(!heard(&d, "r", |_| true).begun);
    for step in 1..4 {
        let (complete, tokens) = (4 * (step - 1), 4 * step);
        let in_flight = [InFlight { step, tokens }];
        p.scheduler.advance_with("r", complete, table(&[3, 4, 5]), &in_flight).unwrap();
        heard(&d, "r", |progress| progress.begun && progress.tokens == complete);
        p.ranks[0].worker.begin_step(step);
        p.prefill(1, &[3, 4, 5], tokens);
        p.ranks[0].worker.wrote(step, ["layers.0/kv".to_owned()]);
        eventually("it is read before it is complete", || {
            d.ranks[0].wrong(1, &[9, 10, 11], tokens) == 0
        });
        wire.cut();
    }
    p.grant("r", &[3, 4, 5], 12);
    let ending = d.ranks[0].wait_end("r");
    assert_eq!((ending.outcome, ending.bytes), (Outcome::Done, 12 * HEADS * DIM));
    assert_eq!(d.ranks[0].wrong(1, &[9, 10, 11], 12), 0);
}

/// D does not want it any more: P hears of that when it next speaks of the request.
#[test]
fn decode_gives_up_what_is_still_computed() {
    for reading in [false, true] {
        let (p, d) = held_pair();
        let ticket = p.scheduler.open("r", Some("n")).unwrap();
        d.load(&follow("r", &ticket, &[9, 10], 8));
        let mut read = None;
        if reading {
            advance(&p, 1, "r", &[3], 4);
            read = Some(d.ranks[0].held.as_ref().unwrap().next());
        } else {
            eventually("it follows", || {
                d.ranks[0].worker.loads() == [("r".to_owned(), "following")]
            });
        }
        d.ranks[0].worker.abort("r");
        let ending = d.ranks[0].wait_end("r");
        assert_eq!((ending.outcome, ending.quarantined), (Outcome::Aborted, reading));
        if let Some(read) = read {
            eventually("it is cancelled", || read.cancelled.load(Ordering::SeqCst));
            read.settle(kvferry_transport::Error::Cancelled);
            let settled = Notice::Settled { request: "r".to_owned() };
            assert_eq!(d.ranks[0].worker.wait(Instant::now() + LONG), [settled]);
        }
        let gone = Error::NotGrown(NotGrown::GivenUp("r".to_owned()));
        eventually("P hears of it", || {
            p.scheduler.advance("r", 8, table(&[3, 4])) == Err(gone.clone())
        });
        assert_eq!(p.scheduler.grant("r", granted(&[3, 4], 8)), Err(gone));
        assert_eq!(p.scheduler.released(), [], "P never promised to keep the blocks");
        // The engine is done with it: the next of that name is another request.
        p.grant("r", &[3, 4], 8);
    }
}

/// P takes back what it computes, because its client has left for instance.
#[test]
fn prefill_takes_back_what_it_still_computes() {
    let (p, d) = (patient().start(), Recipe::new("d", 1).start());
    let ticket = p.scheduler.open("r", None).unwrap();
    d.load(&follow("r", &ticket, &[9, 10], 8));
    d.scheduler.follow("r", Following::Ticket(ticket.clone()), LONG).unwrap();
    advance(&p, 1, "r", &[3], 4);
    heard(&d, "r", |progress| progress.tokens == 4);
    let began = Instant::now();
    assert!(p.scheduler.revoke("r"));
    let revoked = Loss::Ended(Ended::Revoked);
    assert_eq!(d.wait_ends("r"), [Outcome::Expired(revoked)]);
    let why = LostWhy::NotHeld(revoked);
    assert_eq!(lost(&d), [Lost { ticket: Some(ticket), follows: Some("r".to_owned()), why }]);
    assert!(began.elapsed() < LONG / 4, "it is told at once");
    assert_eq!(p.scheduler.released(), [], "P never promised to keep the blocks");
    let gone = Error::NotGrown(NotGrown::NoLease("r".to_owned()));
    assert_eq!(p.scheduler.advance("r", 8, table(&[3, 4])), Err(gone));
}
