//! The worst day, step by step. The transport and the network do what each test says, so that every
//! danger is shown before it is shown to be averted.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::held::HeldRead;
use crate::common::*;
use kvferry_agent::{Ended, Failure, Loss, Notice, Outcome, Ticket};
use kvferry_transport::Error;

/// Decode aborts, its blocks are used for another request, and a late write corrupts that.
#[test]
fn pain_2_a_late_write_does_not_reach_another_request() {
    for obedient in [false, true] {
        let (p, d) = held_pair(1);
        let (source, destination) = (blocks_for(4, 3), blocks_for(4, 9));
        p.prefill(1, &source, 4);
        let ticket = p.grant("first", &source, 4);
        d.start_load("first", &ticket, &source, &destination, 4, LONG);
        let read = d.ranks[0].held.as_ref().unwrap().next();
        d.ranks[0].worker.abort("first");
        let ending = d.ranks[0].wait_end("first");
        assert_eq!(ending.outcome, Outcome::Aborted);
        assert!(ending.quarantined);
        eventually("it is cancelled", || read.cancelled.load(Ordering::SeqCst));
        let reuse = || d.prefill(2, &destination, 4);

        if !obedient {
            // The danger: the blocks go to another request at once, and the cancelled read lands.
            reuse();
            read.land(0, read.copies.len());
            assert_ne!(d.ranks[0].wrong(2, &destination, 4), 0);
            read.settle(Error::Cancelled);
            continue;
        }
        read.land(0, read.copies.len());
        assert_eq!(d.ranks[0].worker.notices(), [], "not while bytes may land");
        let metrics = d.ranks[0].worker.metrics();
        assert!(metrics.contains("kvferry_loads_quarantined{engine=\"d\",rank=\"0\"} 1"));
        read.settle(Error::Cancelled);
        let notices = d.ranks[0].worker.wait(Instant::now() + LONG);
        assert_eq!(notices, [Notice::Settled { request: "first".to_owned() }]);
        reuse();
        assert_eq!(d.ranks[0].wrong(2, &destination, 4), 0);
        assert_eq!(p.wait_released().why, Ended::Abandoned);
    }
}

/// Prefill never reports: decode's blocks come back all the same, whatever P was doing when it fell
/// silent.
#[test]
fn pain_14_decode_blocks_come_back_when_prefill_falls_silent() {
    for silent_from in ["handshake", "confirmation"] {
        let (p, d) = held_pair(1);
        let wire = Wire::to(p.scheduler.address());
        let (source, destination) = (blocks_for(4, 3), blocks_for(4, 9));
        p.prefill(1, &source, 4);
        let mut ticket = p.grant("r", &source, 4);
        ticket.address = wire.address.clone();
        if silent_from == "handshake" {
            wire.stop();
        }
        d.start_load("r", &ticket, &source, &destination, 4, Duration::from_secs(8));
        if silent_from == "confirmation" {
            let read = d.ranks[0].held.as_ref().unwrap().next();
            wire.stop();
            read.land(0, read.copies.len());
            read.finish();
        }
        let ending = d.ranks[0].wait_end("r");
        let stage = match silent_from {
            "handshake" => "shaking hands",
            _ => {
                // The danger: every byte is right, and nobody can know it.
                assert_eq!(d.ranks[0].wrong(1, &destination, 4), 0);
                "confirming"
            }
        };
        let late = Failure::Deadline { stage: stage.to_owned() };
        assert_eq!(ending.outcome, Outcome::Failed(late));
        assert!(!ending.quarantined);
        assert_eq!(d.ranks[0].worker.loads(), []);
    }
}

/// Prefill's blocks are stranded after an abort: told, it has them back at once; not told, within the
/// lease.
#[test]
fn pain_15_prefill_blocks_come_back_after_an_abort() {
    for told in [true, false] {
        let term = if told { LONG * 10 } else { Duration::from_millis(300) };
        let p = Recipe::new("p", 1).by(By::Held).term(term).start();
        let d = Recipe::new("d", 1).by(By::Held).start();
        let wire = Wire::to(p.scheduler.address());
        let blocks = blocks_for(4, 3);
        let mut ticket = p.grant("r", &blocks, 4);
        ticket.address = wire.address.clone();
        d.scheduler.hold(&ticket, LONG);
        d.start_load("r", &ticket, &blocks, &blocks, 4, LONG);
        let read = d.ranks[0].held.as_ref().unwrap().next();
        if !told {
            wire.stop();
        }
        d.ranks[0].worker.abort("r");
        d.scheduler.abandon(&ticket);
        let why = p.wait_released().why;
        assert_eq!(why, if told { Ended::Abandoned } else { Ended::Expired });
        read.settle(Error::Cancelled);
    }
}

