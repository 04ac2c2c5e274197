//! The fuzz bodies of what strangers reach first, driven by seeded random and mutated bytes.

use kvferry_testkit::fuzz::mutate;
use kvferry_testkit::heap::{Counting, measure};
use kvferry_testkit::random::Dice;

use super::{connect, connections, decode_message, messages};

#[global_allocator]
static HEAP: Counting = Counting;

/// What a body may take for so many bytes: a claimed length costs at most the decoder's fixed reserve
/// for each level of nesting.
fn bound(bytes: &[u8]) -> i64 {
    64 * bytes.len() as i64 + (4 << 20)
}

fn draw(seeds: &[Vec<u8>], dice: &mut Dice) -> Vec<u8> {
    match dice.within(0, 9) {
        0 => (0..dice.within(0, 300)).map(|_| dice.any() as u8).collect(),
        1 => dice.pick(seeds),
        _ => mutate(&dice.pick(seeds), dice),
    }
}

#[test]
fn any_bytes_decode_to_a_message_that_encodes_again_or_to_an_error() {
    let seeds = messages();
    for (index, seed) in seeds.iter().enumerate() {
        assert!(decode_message(seed) >= 1, "seed {index} is not a message: {seed:?}");
    }
    let mut dice = Dice::new(5);
    let mut decoded = 0;
    for _ in 0..60_000 {
        let bytes = draw(&seeds, &mut dice);
        let (taken, heap) = measure(|| decode_message(&bytes));
        decoded += taken;
        assert!(heap.peak <= bound(&bytes), "{} bytes took {}", bytes.len(), heap.peak);
    }
    assert!(decoded > 10_000, "only {decoded} decoded: little was tried");
}

#[test]
fn any_connection_ends_in_proportion_to_what_it_said() {
    let seeds = connections();
    // Without a key each of the good ones is let in, and each question is answered.
    let outcomes: Vec<(bool, u64)> = seeds.iter().map(|seed| connect(seed)).collect();
    let talks = (0..=12).map(|questions| (true, questions));
    assert_eq!(outcomes, talks.chain([(false, 0); 2]).collect::<Vec<_>>());

    let mut dice = Dice::new(6);
    let (mut inside, mut answered) = (0, 0);
    for _ in 0..10_000 {
        let bytes = draw(&seeds, &mut dice);
        let ((entered, answers), heap) = measure(|| connect(&bytes));
        inside += u64::from(entered);
        answered += answers;
        assert!(heap.peak <= bound(&bytes), "{} bytes took {}", bytes.len(), heap.peak);
        assert!(answers <= bytes.len() as u64 / 6, "more answers than there can be questions");
    }
    assert!(inside > 2_000 && answered > 3_000, "{inside} let in, {answered} answered");
}

/// A length that is not there is not allocated for.
#[test]
fn a_claimed_length_costs_nothing() {
    let hello = &connections()[0];
    let claimed = [hello, &(8_u32 << 20).to_le_bytes()[..]].concat();
    let (outcome, heap) = measure(|| connect(&claimed));
    assert_eq!(outcome, (true, 0));
    assert!(heap.peak < 1 << 20, "it took {} bytes", heap.peak);
}
