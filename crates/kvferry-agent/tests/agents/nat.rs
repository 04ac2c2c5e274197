//! An engine whose ranks cannot be reached from within by the address that others are given.

use kvferry_agent::{Audit, Outcome};

use crate::common::*;

fn count(d: &Engine, name: &str) -> u64 {
    let counts = d.ranks[0].worker.counts();
    counts.into_iter().find(|(counter, _)| counter == name).unwrap().1
}

#[test]
fn ranks_are_asked_where_they_listen() {
    let mut p = Recipe::new("p", 2);
    // Nobody listens there.
    p.worker.advertise = Some("127.0.0.2".to_owned());
    let p = p.start();
    let d = Recipe::new("d", 1).audit(Audit::ALL).start();
    let (source, destination) = (blocks_for(8, 3), blocks_for(8, 9));
    p.prefill(1, &source, 8);
    let ticket = p.grant("r", &source, 8);
    d.start_load("r", &ticket, &source, &destination, 8, LONG);
    assert_eq!(d.wait_ends("r"), [Outcome::Done]);
    assert_eq!((count(&d, "audits_matched"), count(&d, "audits_unable")), (1, 0));
}