/// One of several source ranks fails: the request fails at once instead of waiting for a count that
/// is never reached, and nothing that the other brought is used.
#[test]
fn pain_16_half_a_transfer_fails_as_a_whole() {
    let (p, d) = held_pair(2);
    let (source, destination) = (blocks_for(4, 3), blocks_for(4, 9));
    p.prefill(1, &source, 4);
    let ticket = p.grant("r", &source, 4);
    d.start_load("r", &ticket, &source, &destination, 4, LONG);
    let held = d.ranks[0].held.as_ref().unwrap();
    let (first, second) = (held.next(), held.next());
    first.land(0, first.copies.len());
    first.finish();
    second.settle(Error::PeerLost("killed".to_owned()));
    let ending = d.ranks[0].wait_end("r");
    assert!(matches!(ending.outcome, Outcome::Failed(Failure::PeerGone(_))), "{ending:?}");
    assert_eq!(p.wait_released().why, Ended::Abandoned, "the other ranks' part is not awaited");
}

/// Some of D's ranks confirm, again and again; one is still reading: P keeps the blocks.
#[test]
fn pain_16_ranks_are_counted_by_name() {
    let p = Recipe::new("p", 1).by(By::Held).start();
    let d = Recipe::new("d", 4).by(By::Held).start();
    let (source, destination) = (blocks_for(4, 3), blocks_for(4, 9));
    p.prefill(1, &source, 4);
    let ticket = p.grant("r", &source, 4);
    d.start_load("r", &ticket, &source, &destination, 4, LONG);
    for rank in &d.ranks[..3] {
        let read = rank.held.as_ref().unwrap().next();
        read.land(0, read.copies.len());
        read.finish();
        assert_eq!(rank.wait_end("r").outcome, Outcome::Done);
    }
    // The first rank reads and confirms once more: four confirmations, but three ranks.
    let again = load("r", &ticket, granted(&source, 4), &destination);
    d.ranks[0].worker.load(again).unwrap();
    let again = d.ranks[0].held.as_ref().unwrap().next();
    again.land(0, again.copies.len());
    again.finish();
    assert_eq!(d.ranks[0].wait_end("r").outcome, Outcome::Done);
    assert_eq!(p.scheduler.released(), []);
    assert_eq!(p.scheduler.status().leases[0].confirmed, 3);
    let last = d.ranks[3].held.as_ref().unwrap().next();
    last.land(0, last.copies.len());
    last.finish();
    assert_eq!(d.ranks[3].wait_end("r").outcome, Outcome::Done);
    assert_eq!(p.wait_released().why, Ended::Confirmed);
}

/// The lease expires in mid-read, and P uses the blocks for something else: all bytes arrive, some of
/// them of another request, and none is used.
#[test]
fn pain_18_a_lease_that_expires_in_mid_read_fences_the_bytes() {
    let p = Recipe::new("p", 1).by(By::Held).term(Duration::from_millis(100)).start();
    let d = Recipe::new("d", 1).by(By::Held).start();
    let (source, destination) = ([3, 5, 7], [9, 11, 13]);
    p.prefill(1, &source, 12);
    let ticket = p.grant("r", &source, 12);
    d.start_load("r", &ticket, &source, &destination, 12, LONG);
    let read = d.ranks[0].held.as_ref().unwrap().next();
    assert!(read.copies.len() > 1);
    read.land(0, 1);
    assert_eq!(p.wait_released().why, Ended::Expired);
    p.prefill(2, &source, 12);
    read.land(1, read.copies.len());
    read.finish();
    // The danger: by its own account the transport has delivered every byte.
    assert_ne!(d.ranks[0].wrong(1, &destination, 12), 0);
    let ending = d.ranks[0].wait_end("r");
    // Another term later, P has forgotten that there was a lease.
    assert!(
        matches!(ending.outcome, Outcome::Expired(Loss::Ended(Ended::Expired) | Loss::Unknown)),
        "{ending:?}"
    );
    assert!(!ending.quarantined);
}

