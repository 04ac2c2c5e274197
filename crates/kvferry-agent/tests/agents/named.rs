//! Requests that D knows by name before P has heard of them, as where a router sends them to both at once.

use std::thread;
use std::time::{Duration, Instant};

use crate::common::*;
use crate::following::*;
use kvferry_agent::lease::{Loss, NotGrown};
use kvferry_agent::{Ended, Error, Following, Lost, LostWhy, Outcome, PeerError, Progress, Ticket};

fn named(p: &Engine, name: &str) -> Following {
    Following::Name {
        engine: "p".to_owned(),
        address: p.scheduler.address().to_owned(),
        name: name.to_owned(),
    }
}

/// D hears of a request before P does, knows nothing but its name, and loads it all the same.
#[test]
fn decode_comes_first_and_knows_only_a_name() {
    let (p, d) = (patient().start(), Recipe::new("d", 1).start());
    d.scheduler.follow("d-1", named(&p, "n"), LONG).unwrap();
    let again = d.scheduler.follow("d-1", named(&p, "n"), LONG);
    assert_eq!(again, Err(Error::Duplicate("d-1".to_owned())));
    thread::sleep(Duration::from_millis(1100));
    assert_eq!(d.scheduler.frontier("d-1"), None, "P has not heard of it");
    let opened = Instant::now();
    let ticket = p.scheduler.open("p-1", Some("n")).unwrap();
    let progress = heard(&d, "d-1", |_| true);
    assert!(opened.elapsed() < LONG / 4, "whoever waits is told at once");
    assert_eq!(
        progress,
        Progress {
            ticket: ticket.clone(),
            epoch: progress.epoch,
            tokens: 0,
            begun: false,
            sealed: false,
            speed: None
        }
    );
    let status = p.scheduler.status();
    assert_eq!(status.leases, []);
    d.load(&follow("d-1", &ticket, &[9, 10, 11], 12));
    // Its scheduler and its one rank.
    eventually("both follow it", || p.scheduler.status().growing[0].followers == 2);
    for (tokens, known) in [(4, false), (8, true)] {
        thread::sleep(Duration::from_millis(50));
        advance(&p, 1, "p-1", &[3, 4, 5], tokens);
        let progress = heard(&d, "d-1", |progress| progress.tokens == tokens);
        assert_eq!(progress.speed.is_some(), known, "{progress:?}");
        assert!(progress.speed.is_none_or(|speed| speed > 0.0 && speed < 100.0), "{progress:?}");
        let status = p.scheduler.status();
        let [growing] = &status.growing[..] else { panic!("{status:?}") };
        assert_eq!(
            (growing.request.as_str(), growing.tokens, growing.restarts),
            ("p-1", tokens, 0)
        );
        assert!(growing.age_ms >= 50, "{growing:?}");
    }
    p.prefill(1, &[3, 4, 5], 12);
    p.grant("p-1", &[3, 4, 5], 12);
    assert_eq!(d.wait_ends("d-1"), [Outcome::Done]);
    assert_eq!(d.ranks[0].wrong(1, &[9, 10, 11], 12), 0);
    assert_eq!(p.wait_released().why, Ended::Confirmed);
    d.scheduler.settle(&ticket);
    assert_eq!(d.scheduler.frontier("d-1"), None);
    assert_eq!((d.scheduler.lost(), d.scheduler.status().holds), (vec![], vec![]));
    assert_eq!(p.scheduler.status().growing, []);
    d.scheduler.follow("d-1", named(&p, "n"), LONG).unwrap();
}

/// P restarts under another name at its address, of which a router hears later: D asks whoever is there, also
/// while nobody is.
#[test]
fn an_engine_that_has_restarted_is_found_by_the_name_of_the_request() {
    let d = Recipe::new("d", 1).start();
    let address = quiet_address();
    let p = Recipe::new("p", 1).at(address).start();
    let known = named(&p, "n");
    let before = p.scheduler.open("p-0", Some("n")).unwrap();
    d.scheduler.follow("d-0", known.clone(), LONG).unwrap();
    heard(&d, "d-0", |_| true);
    drop(p);
    d.scheduler.follow("d-1", known, LONG).unwrap();
    thread::sleep(Duration::from_millis(100));
    let p = Recipe::new("p-again", 1).at(address).start();
    p.prefill(1, &[3, 4, 5], 12);
    p.scheduler.open("p-1", Some("n")).unwrap();
    let progress = heard(&d, "d-1", |_| true);
    assert_eq!(progress.ticket.engine, "p-again");
    d.load(&follow("d-1", &progress.ticket, &[9, 10, 11], 12));
    p.grant("p-1", &[3, 4, 5], 12);
    assert_eq!(d.wait_ends("d-1"), [Outcome::Done]);
    assert_eq!(d.ranks[0].wrong(1, &[9, 10, 11], 12), 0);
    // What the life before had begun is lost, and is not taken for what is there now.
    let found = lost(&d);
    assert_eq!(found[0].ticket, Some(before), "{found:?}");
}

