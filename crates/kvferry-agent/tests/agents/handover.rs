//! The main job, and what can be seen of it.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::held::Refusal;
use crate::common::*;
use kvferry_agent::{
    Ended, Failure, Lost, LostWhy, Outcome, PeerError, Trust, Version, ask_status,
};

fn hand_over(p: &Engine, d: &Engine) {
    let outcomes = p.hand_over(d, "r7", 22, p.scheduler.address());
    assert_eq!(outcomes, vec![Outcome::Done; d.ranks.len()]);
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

/// A transport that walks loops itself, whatever the shapes.
#[test]
fn loops_are_carried_out_as_they_are() {
    for (wide, narrow) in [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)] {
        let p = Recipe::new("p", wide).by(By::Looping).start();
        let d = Recipe::new("d", narrow).by(By::Looping).start();
        hand_over(&p, &d);
    }
}

/// Of the last block no more is read than is needed.
#[test]
fn loops_are_exact() {
    let start = |name| {
        let mut recipe = Recipe::new(name, 1).by(By::Looping);
        recipe.by_head = true;
        recipe.start()
    };
    let (p, d) = (start("p"), start("d"));
    let tokens = TOKENS_PER_BLOCK + 1;
    let (source, destination) = ([3, 6], [9, 5]);
    p.prefill(7, &source, 2 * TOKENS_PER_BLOCK);
    let ticket = p.grant("r", &source, tokens);
    let mut load = load("r", &ticket, granted(&source, tokens), &destination);
    load.rest = true;
    d.ranks[0].worker.load(load).unwrap();
    let ending = d.ranks[0].wait_end("r");
    assert_eq!((ending.outcome, ending.bytes), (Outcome::Done, tokens * HEADS * DIM));
    assert_eq!(d.ranks[0].touched() as u64, tokens * HEADS * DIM);
}

#[test]
fn decode_engines_of_different_shape_read_from_one_prefill_engine() {
    let p = Recipe::new("p", 2).start();
    for (name, tp) in [("d1", 1), ("d2", 2), ("d4", 4)] {
        hand_over(&p, &Recipe::new(name, tp).start());
    }
}

const fn version(major: u16, minor: u16) -> Version {
    Version { major, minor }
}

/// An engine of a release that speaks this version.
fn of_version(name: &'static str, tp: u64, version: Version) -> Engine {
    let mut recipe = Recipe::new(name, tp);
    (recipe.scheduler.version, recipe.worker.version) = (version, version);
    recipe.start()
}

/// A release and the one after it, which is invented here, both ways.
#[test]
fn neighbouring_minor_versions_work_together() {
    let Version { major, minor } = Version::CURRENT;
    let next = version(major, minor + 1);
    for (ours, theirs) in [(Version::CURRENT, next), (next, Version::CURRENT)] {
        hand_over(&of_version("p", 2, theirs), &of_version("d", 1, ours));
    }
}

/// Both versions are named on both sides, at once, and nothing is moved or lost: P goes on to serve whom it can.
#[test]
fn a_version_too_far_away_is_refused_by_name() {
    let Version { major, minor } = Version::CURRENT;
    for other in [version(major + 1, minor), version(major - 1, minor), version(major, minor + 2)] {
        for (ours, theirs) in [(Version::CURRENT, other), (other, Version::CURRENT)] {
            let (p, d) = (of_version("p", 1, theirs), of_version("d", 1, ours));
            let ticket = p.grant("r", &[1], 1);
            d.start_load("r", &ticket, &[1], &[1], 1, LONG);
            let Outcome::Failed(Failure::Refused(reason)) = &d.wait_ends("r")[0] else {
                panic!("not refused")
            };
            assert_eq!(*reason, PeerError::Version { theirs, ours }.to_string());
            assert_eq!(d.ranks[0].touched(), 0);
            eventually("P has counted it", || p.counter("connections_turned_away") > 0);
            assert_eq!(p.scheduler.status().leases.len(), 1, "nobody has taken it away");
            let near = of_version("near", 1, theirs);
            near.start_load("r", &ticket, &[1], &[1], 1, LONG);
            assert_eq!(near.wait_ends("r"), [Outcome::Done]);
        }
    }
}

/// What operators ask is refused by name, too.
#[test]
fn a_status_is_not_asked_of_a_version_too_far_away() {
    let (ours, theirs) =
        (Version::CURRENT, version(Version::CURRENT.major, Version::CURRENT.minor + 2));
    let p = of_version("p", 1, theirs);
    let answer = ask_status(p.scheduler.address(), &Trust::Loopback, LONG).unwrap_err();
    assert_eq!(answer, PeerError::Version { theirs, ours });
}

