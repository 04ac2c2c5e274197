//! Tickets of clients that name lives of an engine that it never had.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvferry_agent::{Failure, Incarnation, Notice, Outcome, Ticket, Worker};

use crate::common::*;

/// How loads have ended, by name.
#[derive(Default)]
struct Ends(HashMap<String, Outcome>);

impl Ends {
    fn wait(&mut self, worker: &Worker, name: &str) -> Outcome {
        let until = Instant::now() + LONG;
        while !self.0.contains_key(name) {
            assert!(Instant::now() < until, "'{name}' never ended");
            for notice in worker.wait(until) {
                if let Notice::Ended(ending) = notice {
                    self.0.insert(ending.request, ending.outcome);
                }
            }
        }
        self.0[name].clone()
    }
}

/// The same with another life.
fn forged(ticket: &Ticket, life: u64) -> Ticket {
    Ticket { incarnation: Incarnation(life), ..ticket.clone() }
}

/// Two hundred a second, for as long as others are read.
fn forge(d: &Engine, ticket: &Ticket, blocks: &[u32], stop: &AtomicBool) -> u64 {
    let mut forgeries = 0;
    while !stop.load(Ordering::SeqCst) {
        let name = format!("forged {forgeries}");
        forgeries += 1;
        d.start_load(&name, &forged(ticket, forgeries), blocks, blocks, 8, LONG);
        thread::sleep(Duration::from_millis(5));
    }
    forgeries
}

#[test]
fn lives_that_clients_make_up_fail_nobody_else() {
    let mut p = Recipe::new("p", 1).start();
    let d = Recipe::new("d", 1).start();
    let (source, destination) = (blocks_for(8, 3), blocks_for(8, 9));
    p.prefill(1, &source, 8);
    let example = p.grant("example", &source, 8);
    let (stop, mut ends) = (AtomicBool::new(false), Ends::default());
    let worker = &d.ranks[0].worker;
    let forgeries = thread::scope(|scope| {
        let forger = scope.spawn(|| forge(&d, &example, &blocks_for(8, 20), &stop));
        for life in 0..2 {
            for n in 0..60 {
                let name = format!("{life} {n}");
                let ticket = p.grant(&name, &source, 8);
                d.start_load(&name, &ticket, &source, &destination, 8, LONG);
                assert_eq!(ends.wait(worker, &name), Outcome::Done, "{name}");
                assert_eq!(d.ranks[0].wrong(1 + life, &destination, 8), 0);
            }
            if life == 0 {
                // Its ranks come back with other memory, while its scheduler lives on: that is noticed.
                let mut fresh = Recipe::new("p", 1).start();
                std::mem::swap(&mut p.ranks, &mut fresh.ranks);
                p.publish();
                p.prefill(2, &source, 8);
            }
        }
        stop.store(true, Ordering::SeqCst);
        forger.join().unwrap()
    });
    let refused = Outcome::Failed(Failure::Restarted);
    for forgery in 0..forgeries {
        assert_eq!(ends.wait(worker, &format!("forged {forgery}")), refused, "{forgery}");
    }
    let metrics = worker.metrics();
    let handshakes = metrics.lines().find(|line| line.starts_with("kvferry_handshakes_total"));
    assert!(
        handshakes.is_some_and(|line| line.ends_with(" 2")),
        "one for each life: {handshakes:?}"
    );
}

/// However many there are, whoever is asked about them is asked once for all that wait, and nothing that is known is
/// let go of meanwhile.
#[test]
fn one_question_answers_for_all_lives_that_wait() {
    let p = Recipe::new("p", 1).by(By::Held).start();
    let d = Recipe::new("d", 1).by(By::Held).start();
    let held = d.ranks[0].held.as_ref().unwrap();
    let blocks = blocks_for(4, 3);
    let wire = Wire::to(p.scheduler.address());
    let mut ticket = p.grant("r", &blocks, 4);
    ticket.address = wire.address.clone();
    d.start_load("r", &ticket, &blocks, &blocks, 4, LONG);
    let read = held.next();
    let said = || wire.heard().iter().map(Vec::len).sum::<usize>();
    let before = said();
    for life in 0..500 {
        let name = format!("forged {life}");
        d.start_load(&name, &forged(&ticket, life), &blocks, &blocks, 4, LONG);
    }
    let (mut ends, worker) = (Ends::default(), &d.ranks[0].worker);
    for life in 0..500 {
        let refused = Outcome::Failed(Failure::Restarted);
        assert_eq!(ends.wait(worker, &format!("forged {life}")), refused);
    }
    // A question holds the manifest of this rank. (Nor is a lease given up that was never there.)
    let manifest = d.ranks[0].worker.card().unwrap().manifest.len();
    let questions = (said() - before) / manifest;
    assert!(questions < 100, "{questions} questions");
    assert_eq!(held.attempts(), 1, "never connected to anew");
    read.finish();
    assert_eq!(ends.wait(worker, "r"), Outcome::Done);
}
