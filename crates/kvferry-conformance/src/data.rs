//! Patterns to know memory by.

use kvferry_testkit::random::Dice;

/// Bytes that differ everywhere, and with every seed.
pub(crate) fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut dice = Dice::new(seed);
    let mut out = vec![0; bytes.next_multiple_of(8)];
    for word in out.chunks_exact_mut(8) {
        word.copy_from_slice(&dice.any().to_le_bytes());
    }
    out.truncate(bytes);
    out
}

pub(crate) fn hash(bytes: &[u8]) -> u64 {
    let mut words = bytes.chunks_exact(8);
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut mix = |word: u64| hash = (hash.rotate_left(5) ^ word).wrapping_mul(0x100_0000_01b3);
    for word in &mut words {
        mix(u64::from_le_bytes([
            word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7],
        ]));
    }
    for &byte in words.remainder() {
        mix(byte.into());
    }
    hash
}