/// The answer to a confirmation is lost with its connection: asked again, P remembers.
#[test]
fn a_lost_answer_is_asked_for_again() {
    let (p, d) = held_pair(1);
    let wire = Wire::to(p.scheduler.address());
    let (source, destination) = (blocks_for(4, 3), blocks_for(4, 9));
    p.prefill(1, &source, 4);
    let mut ticket = p.grant("r", &source, 4);
    ticket.address = wire.address.clone();
    d.start_load("r", &ticket, &source, &destination, 4, LONG);
    let read = d.ranks[0].held.as_ref().unwrap().next();
    // Nothing passes; the question waits in the wire and is lost there.
    wire.stop();
    read.land(0, read.copies.len());
    read.finish();
    eventually("it asks", || d.ranks[0].worker.loads() == [("r".to_owned(), "confirming")]);
    wire.cut();
    wire.go();
    let ending = d.ranks[0].wait_end("r");
    assert_eq!(ending.outcome, Outcome::Done);
    assert_eq!(p.wait_released().why, Ended::Confirmed);
}

/// A request is aborted at every stage.
#[test]
fn an_abort_at_every_stage() {
    for stage in ["waiting", "shaking hands", "reading", "confirming"] {
        let p = Recipe::new("p", 1).by(By::Held).start();
        let mut d = Recipe::new("d", 1).by(By::Held);
        d.worker.concurrent = 1;
        let d = d.start();
        let wire = Wire::to(p.scheduler.address());
        let blocks = blocks_for(4, 3);
        let load = |name: &str| {
            let mut ticket = p.grant(name, &blocks, 4);
            ticket.address = wire.address.clone();
            d.start_load(name, &ticket, &blocks, &blocks, 4, LONG);
        };
        let held = d.ranks[0].held.as_ref().unwrap();
        let mut read = None;
        match stage {
            "waiting" => {
                load("before");
                read = Some(held.next());
            }
            "shaking hands" => wire.stop(),
            _ => {}
        }
        load("r");
        match stage {
            "reading" => read = Some(held.next()),
            "confirming" => {
                let read = held.next();
                wire.stop();
                read.finish();
            }
            _ => {}
        }
        eventually(stage, || {
            d.ranks[0].worker.loads().iter().any(|(name, at)| name == "r" && *at == stage)
        });
        d.ranks[0].worker.abort("r");
        let ending = d.ranks[0].wait_end("r");
        assert_eq!(ending.outcome, Outcome::Aborted, "{stage}");
        assert_eq!(ending.quarantined, stage == "reading");
        if let Some(read) = read {
            read.settle(Error::Cancelled);
        }
    }
}

/// The engine that holds the blocks takes them back: the reader hears of it.
#[test]
fn an_abort_from_the_other_side() {
    let p = Recipe::new("p", 1).by(By::Held).term(Duration::from_secs(12)).start();
    let d = Recipe::new("d", 1).by(By::Held).start();
    let blocks = blocks_for(4, 3);
    let reading = p.grant("reading", &blocks, 4);
    let waiting = p.grant("waiting", &blocks, 4);
    d.scheduler.hold(&waiting, LONG);
    d.scheduler.hold(&reading, LONG);
    d.start_load("reading", &reading, &blocks, &blocks, 4, LONG);
    let read = d.ranks[0].held.as_ref().unwrap().next();
    assert!(p.scheduler.revoke("reading"));
    assert!(p.scheduler.revoke("waiting"));
    read.finish();
    let outcome = d.wait_ends("reading").remove(0);
    assert_eq!(outcome, Outcome::Expired(Loss::Ended(Ended::Revoked)));
    let lost = std::sync::Mutex::new(vec![]);
    eventually("both are lost", || {
        let mut lost = lost.lock().unwrap();
        lost.extend(d.scheduler.lost());
        lost.len() == 2
    });
}

