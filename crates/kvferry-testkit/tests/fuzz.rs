//! The fuzz bodies, driven by seeded random and mutated bytes.

use kvferry_layout::Manifest;
use kvferry_testkit::fuzz::{
    decode_manifest, hostile_manifests, mutate, request_against_plan, seeds,
};
use kvferry_testkit::heap::{Counting, measure};
use kvferry_testkit::random::Dice;

#[global_allocator]
static HEAP: Counting = Counting;

fn random_bytes(dice: &mut Dice) -> Vec<u8> {
    (0..dice.within(0, 300)).map(|_| dice.any() as u8).collect()
}

#[test]
fn any_bytes_decode_to_a_manifest_or_an_error() {
    let seeds = seeds(20);
    let mut decoded = 0;
    let mut dice = Dice::new(1);
    for _ in 0..4000 {
        let bytes = match dice.within(0, 9) {
            0 => random_bytes(&mut dice),
            1 => [&b"KVFM\x02\x00"[..], &random_bytes(&mut dice)].concat(),
            _ => mutate(&dice.pick(&seeds), &mut dice),
        };
        decode_manifest(&bytes);
        decoded += u64::from(Manifest::from_bytes(&bytes).is_ok());
    }
    assert!(decoded > 10, "only {decoded} mutated manifests still decode: nothing was tried");
}

/// Decoding takes memory in proportion to the bytes, whatever lengths they claim. A claimed length
/// costs at most the decoder's fixed reserve for each level of nesting.
#[test]
fn decoding_takes_memory_in_proportion_to_the_bytes() {
    let seeds: Vec<Vec<u8>> =
        seeds(20).into_iter().filter(|bytes| bytes.starts_with(b"KVFM")).collect();
    let mut dice = Dice::new(2);
    for _ in 0..4000 {
        let bytes = mutate(&dice.pick(&seeds), &mut dice);
        let (_, heap) = measure(|| Manifest::from_bytes(&bytes).is_ok());
        let limit = 100 * bytes.len() as i64 + (8 << 20);
        assert!(heap.peak <= limit, "{} bytes took {} bytes", bytes.len(), heap.peak);
    }
}

#[test]
fn any_request_is_an_error_or_stays_in_bounds() {
    let (mut copies, mut served) = (0, 0);
    let mut dice = Dice::new(3);
    for _ in 0..20_000 {
        // Small numbers mostly: tokens and blocks that exist.
        let small = dice.chance(70);
        let mut bytes = random_bytes(&mut dice);
        if small {
            bytes.iter_mut().skip(3).for_each(|byte| *byte %= 12);
        }
        let yielded = request_against_plan(&bytes);
        copies += yielded;
        served += u64::from(yielded > 0);
    }
    assert!(served > 2000 && copies > 20_000, "{served} of 20000 requests were served");
}

#[test]
fn hostile_manifests_are_refused_or_stay_in_bounds() {
    let (mut plans, mut served) = (0, 0);
    let mut dice = Dice::new(4);
    for _ in 0..20_000 {
        let (plan, copies) = hostile_manifests(&random_bytes(&mut dice));
        plans += u64::from(plan);
        served += u64::from(copies > 0);
    }
    assert!(plans > 1000 && served > 200, "{plans} plans, {served} served");
}
