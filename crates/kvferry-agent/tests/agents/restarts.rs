//! Engines that restart, come back with other memory, or were never there.

use std::time::Duration;

use crate::common::memory::UNTOUCHED;
use crate::common::*;
use kvferry_agent::{Ended, Failure, Outcome};

/// A peer restarts under the same name and address, with other memory: its old memory is never read
/// again, requests of its old life fail, and those of its new life work.
#[test]
fn pain_17_a_restarted_peer_is_noticed() {
    for by in [By::Tcp, By::Local] {
        let address = quiet_address();
        let p = Recipe::new("p", 2).by(by).at(address).start();
        let d = Recipe::new("d", 1).by(by).start();
        let (source, destination) = (blocks_for(8, 3), blocks_for(8, 9));
        p.prefill(1, &source, 8);
        let ticket = p.grant("r1", &source, 8);
        d.start_load("r1", &ticket, &source, &destination, 8, LONG);
        assert_eq!(d.wait_ends("r1"), [Outcome::Done]);
        let old = p.grant("old", &source, 8);
        // Its memory stays mapped in this process: the danger is that it could still be read.
        drop(p);

        let p = Recipe::new("p", 2).by(by).at(address).start();
        p.prefill(2, &source, 8);
        let new = p.grant("new", &source, 8);
        assert_eq!(new.address, old.address);
        d.ranks[0].memory.fill(UNTOUCHED);
        d.start_load("old", &old, &source, &destination, 8, LONG);
        let outcome = d.wait_ends("old").remove(0);
        // Both transports know that who was there is gone, though the memory can still be read; or D has
        // noticed by itself and met the new one.
        assert!(
            matches!(outcome, Outcome::Failed(Failure::PeerGone(_) | Failure::Restarted)),
            "{outcome:?}"
        );
        for name in ["new", "newer"] {
            let ticket = match name {
                "new" => new.clone(),
                _ => p.grant(name, &source, 8),
            };
            d.start_load(name, &ticket, &source, &destination, 8, LONG);
            assert_eq!(d.wait_ends(name), [Outcome::Done]);
            assert_eq!(d.ranks[0].wrong(2, &destination, 8), 0);
        }
        d.start_load("old again", &old, &source, &destination, 8, LONG);
        assert_eq!(d.wait_ends("old again"), [Outcome::Failed(Failure::Restarted)]);
    }
}

/// The ranks of a running engine come back with other memory: a new life, though the scheduler lived
/// on. Leases of the life before end, and its addresses are not read.
#[test]
fn pain_17_ranks_that_lost_their_memory_begin_a_new_life() {
    let (mut p, d) = (Recipe::new("p", 2).start(), Recipe::new("d", 1).start());
    let (source, destination) = (blocks_for(8, 3), blocks_for(8, 9));
    p.prefill(1, &source, 8);
    let first = p.grant("first", &source, 8);
    d.start_load("first", &first, &source, &destination, 8, LONG);
    assert_eq!(d.wait_ends("first"), [Outcome::Done]);
    assert_eq!(p.wait_released().why, Ended::Confirmed);
    let old = p.grant("old", &source, 8);

    let mut fresh = Recipe::new("p", 2).start();
    std::mem::swap(&mut p.ranks, &mut fresh.ranks);
    drop(fresh);
    p.publish();
    assert_eq!(p.wait_released().why, Ended::Revoked);
    p.publish();
    p.prefill(2, &source, 8);
    let new = p.grant("new", &source, 8);
    assert_ne!(new.incarnation, old.incarnation);
    d.start_load("new", &new, &source, &destination, 8, LONG);
    assert_eq!(d.wait_ends("new"), [Outcome::Done]);
    assert_eq!(d.ranks[0].wrong(2, &destination, 8), 0);
    d.start_load("old", &old, &source, &destination, 8, LONG);
    assert_eq!(d.wait_ends("old"), [Outcome::Failed(Failure::Restarted)]);
}

/// A peer that was never there: the request fails within the handshake's time, and is forgotten.
#[test]
fn a_peer_that_is_gone_is_reported_in_time() {
    let p = Recipe::new("p", 1).at(quiet_address()).start();
    let ticket = p.grant("r", &[1], 4);
    drop(p);
    let mut d = Recipe::new("d", 1);
    d.worker.handshake = Duration::from_millis(300);
    let d = d.start();
    d.start_load("r", &ticket, &[1], &[1], 4, LONG);
    let outcome = d.wait_ends("r").remove(0);
    assert!(matches!(outcome, Outcome::Failed(Failure::PeerGone(_))), "{outcome:?}");
}
