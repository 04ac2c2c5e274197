//! However a request is read, the same bytes arrive, under the same rules.

use std::time::{Duration, Instant};

use crate::common::faulty::Fault;
use crate::common::{
    By, Engine, Recipe, TOKENS_PER_BLOCK, blocks_for, granted, load, quiet_address,
};
use kvferry_agent::lease::Ended;
use kvferry_agent::{Choice, Failure, Outcome, Way};

/// A number among a rank's metrics.
fn metric(engine: &Engine, rank: usize, name: &str) -> u64 {
    let text = engine.ranks[rank].worker.metrics();
    let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")));
    let line = line.unwrap_or_else(|| panic!("{name} is not in\n{text}"));
    line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64
}

fn packed_for_peers(engine: &Engine) -> u64 {
    (0..engine.ranks.len()).map(|rank| metric(engine, rank, "kvferry_packed_total")).sum()
}

/// The source gives a buffer back when the last of it is on its way, which the reader may know first.
fn wait_until_nothing_is_staged(engine: &Engine, rank: usize) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while metric(engine, rank, "kvferry_staging_used_bytes") != 0 {
        assert!(Instant::now() < deadline, "staging is kept");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn reading(choice: Choice, tp: u64, by: By) -> Engine {
    let mut recipe = Recipe::new("d", tp).by(by);
    recipe.worker.lowering = choice;
    recipe.start()
}

#[test]
fn every_lowering_brings_the_same_bytes() {
    let ways = Way::ALL.map(Choice::Only);
    for choice in ways.into_iter().chain([Choice::Auto]) {
        for (by, from, to) in [(By::Tcp, 2, 1), (By::Tcp, 1, 4), (By::Tcp, 4, 2), (By::Local, 2, 1)]
        {
            let (p, d) = (Recipe::new("p", from).by(by).start(), reading(choice, to, by));
            let outcomes = p.hand_over(&d, "r", 22, p.scheduler.address());
            assert_eq!(outcomes, vec![Outcome::Done; to as usize], "{choice:?}");
            assert_eq!(p.wait_released().why, Ended::Confirmed);
            let packed: u64 = (0..to as usize)
                .map(|rank| metric(&d, rank, "kvferry_read_packed_bytes_total"))
                .sum();
            let bytes: u64 =
                (0..to as usize).map(|rank| metric(&d, rank, "kvferry_read_bytes_total")).sum();
            match choice {
                Choice::Only(Way::Packed) => {
                    assert_eq!(packed, bytes, "all of it was packed");
                    // Beside what was packed to measure by.
                    assert!(packed_for_peers(&p) > 0);
                }
                Choice::Auto => {}
                _ => assert_eq!(packed, 0, "{choice:?}"),
            }
            for rank in 0..p.ranks.len() {
                wait_until_nothing_is_staged(&p, rank);
            }
        }
    }
}

/// What was to be packed and came otherwise is not counted as packed.
#[test]
fn what_the_source_did_not_pack_is_not_counted_as_packed() {
    let p = Recipe::new("p", 1).start();
    let mut d = Recipe::new("d", 1);
    d.worker.lowering = Choice::Only(Way::Packed);
    d.faulty = true;
    *d.switch.lock().unwrap() = Some(Fault::Unpacked);
    let d = d.start();
    assert_eq!(p.hand_over(&d, "r", 22, p.scheduler.address()), [Outcome::Done]);
    assert!(metric(&d, 0, "kvferry_read_bytes_total") > 0);
    assert_eq!(metric(&d, 0, "kvferry_read_packed_bytes_total"), 0);
}

/// A source that is gone while it packs is gone as it is while it is read: the request fails in time,
/// and the blocks come back.
#[test]
fn a_source_that_dies_while_it_packs_fails_the_request() {
    let p = Recipe::new("p", 1).at(quiet_address()).start();
    let d = reading(Choice::Only(Way::Packed), 1, By::Tcp);
    // Once, so that they know each other.
    let outcomes = p.hand_over(&d, "first", 22, p.scheduler.address());
    assert_eq!(outcomes, [Outcome::Done]);
    let tokens = 10 * TOKENS_PER_BLOCK;
    let (source, destination) = (blocks_for(tokens, 3), blocks_for(tokens, 9));
    let ticket = p.grant("r", &source, tokens);
    drop(p);
    let load = load("r", &ticket, granted(&source, tokens), &destination);
    d.load(&load.within(Duration::from_secs(20), Duration::from_secs(3)));
    let outcome = d.wait_ends("r").remove(0);
    assert!(
        matches!(outcome, Outcome::Failed(Failure::PeerGone(_) | Failure::Deadline { .. })),
        "{outcome:?}"
    );
}