#[test]
fn what_does_not_fit_is_refused_before_the_first_byte() {
    let mut other = Recipe::new("p", 1);
    other.model = "another";
    let (p, d) = (other.start(), Recipe::new("d", 1).start());
    let ticket = p.grant("r", &[1], 1);
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
    let ticket = p.grant("r", &[1], 1);
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
    let ticket = p.grant("r", &[1], 1);
    d.start_load("r", &ticket, &[1], &[BLOCKS + 5], 1, LONG);
    let ending = d.ranks[0].wait_end("r");
    assert!(matches!(ending.outcome, Outcome::Failed(Failure::BadRequest(_))), "{ending:?}");
    assert!(!ending.quarantined);
    assert_eq!(p.wait_released().why, Ended::Abandoned);
    hand_over(&p, &d);
}

#[test]
fn a_request_that_waits_is_kept_alive() {
    let term = Duration::from_secs(8);
    let p = Recipe::new("p", 1).term(term).start();
    let d = Recipe::new("d", 1).start();
    let (source, destination) = (blocks_for(4, 3), blocks_for(4, 9));
    p.prefill(1, &source, 4);
    let kept = p.grant("kept", &source, 4);
    p.grant("left", &[1], 4);
    d.scheduler.hold(&kept, LONG);
    let released = p.wait_released();
    assert_eq!((released.request.as_str(), released.why), ("left", Ended::Expired));
    std::thread::sleep(term);
    assert_eq!(p.scheduler.released(), [], "the heartbeat keeps the other");
    assert_eq!(d.scheduler.lost(), []);
    d.start_load("kept", &kept, &source, &destination, 4, LONG);
    assert_eq!(d.wait_ends("kept"), [Outcome::Done]);
    d.scheduler.settle(&kept);
    assert_eq!(p.wait_released().why, Ended::Confirmed);
}

#[test]
fn a_request_waits_only_as_long_as_it_may() {
    let (term, patience) = (Duration::from_secs(8), Duration::from_secs(9));
    let p = Recipe::new("p", 1).term(term).start();
    let d = Recipe::new("d", 1).start();
    let ticket = p.grant("r", &[1], 4);
    d.scheduler.hold(&ticket, patience);
    let released = p.wait_released();
    assert_eq!(released.why, Ended::Expired);
    assert!(released.after > patience, "kept alive until then: {released:?}");
    assert_eq!(
        d.scheduler.lost(),
        [Lost { ticket: Some(ticket), follows: None, why: LostWhy::Patience }]
    );
}

/// Engines name their requests by themselves: what becomes of one says nothing of another's.
#[test]
fn two_engines_may_give_the_same_name() {
    let term = Duration::from_secs(6);
    let first = Recipe::new("first", 1).term(term).start();
    let second = Recipe::new("second", 1).term(term).start();
    let d = Recipe::new("d", 1).start();
    let ticket = first.grant("r", &[1], 4);
    let other = second.grant("r", &[1], 4);
    d.scheduler.hold(&ticket, LONG);
    d.scheduler.hold(&other, LONG);
    d.scheduler.reading(&other);
    let holds = d.scheduler.status().holds;
    let holds: Vec<_> = holds.iter().map(|h| (h.engine.as_str(), h.reading)).collect();
    assert_eq!(holds, [("first", false), ("second", true)]);
    std::thread::sleep(term * 3 / 2);
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
        lost.iter().filter_map(|one| one.ticket.as_ref()).eq([&other])
    });
}

#[test]
fn an_abandoned_request_is_released_at_once() {
    let p = Recipe::new("p", 1).term(LONG).start();
    let d = Recipe::new("d", 1).start();
    let ticket = p.grant("r", &[1], 4);
    d.scheduler.hold(&ticket, LONG);
    d.scheduler.abandon(&ticket);
    assert_eq!(p.wait_released().why, Ended::Abandoned);
}

#[test]
fn a_status_says_who_is_there_and_what_is_kept() {
    let p = Recipe::new("p", 2).start();
    let d = Recipe::new("d", 1).start();
    hand_over(&p, &d);
    let ticket = p.grant("waiting", &[1], 4);
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
    let ticket = p.grant("r", &source, 4);
    d.scheduler.hold(&ticket, Duration::MAX);
    d.start_load("r", &ticket, &source, &destination, 4, Duration::MAX);
    assert_eq!(d.wait_ends("r"), [Outcome::Done]);
    assert_eq!(p.wait_released().why, Ended::Confirmed);
}

