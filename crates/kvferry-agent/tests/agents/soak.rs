//! Much work, under which nothing is lost, mixed up or left behind.

use std::time::{Duration, Instant};

use crate::common::*;
use kvferry_agent::{Ended, Following, Notice, Outcome};

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
        let ticket = p.grant(&name, &source, tokens);
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
                    let number: u64 = ending.request[1..].parse().unwrap();
                    match ending.outcome {
                        Outcome::Done => done += 1,
                        // An abort may come too late, but never without being asked for.
                        Outcome::Aborted if number.is_multiple_of(20) => aborted += 1,
                        other => panic!("{}: {other:?}", ending.request),
                    }
                }
                Notice::Settled { .. } => settled += 1,
            }
        }
    }
    assert_eq!(done + aborted, 1000);
    assert_eq!(d.ranks[0].wrong(7, &destination, tokens), 0);
    eventually("all blocks of P are back", || p.scheduler.status().leases.is_empty());
    assert_eq!(d.ranks[0].worker.loads(), []);
    let metrics = d.ranks[0].worker.metrics();
    let line =
        format!("kvferry_loads_ended_total{{engine=\"d\",rank=\"0\",outcome=\"done\"}} {done}");
    assert!(metrics.contains(&line), "{line}\n{metrics}");
}

/// The connection breaks at every moment; each time the request ends well or is reported.
#[test]
fn a_wire_that_breaks_all_the_time() {
    let (p, d) = (Recipe::new("p", 2).start(), Recipe::new("d", 2).start());
    let wire = Wire::to(p.scheduler.address());
    let (source, destination) = (blocks_for(8, 3), blocks_for(8, 9));
    p.prefill(1, &source, 8);
    for i in 0..60 {
        let name = format!("r{i}");
        let mut ticket = p.grant(&name, &source, 8);
        ticket.address = wire.address.clone();
        d.start_load(&name, &ticket, &source, &destination, 8, LONG);
        std::thread::sleep(Duration::from_micros(i * 50));
        wire.cut();
        for outcome in d.wait_ends(&name) {
            assert_eq!(outcome, Outcome::Done, "broken connections are opened again");
        }
        assert_eq!(p.wait_released().why, Ended::Confirmed);
    }
}

/// Bounded work, after which everything is where it was: descriptors, threads, memory.
#[test]
fn a_soak_leaves_nothing_behind() {
    if std::env::var_os("KVFERRY_SOAK_CHILD").is_none() {
        // In a process of its own: other tests' descriptors are not counted.
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["soak::a_soak_leaves_nothing_behind", "--exact", "--nocapture"])
            .env("KVFERRY_SOAK_CHILD", "1")
            .status();
        assert!(status.unwrap().success());
        return;
    }
    let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
    let resident = || {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    };
    let (p, d) = (Recipe::new("p", 2).start(), Recipe::new("d", 2).start());
    let (source, destination) = (blocks_for(8, 3), blocks_for(8, 9));
    p.prefill(1, &source, 8);
    let round = |from: u64, to: u64| {
        for i in from..to {
            let name = format!("r{i}");
            // Every third one is followed while it is computed, and some of these are started over.
            let followed = i % 3 == 0;
            let ticket = if followed {
                let ticket = p.scheduler.open(&name, Some(&name)).unwrap();
                let (engine, address) = (ticket.engine.clone(), ticket.address.clone());
                let following = Following::Name { engine, address, name: name.clone() };
                d.scheduler.follow(&name, following, LONG).unwrap();
                let all = load(&name, &ticket, granted(&source, 8), &destination);
                d.load(&all.granted(None));
                p.scheduler.advance(&name, 4, table(&source[..1])).unwrap();
                if i % 2 == 0 {
                    p.scheduler.restart(&name).unwrap();
                }
                p.grant(&name, &source, 8)
            } else {
                let ticket = p.grant(&name, &source, 8);
                d.scheduler.hold(&ticket, LONG);
                d.start_load(&name, &ticket, &source, &destination, 8, LONG);
                ticket
            };
            if i % 7 == 0 {
                d.ranks[0].worker.abort(&name);
            }
            for rank in &d.ranks {
                let mut waits = 1;
                while waits > 0 {
                    for notice in rank.worker.wait(Instant::now() + LONG) {
                        match notice {
                            Notice::Ended(ending) => waits -= i32::from(!ending.quarantined),
                            Notice::Settled { .. } => waits -= 1,
                        }
                    }
                }
            }
            if followed {
                d.scheduler.unfollow(&name);
            }
            d.scheduler.settle(&ticket);
            p.scheduler.released();
        }
    };
    round(0, 300);
    let before = (count("fd"), count("task"), resident());
    round(300, 3000);
    eventually("all leases have ended", || {
        let status = p.scheduler.status();
        status.leases.is_empty() && status.growing.is_empty()
    });
    assert_eq!(d.scheduler.status().holds, []);
    let after = (count("fd"), count("task"), resident());
    println!("descriptors, threads, bytes: {before:?}, then {after:?}");
    assert_eq!(after.0, before.0, "descriptors");
    assert!(after.1 <= before.1 + 4, "threads: {} and {}", before.1, after.1);
    assert!(after.2 < before.2 + (16 << 20), "memory: {} and {}", before.2, after.2);
    drop((p, d));
    eventually("all threads have ended", || count("task") <= 2);
    eventually("all descriptors are closed", || count("fd") <= before.0 / 2);
}
