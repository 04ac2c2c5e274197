//! The main job, and what can be seen of it.

mod common;

use std::time::{Duration, Instant};

use common::*;
use kvferry_agent::{Ended, Failure, Notice, Outcome, Trust, Version, ask_status};

fn hand_over(p: &Engine, d: &Engine) {
    let tokens = 22;
    let (source, destination) = (blocks_for(tokens, 3), blocks_for(tokens, 9));
    p.prefill(7, &source, tokens);
    let ticket = p.scheduler.grant("r7").unwrap();
    d.start_load("r7", &ticket, &source, &destination, tokens, LONG);
    for (outcome, rank) in d.wait_ends("r7").iter().zip(&d.ranks) {
        assert_eq!(outcome, &Outcome::Done);
        assert_eq!(rank.wrong(7, &destination, tokens), 0);
        let written = tokens * (rank.heads.end - rank.heads.start) * DIM;
        assert_eq!(rank.touched() as u64, written, "nothing else changed");
    }
    let released = p.wait_released();
    assert_eq!((released.request.as_str(), released.why), ("r7", Ended::Confirmed));
}

#[test]
fn whatever_the_shapes_and_the_transport() {
    for by in [By::Tcp, By::Local] {
        for (wide, narrow) in [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)] {
            let p = Recipe::new("p", wide).by(by).start();
            let d = Recipe::new("d", narrow).by(by).start();
            hand_over(&p, &d);
        }
    }
}

#[test]
fn decode_engines_of_different_shape_read_from_one_prefill_engine() {
    let p = Recipe::new("p", 2).start();
    for (name, tp) in [("d1", 1), ("d2", 2), ("d4", 4)] {
        hand_over(&p, &Recipe::new(name, tp).start());
    }
}

/// The lock-step of a newer and an older release, both ways.
#[test]
fn minor_versions_work_together() {
    let (old, new) = (Version { major: 1, minor: 0 }, Version { major: 1, minor: 9 });
    for (ours, theirs) in [(old, new), (new, old), (old, Version::CURRENT), (Version::CURRENT, old)]
    {
        let mut p = Recipe::new("p", 2);
        (p.scheduler.version, p.worker.version) = (theirs, theirs);
        let mut d = Recipe::new("d", 1);
        (d.scheduler.version, d.worker.version) = (ours, ours);
        hand_over(&p.start(), &d.start());
    }
}

#[test]
fn an_older_agent_says_that_it_has_no_status() {
    let mut p = Recipe::new("p", 1);
    p.scheduler.version = Version { major: 1, minor: 0 };
    let p = p.start();
    let answer = ask_status(p.scheduler.address(), &Trust::Loopback, LONG).unwrap_err();
    assert!(answer.to_string().contains("1.0") && answer.to_string().contains("1.1"), "{answer}");
}