/// Whoever has ended is let go of, without anybody asking for it again; but not while something is read from it.
#[test]
fn who_has_ended_is_let_go() {
    // D tries for a term to tell P that it gives its lease up.
    let p = Recipe::new("p", 2).by(By::Held).term(Duration::from_secs(5));
    let p = p.at(quiet_address()).start();
    let d = Recipe::new("d", 1).by(By::Held).start();
    let held = d.ranks[0].held.clone().unwrap();
    p.prefill(1, &[3], 4);
    let ticket = p.grant("r", &[3], 4);
    d.start_load("r", &ticket, &[3], &[9], 4, Duration::from_secs(20));
    let reads = [held.next(), held.next()];
    assert_eq!(held.connections(), 2);
    drop(p);
    thread::sleep(Duration::from_secs(3));
    assert_eq!(held.connections(), 2, "it is being read");
    for read in &reads {
        read.land(0, read.copies.len());
        read.finish();
    }
    let outcome = d.ranks[0].wait_end("r").outcome;
    assert!(matches!(outcome, Outcome::Failed(Failure::Deadline { .. })), "{outcome:?}");
    eventually("it is let go", || held.connections() == 0);
}

/// Reads that do not end while nothing else comes from an engine, either: its connection is given up, although nobody
/// has said that it is dead, and the next load makes another. One that is late beside others is only late.
#[test]
fn a_silent_connection_is_given_up() {
    let (p, d) = held_pair(1);
    let held = d.ranks[0].held.clone().unwrap();
    p.prefill(1, &[3], 4);
    let begin = |name: &str, block: u32, deadline: Duration| {
        let ticket = p.grant(name, &[3], 4);
        d.start_load(name, &ticket, &[3], &[block], 4, deadline);
        held.next()
    };
    let is_done = |name: &str, read: &HeldRead| {
        read.land(0, read.copies.len());
        read.finish();
        assert_eq!(d.ranks[0].wait_end(name).outcome, Outcome::Done);
    };
    let is_late = |name: &str, read: &HeldRead| {
        let outcome = d.ranks[0].wait_end(name).outcome;
        assert!(matches!(outcome, Outcome::Failed(Failure::Deadline { .. })), "{outcome:?}");
        read.settle(Error::Cancelled);
        eventually("it is settled", || d.ranks[0].worker.loads().is_empty());
    };
    let late = begin("late", 9, Duration::from_secs(6));
    is_done("other", &begin("other", 10, LONG));
    is_late("late", &late);
    assert_eq!(held.connections(), 1);
    is_late("silent", &begin("silent", 9, Duration::from_secs(4)));
    eventually("the connection is given up", || held.connections() == 0);
    is_done("again", &begin("again", 9, LONG));
    assert_eq!(held.connections(), 1);
}

/// An engine that is known by two addresses, one of which is of no use any more, is still there.
#[test]
fn who_has_another_address_is_not_let_go() {
    let (p, d) = (Recipe::new("p", 1).start(), Recipe::new("d", 1).start());
    let wire = Wire::to(p.scheduler.address());
    for (number, address) in [&wire.address, p.scheduler.address()].into_iter().enumerate() {
        let name = format!("r{number}");
        p.prefill(1, &[3], 4);
        let ticket = Ticket { address: address.to_owned(), ..p.grant(&name, &[3], 4) };
        d.start_load(&name, &ticket, &[3], &[9], 4, LONG);
        assert_eq!(d.wait_ends(&name), [Outcome::Done]);
    }
    drop(wire);
    for number in 2..8 {
        thread::sleep(Duration::from_secs(1));
        let name = format!("r{number}");
        let ticket = p.grant(&name, &[3], 4);
        d.start_load(&name, &ticket, &[3], &[9], 4, LONG);
        assert_eq!(d.wait_ends(&name), [Outcome::Done], "{number}");
        assert_eq!(d.ranks[0].wrong(1, &[9], 4), 0);
    }
}

fn held_pair(tp: u64) -> (Engine, Engine) {
    (Recipe::new("p", tp).by(By::Held).start(), Recipe::new("d", 1).by(By::Held).start())
}