/// P never hears of it, or is another engine: D need not wait for ever.
#[test]
fn a_name_that_is_never_heard_of_is_lost() {
    let d = Recipe::new("d", 1).start();
    let p = Recipe::new("p", 1).start();
    d.scheduler.follow("r", named(&p, "n"), SHORT).unwrap();
    let follows = Some("r".to_owned());
    let never = Lost { ticket: None, follows: follows.clone(), why: LostWhy::NeverHeardOf };
    assert_eq!(lost(&d), [never]);
    d.scheduler.unfollow("r");

    let other = Recipe::new("other", 1).start();
    d.scheduler.follow("r", named(&other, "n"), SHORT).unwrap();
    assert_eq!(lost(&d), [Lost { ticket: None, follows, why: LostWhy::NeverHeardOf }]);
    // A ticket is of one engine.
    let address = other.scheduler.address().to_owned();
    let elsewhere = Ticket { address, ..p.grant("t", &[3], 4) };
    d.scheduler.follow("r", Following::Ticket(elsewhere), LONG).unwrap();
    let found = lost(&d);
    let is_told = match &found[0].why {
        LostWhy::Unreachable(PeerError::Refused(why)) => why.contains("'other', not 'p'"),
        // By the connection that was opened for the name, where that is still there: it is of another life.
        why => *why == LostWhy::NotHeld(Loss::Restarted),
    };
    assert!(is_told, "{found:?}");
    let nobody = Following::Name {
        engine: "p".to_owned(),
        address: "127.0.0.1:1".to_owned(),
        name: "n".to_owned(),
    };
    d.scheduler.follow("r", nobody, Duration::from_secs(8)).unwrap();
    let found = lost(&d);
    assert!(matches!(&found[0].why, LostWhy::Unreachable(PeerError::Io { .. })), "{found:?}");
}

/// A client tries again under the same name: whoever asks from then on gets the new request, and whoever
/// has the old one keeps it or hears of its end.
#[test]
fn a_name_is_used_again() {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).start());
    let first = p.scheduler.open("p-1", Some("n")).unwrap();
    d.scheduler.follow("d-1", named(&p, "n"), LONG).unwrap();
    assert_eq!(heard(&d, "d-1", |_| true).ticket, first);
    // The client has left, and tries again. P hears of the second before it is told of the first's end.
    let second = p.scheduler.open("p-2", Some("n")).unwrap();
    d.scheduler.follow("d-2", named(&p, "n"), LONG).unwrap();
    assert_eq!(heard(&d, "d-2", |_| true).ticket, second);
    advance(&p, 1, "p-1", &[3], 4);
    advance(&p, 2, "p-2", &[5, 6], 8);
    assert_eq!(heard(&d, "d-1", |progress| progress.tokens > 0).tokens, 4);
    assert_eq!(heard(&d, "d-2", |progress| progress.tokens > 0).tokens, 8);
    d.scheduler.unfollow("d-1");
    let gone = Error::NotGrown(NotGrown::GivenUp("p-1".to_owned()));
    eventually("P hears that nobody wants the first", || {
        p.scheduler.advance("p-1", 8, table(&[3, 4])) == Err(gone.clone())
    });
    p.prefill(2, &[5, 6], 8);
    p.grant("p-2", &[5, 6], 8);
    d.load(&follow("d-2", &second, &[9, 10], 8));
    assert_eq!(d.wait_ends("d-2"), [Outcome::Done]);
    assert_eq!(d.ranks[0].wrong(2, &[9, 10], 8), 0);
    // Nothing is left of the name.
    d.scheduler.follow("d-3", named(&p, "n"), SHORT).unwrap();
    let found = lost(&d);
    assert_eq!(found[0].why, LostWhy::NeverHeardOf, "{found:?}");
}

/// Two requests have one name, and one of them leaves: the other one reads all the same.
#[test]
fn who_leaves_gives_nothing_up() {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).start());
    let ticket = p.scheduler.open("p-1", Some("n")).unwrap();
    for name in ["d-1", "d-2"] {
        d.scheduler.follow(name, named(&p, "n"), LONG).unwrap();
        assert_eq!(heard(&d, name, |_| true).ticket, ticket);
    }
    d.scheduler.leave("d-2");
    assert_eq!(d.scheduler.frontier("d-2"), None);
    d.scheduler.unfollow("d-2");
    d.load(&follow("d-1", &ticket, &[9, 10], 8));
    p.prefill(1, &[3, 4], 8);
    p.grant("p-1", &[3, 4], 8);
    assert_eq!(d.wait_ends("d-1"), [Outcome::Done]);
    assert_eq!(d.ranks[0].wrong(1, &[9, 10], 8), 0);
    assert_eq!(p.wait_released().why, Ended::Confirmed);
}

/// A followed lease is kept alive when it is sealed, and lost when nothing happens for too long.
#[test]
fn what_is_followed_is_held() {
    let (term, patience) = (Duration::from_secs(6), Duration::from_secs(15));
    let quiet = term * 5 / 4;
    let p = Recipe::new("p", 1).term(term).start();
    let d = Recipe::new("d", 1).start();
    d.scheduler.follow("r", named(&p, "n"), patience).unwrap();
    let ticket = p.scheduler.open("p-1", Some("n")).unwrap();
    heard(&d, "r", |_| true);
    d.scheduler.hold(&ticket, patience);
    thread::sleep(quiet);
    advance(&p, 1, "p-1", &[3], 4);
    thread::sleep(quiet);
    p.prefill(1, &[3, 4], 8);
    p.grant("p-1", &[3, 4], 8);
    assert!(heard(&d, "r", |progress| progress.sealed).sealed);
    thread::sleep(quiet);
    assert_eq!(p.scheduler.released(), [], "it is kept alive");
    let lost = lost(&d);
    let patience = LostWhy::Patience;
    assert_eq!(lost, [Lost { ticket: Some(ticket), follows: Some("r".to_owned()), why: patience }]);
    assert_eq!(p.wait_released().why, Ended::Expired);
}