#[test]
fn another_major_version_is_refused_by_name() {
    let mut p = Recipe::new("p", 1);
    p.scheduler.version = Version { major: 2, minor: 0 };
    let (p, d) = (p.start(), Recipe::new("d", 1).start());
    let ticket = p.scheduler.grant("r").unwrap();
    d.start_load("r", &ticket, &[1], &[1], 1, LONG);
    match &d.wait_ends("r")[0] {
        Outcome::Failed(Failure::Refused(reason)) => {
            assert!(reason.contains("2.0") && reason.contains("1.1"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_does_not_fit_is_refused_before_the_first_byte() {
    let mut other = Recipe::new("p", 1);
    other.model = "another";
    let (p, d) = (other.start(), Recipe::new("d", 1).start());
    let ticket = p.scheduler.grant("r").unwrap();
    d.start_load("r", &ticket, &[1], &[1], 1, LONG);
    match &d.wait_ends("r")[0] {
        Outcome::Failed(Failure::Refused(reason)) => {
            assert!(reason.contains("'another'") && reason.contains("'tiny'"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(d.ranks[0].touched(), 0);
    let released = p.wait_released();
    assert_eq!(released.why, Ended::Abandoned, "P's blocks do not wait for the lease to expire");
    let refusals = p.scheduler.metrics();
    assert!(refusals.contains("kvferry_refusals_total{engine=\"p\"} 1"), "{refusals}");

    let p = Recipe::new("p", 1).by(By::Local).start();
    let ticket = p.scheduler.grant("r").unwrap();
    d.start_load("r", &ticket, &[1], &[1], 1, LONG);
    match &d.wait_ends("r")[0] {
        Outcome::Failed(Failure::Refused(reason)) => {
            assert!(reason.contains("'local'") && reason.contains("'tcp'"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn block_tables_that_do_not_fit_fail_only_their_request() {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).start());
    let ticket = p.scheduler.grant("r").unwrap();
    d.start_load("r", &ticket, &[1], &[BLOCKS + 5], 1, LONG);
    let ending = d.ranks[0].wait_end("r");
    assert!(matches!(ending.outcome, Outcome::Failed(Failure::BadRequest(_))), "{ending:?}");
    assert!(!ending.quarantined);
    assert_eq!(p.wait_released().why, Ended::Abandoned);
    hand_over(&p, &d);
}

/// A thousand requests at once, one in twenty of them aborted: each ends, and each block comes back.
#[test]
fn a_thousand_requests_with_aborts() {
    let (p, d) = (Recipe::new("p", 2).start(), Recipe::new("d", 1).start());
    let tokens = 6;
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let (source, destination) = (blocks_for(tokens, 3), blocks_for(tokens, 9));
    p.prefill(7, &source, tokens);
    let before = threads();
    for i in 0..1000 {
        let name = format!("r{i}");
        let ticket = p.scheduler.grant(&name).unwrap();
        d.start_load(&name, &ticket, &source, &destination, tokens, LONG);
        if i % 20 == 0 {
            d.ranks[0].worker.abort(&name);
        }
    }
    // Other tests run beside this one: their threads are counted too.
    assert!(threads() < before + 300, "no thread for each request");
    let (mut done, mut aborted, mut settled) = (0, 0, 0);
    let until = Instant::now() + LONG;
    let mut quarantined = 0;
    while (done + aborted < 1000 || settled < quarantined) && Instant::now() < until {
        for notice in d.ranks[0].worker.wait(until) {
            match notice {
                Notice::Ended(ending) => {
                    quarantined += usize::from(ending.quarantined);
                    match ending.outcome {
                        Outcome::Done => done += 1,
                        Outcome::Aborted => aborted += 1,
                        other => panic!("{other:?}"),
                    }
                }
                Notice::Settled { .. } => settled += 1,
            }
        }
    }
    assert_eq!(done + aborted, 1000);
    assert!(done >= 950);
    assert_eq!(d.ranks[0].wrong(7, &destination, tokens), 0);
    eventually("all blocks of P are back", || p.scheduler.status().leases.is_empty());
    assert_eq!(d.ranks[0].worker.loads(), []);
    let metrics = d.ranks[0].worker.metrics();
    let line =
        format!("kvferry_loads_ended_total{{engine=\"d\",rank=\"0\",outcome=\"done\"}} {done}");
    assert!(metrics.contains(&line), "{line}\n{metrics}");
}

#[test]
fn a_request_that_waits_is_kept_alive() {
    let term = Duration::from_millis(150);
    let p = Recipe::new("p", 1).term(term).start();
    let d = Recipe::new("d", 1).start();
    let (source, destination) = (blocks_for(4, 3), blocks_for(4, 9));
    p.prefill(1, &source, 4);
    let kept = p.scheduler.grant("kept").unwrap();
    p.scheduler.grant("left").unwrap();
    d.scheduler.hold(&kept, LONG);
    let released = p.wait_released();
    assert_eq!((released.request.as_str(), released.why), ("left", Ended::Expired));
    std::thread::sleep(term * 4);
    assert_eq!(p.scheduler.released(), [], "the heartbeat keeps the other");
    assert_eq!(d.scheduler.lost(), []);
    d.start_load("kept", &kept, &source, &destination, 4, LONG);
    assert_eq!(d.wait_ends("kept"), [Outcome::Done]);
    d.scheduler.settle(&kept);
    assert_eq!(p.wait_released().why, Ended::Confirmed);
}

#[test]
fn a_request_waits_only_as_long_as_it_may() {
    let p = Recipe::new("p", 1).term(Duration::from_millis(100)).start();
    let d = Recipe::new("d", 1).start();
    let ticket = p.scheduler.grant("r").unwrap();
    d.scheduler.hold(&ticket, Duration::from_millis(300));
    assert_eq!(p.wait_released().why, Ended::Expired);
    eventually("D hears of it", || !d.scheduler.lost().is_empty());
}

/// Engines name their requests by themselves: what becomes of one says nothing of another's.
#[test]
fn two_engines_may_give_the_same_name() {
    let term = Duration::from_millis(400);
    let first = Recipe::new("first", 1).term(term).start();
    let second = Recipe::new("second", 1).term(term).start();
    let d = Recipe::new("d", 1).start();
    let ticket = first.scheduler.grant("r").unwrap();
    let other = second.scheduler.grant("r").unwrap();
    d.scheduler.hold(&ticket, LONG);
    d.scheduler.hold(&other, LONG);
    d.scheduler.reading(&other);
    let holds = d.scheduler.status().holds;
    let holds: Vec<_> = holds.iter().map(|h| (h.engine.as_str(), h.reading)).collect();
    assert_eq!(holds, [("first", false), ("second", true)]);
    std::thread::sleep(term * 3);
    assert_eq!(first.scheduler.released(), [], "both are kept alive");
    assert_eq!(second.scheduler.released(), []);
    d.scheduler.settle(&ticket);
    assert_eq!(first.wait_released().why, Ended::Expired, "nobody cares for it any more");
    assert_eq!(second.scheduler.released(), []);
    drop(second);
    let lost = std::sync::Mutex::new(vec![]);
    eventually("the other is lost", || {
        let mut lost = lost.lock().unwrap();
        lost.extend(d.scheduler.lost());
        lost.iter().map(|one| &one.ticket).eq([&other])
    });
}

#[test]
fn an_abandoned_request_is_released_at_once() {
    let p = Recipe::new("p", 1).term(LONG).start();
    let d = Recipe::new("d", 1).start();
    let ticket = p.scheduler.grant("r").unwrap();
    d.scheduler.hold(&ticket, LONG);
    d.scheduler.abandon(&ticket);
    assert_eq!(p.wait_released().why, Ended::Abandoned);
}

#[test]
fn a_status_says_who_is_there_and_what_is_kept() {
    let p = Recipe::new("p", 2).start();
    let d = Recipe::new("d", 1).start();
    hand_over(&p, &d);
    let ticket = p.scheduler.grant("waiting").unwrap();
    d.scheduler.hold(&ticket, LONG);
    let status = ask_status(p.scheduler.address(), &Trust::Loopback, LONG).unwrap();
    assert_eq!((status.engine.as_str(), status.ranks), ("p", 2));
    assert_eq!(status.leases.len(), 1);
    assert_eq!(status.leases[0].request, "waiting");
    assert!(status.peers.iter().any(|peer| peer.who == "d/0 (tp0)"), "{status:?}");
    eventually("D is connected", || {
        let status = ask_status(d.scheduler.address(), &Trust::Loopback, LONG).unwrap();
        status.holds.len() == 1 && status.connected_to == [p.scheduler.address()]
    });
}

#[test]
fn no_patience_is_too_long() {
    let p = Recipe::new("p", 1).term(Duration::MAX).start();
    let mut d = Recipe::new("d", 1);
    (d.worker.handshake, d.worker.keepalive) = (Duration::MAX, Duration::MAX);
    let d = d.start();
    let (source, destination) = (blocks_for(4, 3), blocks_for(4, 9));
    p.prefill(1, &source, 4);
    let ticket = p.scheduler.grant("r").unwrap();
    d.scheduler.hold(&ticket, Duration::MAX);
    d.start_load("r", &ticket, &source, &destination, 4, Duration::MAX);
    assert_eq!(d.wait_ends("r"), [Outcome::Done]);
    assert_eq!(p.wait_released().why, Ended::Confirmed);
}

/// Whoever looks does not get in the way of who works.
#[test]
fn a_status_can_be_asked_for_at_any_time() {
    let p = Recipe::new("p", 1).start();
    let until = Instant::now() + Duration::from_millis(300);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while Instant::now() < until {
                p.scheduler.status();
                p.scheduler.metrics();
            }
        });
        let mut granted = 0;
        while Instant::now() < until {
            let name = format!("r{granted}");
            p.scheduler.grant(&name).unwrap();
            p.scheduler.revoke(&name);
            granted += 1;
        }
        assert!(granted > 0);
    });
}
