//! An engine that is about to go: nothing new is promised, what was promised is kept, and it is said when
//! nothing is left.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::*;
use kvferry_agent::{
    Ended, Error, Following, Left, Loss, LostWhy, Outcome, Trust, ask_drain, ask_status,
};
use tokio::signal::unix::SignalKind;

const LONG: Duration = Duration::from_secs(20);

fn drain(engine: &Engine, on: bool) -> Left {
    ask_drain(engine.scheduler.address(), &Trust::Loopback, LONG, on).unwrap()
}

fn left(leases: u32, holds: u32) -> Left {
    Left { leases, holds }
}

#[test]
fn what_was_promised_is_served_and_nothing_new_is() {
    let (p, d) = (Recipe::new("p", 2).start(), Recipe::new("d", 1).start());
    let (source, destination) = (blocks_for(8, 3), blocks_for(8, 9));
    p.prefill(1, &source, 8);
    let ticket = p.grant("promised", &source, 8);
    assert_eq!(drain(&p, true), left(1, 0));
    assert!(p.scheduler.draining() && p.scheduler.status().draining);

    let refused = p.scheduler.grant("new", granted(&[1], 4)).unwrap_err();
    assert_eq!(refused, Error::Draining("new".to_owned()));
    assert_eq!(p.scheduler.open("new", None).unwrap_err(), Error::Draining("new".to_owned()));

    // D has never seen this engine: the handshake is part of what was promised.
    d.start_load("promised", &ticket, &source, &destination, 8, LONG);
    assert_eq!(d.wait_ends("promised"), [Outcome::Done]);
    assert_eq!(d.ranks[0].wrong(1, &destination, 8), 0);
    assert_eq!(p.wait_released().why, Ended::Confirmed);
    // Asked as often as one likes.
    assert_eq!(drain(&p, true), left(0, 0));
    assert!(!p.scheduler.drain(), "that was no news");
}

/// It has come in, but not yet said who it is.
#[test]
fn a_peer_in_the_middle_of_its_handshake_is_served() {
    let (p, d) = (Recipe::new("p", 2).start(), Recipe::new("d", 1).start());
    let wire = Wire::to(p.scheduler.address());
    let (source, destination) = (blocks_for(8, 3), blocks_for(8, 9));
    p.prefill(1, &source, 8);
    let mut ticket = p.grant("promised", &source, 8);
    ticket.address.clone_from(&wire.address);
    wire.stop();
    d.start_load("promised", &ticket, &source, &destination, 8, LONG);
    eventually("D knocks", || !wire.heard().is_empty());
    assert_eq!(drain(&p, true), left(1, 0));
    wire.go();
    assert_eq!(d.wait_ends("promised"), [Outcome::Done]);
    assert_eq!(d.ranks[0].wrong(1, &destination, 8), 0);
    assert_eq!(p.wait_released().why, Ended::Confirmed);
    assert_eq!(drain(&p, true), left(0, 0));
}

#[test]
fn what_was_opened_is_computed_to_its_end() {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).start());
    p.scheduler.open("r", Some("shared")).unwrap();
    assert_eq!(drain(&p, true), left(1, 0));
    let following = Following::Name {
        engine: "p".to_owned(),
        address: p.scheduler.address().to_owned(),
        name: "shared".to_owned(),
    };
    d.scheduler.follow("r", following, LONG).unwrap();
    p.prefill(1, &[3, 4], 8);
    p.scheduler.advance("r", 4, table(&[3])).unwrap();
    // Not even a restart of it is new.
    p.scheduler.restart("r").unwrap();
    let ticket = p.scheduler.grant("r", granted(&[3, 4], 8)).unwrap();
    eventually("D knows of all of it", || {
        d.scheduler.frontier("r").is_some_and(|progress| progress.sealed)
    });
    assert_eq!(d.scheduler.left(), left(0, 1));
    d.scheduler.abandon(&ticket);
    assert_eq!(p.wait_released().why, Ended::Abandoned);
    assert!(p.scheduler.left().is_empty() && d.scheduler.left().is_empty());
}

/// Whoever waits for a request that will not come is told at once, whether it asked before or after.
#[test]
fn who_asks_for_what_will_not_come_is_told_so() {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).start());
    let follow = |request: &str| {
        let following = Following::Name {
            engine: "p".to_owned(),
            address: p.scheduler.address().to_owned(),
            name: request.to_owned(),
        };
        d.scheduler.follow(request, following, LONG).unwrap();
    };
    follow("before");
    thread::sleep(Duration::from_millis(100));
    drain(&p, true);
    follow("after");
    let lost = Mutex::new(vec![]);
    eventually("both are lost", || {
        lost.lock().unwrap().extend(d.scheduler.lost());
        lost.lock().unwrap().len() == 2
    });
    for one in lost.into_inner().unwrap() {
        assert_eq!((one.ticket, one.why), (None, LostWhy::NotHeld(Loss::Draining)));
    }
}

#[test]
fn a_drain_can_be_taken_back() {
    let p = Recipe::new("p", 1).start();
    drain(&p, true);
    assert_eq!(drain(&p, false), left(0, 0));
    assert!(!p.scheduler.draining());
    p.grant("new", &[1], 4);
    let status = ask_status(p.scheduler.address(), &Trust::Loopback, LONG).unwrap();
    assert!(!status.draining && status.leases.len() == 1);
}

/// What is granted is granted before the drain, or not at all: what is left can only become less.
#[test]
fn no_promise_slips_through() {
    const THREADS: usize = 4;
    for round in 0..50 {
        let p = Recipe::new("p", 1).start();
        let granted = AtomicUsize::new(0);
        thread::scope(|scope| {
            for one in 0..THREADS {
                let (p, granted) = (&p, &granted);
                scope.spawn(move || {
                    for request in 0..500 {
                        let name = format!("{one}-{request}");
                        match p.scheduler.open(&name, None) {
                            Ok(_) => granted.fetch_add(1, Ordering::SeqCst),
                            Err(Error::Draining(_)) => break,
                            Err(error) => panic!("{error}"),
                        };
                    }
                });
            }
            thread::sleep(Duration::from_micros(20 * round));
            p.scheduler.drain();
            let after = p.scheduler.left().leases;
            thread::sleep(Duration::from_millis(2));
            assert_eq!(p.scheduler.left().leases, after);
        });
        assert_eq!(p.scheduler.left().leases as usize, granted.load(Ordering::SeqCst));
    }
}

#[test]
fn a_signal_drains() {
    let p = Recipe::new("p", 1).start();
    p.scheduler.drain_on(SignalKind::user_defined2().as_raw_value()).unwrap();
    let status = std::process::Command::new("kill")
        .args(["-USR2", &std::process::id().to_string()])
        .status()
        .unwrap();
    assert!(status.success());
    eventually("it drains", || p.scheduler.draining());
}
