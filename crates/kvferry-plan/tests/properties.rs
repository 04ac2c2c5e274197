//! Random pairs of engines, judged byte for byte.
//!
//! `KVFERRY_PROPERTY_CASES=100000` draws more pairs; `KVFERRY_PROPERTY_SEED=17` prints and repeats one;
//! `cargo run -p kvferry-testkit --example hunt` finds the smallest pair that fails.

use std::env;

use kvferry_testkit::drive::{Drawn, Outcome};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// Pairs drawn in a normal run.
const CASES: u32 = 2400;

#[test]
fn any_source_fills_any_destination_or_is_refused() {
    if let Ok(seed) = env::var("KVFERRY_PROPERTY_SEED") {
        let seed = seed.parse().expect("KVFERRY_PROPERTY_SEED is a number");
        let drawn = Drawn::new(seed);
        println!("{drawn}");
        drawn.judge(3).unwrap_or_else(|problem| panic!("{problem}"));
        return;
    }
    let cases = match env::var("KVFERRY_PROPERTY_CASES") {
        Ok(cases) => cases.parse().expect("KVFERRY_PROPERTY_CASES is a number"),
        Err(_) => CASES,
    };
    // A smaller seed is not a smaller case: there is nothing to shrink and nothing to keep.
    let config = ProptestConfig {
        cases,
        max_shrink_iters: 0,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let mut total = Outcome::default();
    let sum = std::cell::RefCell::new(&mut total);
    let verdict = TestRunner::new(config).run(&any::<u64>(), |seed| {
        let outcome = Drawn::new(seed).judge(3).map_err(TestCaseError::fail)?;
        let mut sum = sum.borrow_mut();
        sum.fitting += outcome.fitting;
        sum.refused += outcome.refused;
        sum.windowed += outcome.windowed;
        sum.transfers += outcome.transfers;
        sum.tally.bytes += outcome.tally.bytes;
        sum.tally.copies += outcome.tally.copies;
        sum.tally.fewest += outcome.tally.fewest;
        Ok(())
    });
    if let Err(problem) = verdict {
        panic!("{problem}");
    }
    println!("{total:?}");
    // The plan's own order costs next to nothing against the order of the destination's addresses: half a
    // percent mostly, and up to one and a half, as the pairs are drawn.
    let (copies, fewest) = (total.tally.copies, total.tally.fewest);
    assert!(copies - fewest <= copies / 33, "{copies} copies, {fewest} are enough");
    let cases = u64::from(cases);
    assert!(total.fitting > cases && total.refused > 0, "{total:?}");
    assert!(total.windowed > cases / 50, "{total:?}");
    assert!(total.transfers > 3 * cases && total.tally.bytes > 100 * cases, "{total:?}");
}