/// Whoever looks does not get in the way of who works, and sees no more than there is.
#[test]
fn a_status_can_be_asked_for_at_any_time() {
    const ROUNDS: u64 = 2000;
    let p = Recipe::new("p", 1).start();
    let (start, working) = (Barrier::new(2), AtomicBool::new(true));
    let until = Instant::now() + LONG;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            start.wait();
            while working.load(Ordering::SeqCst) && Instant::now() < until {
                assert!(p.scheduler.status().leases.len() <= 1);
                p.scheduler.metrics();
            }
        });
        start.wait();
        for round in 0..ROUNDS {
            let name = format!("r{round}");
            p.grant(&name, &[1], 4);
            assert!(p.scheduler.revoke(&name));
        }
        working.store(false, Ordering::SeqCst);
    });
    assert!(Instant::now() < until, "they kept each other waiting");
    assert_eq!((p.counter("leases_granted"), p.counter("leases_revoked")), (ROUNDS, ROUNDS));
    assert_eq!(p.scheduler.released().len() as u64, ROUNDS);
    assert_eq!(p.scheduler.status().leases, []);
}

/// Whoever shares an agent can end the waits of the others.
#[test]
fn nobody_waits_for_an_agent_that_is_given_up() {
    let p = Recipe::new("p", 1).start();
    let began = Instant::now();
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| p.ranks[0].worker.wait(began + LONG));
        let scheduler = scope.spawn(|| p.scheduler.wait_released(began + LONG));
        p.ranks[0].worker.end_waits();
        p.scheduler.end_waits();
        assert_eq!(worker.join().unwrap(), []);
        assert_eq!(scheduler.join().unwrap(), []);
    });
    assert!(began.elapsed() < LONG);
}

/// All replicas carry, but none is missed that others can stand in for, whichever cannot be connected to and however
/// many ranks share them.
#[test]
fn a_rank_that_cannot_be_connected_to_is_not_read_where_others_hold_the_same() {
    let refuses: [fn(u64) -> Option<Refusal>; 3] = [
        |rank| (rank == 0).then_some(Refusal::Unable),
        |rank| (rank == 2).then_some(Refusal::Gone),
        |rank| (rank != 1).then_some(Refusal::Unable),
    ];
    for (refuses, ranks) in refuses.into_iter().flat_map(|one| [(one, 1), (one, 2), (one, 4)]) {
        let mut p = Recipe::new("p", 3).by(By::Held);
        (p.replicated, p.refuses) = (true, refuses);
        let (p, d) = (p.start(), Recipe::new("d", ranks).by(By::Held).start());
        let (tokens, source, destination) = (2 * TOKENS_PER_BLOCK, [3, 6], [9, 5]);
        p.prefill(1, &source, tokens);
        let mut attempts = vec![];
        for name in ["first", "second"] {
            let ticket = p.grant(name, &source, tokens);
            d.start_load(name, &ticket, &source, &destination, tokens, LONG);
            for rank in &d.ranks {
                let read = rank.held.as_ref().unwrap().next();
                read.land(0, read.copies.len());
                read.finish();
                assert_eq!(rank.wait_end(name).outcome, Outcome::Done);
                assert_eq!(rank.wrong(1, &destination, tokens), 0);
                attempts.push(rank.held.as_ref().unwrap().attempts());
            }
        }
        let (first, second) = attempts.split_at(d.ranks.len());
        assert_eq!(first, second, "who is known is not connected to again");
    }
}

/// What nobody else holds is refused, with the cause; where that does not change by itself, it is not tried for each
/// request.
#[test]
fn a_rank_that_cannot_be_connected_to_is_named_where_no_other_holds_the_same() {
    for refusal in [Refusal::Unable, Refusal::Gone] {
        let mut p = Recipe::new("p", 2).by(By::Held);
        p.refuses = match refusal {
            Refusal::Unable => |rank| (rank == 1).then_some(Refusal::Unable),
            Refusal::Gone => |rank| (rank == 1).then_some(Refusal::Gone),
        };
        let (p, d) = (p.start(), Recipe::new("d", 1).by(By::Held).start());
        let ticket = p.grant("r", &[3], 4);
        d.start_load("r", &ticket, &[3], &[9], 4, LONG);
        let outcome = d.wait_ends("r").remove(0);
        let (reason, cause) = match (&outcome, refusal) {
            (Outcome::Failed(Failure::Refused(reason)), Refusal::Unable) => {
                (reason, "its handle cannot be opened")
            }
            (Outcome::Failed(Failure::PeerGone(reason)), Refusal::Gone) => {
                (reason, "connection refused")
            }
            _ => panic!("{refusal:?}: {outcome:?}"),
        };
        assert!(reason.contains("rank 1: ") && reason.contains(cause), "{reason}");
        assert!(reason.contains("no other rank"), "{reason}");
        let held = d.ranks[0].held.as_ref().unwrap();
        eventually("nothing is left open", || held.connections() == 0);
    }
}
