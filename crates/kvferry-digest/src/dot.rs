//! Words times weights, 64 bytes at a time.

#![allow(unsafe_code, reason = "memory that is named by its address is read here")]

use crate::field::{PRIME, Pair, almost};

/// Words in a chunk.
pub(crate) const WORDS: usize = 16;
const LANES: usize = WORDS / 2;
/// A weight of 61 bits is three numbers of 21 bits at most: products with words then have 53 bits, so
/// that sums of a thousand of them fit in 64.
const PIECES: usize = 3;
const PIECE_BITS: u32 = 21;

/// So many chunks can be added up before a sum is folded.
pub(crate) const MOST_CHUNKS: usize = 64;

/// The weights of 16 words that follow each other, as vectors want them: for both numbers of a pair and
/// each of the three pieces, those of the even words, then those of the odd ones.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(crate) struct Chunk([[[u64; LANES]; 2]; 2 * PIECES]);

/// Sums for both numbers of a pair and each of the three pieces.
pub(crate) type Sums = [u64; 2 * PIECES];

impl Chunk {
    /// Weights that are missing count nothing.
    pub(crate) fn new(weights: &[Pair]) -> Self {
        let mut chunk = [[[0; LANES]; 2]; 2 * PIECES];
        for (word, weight) in weights.iter().enumerate() {
            for (number, whole) in weight.iter().enumerate() {
                for piece in 0..PIECES {
                    let bits = whole >> (PIECE_BITS * piece as u32) & ((1 << PIECE_BITS) - 1);
                    chunk[number * PIECES + piece][word % 2][word / 2] = bits;
                }
            }
        }
        Self(chunk)
    }
}

/// The pair that sums of pieces stand for: at most the prime and 7.
#[inline(always)]
pub(crate) fn whole(sums: &Sums) -> Pair {
    // Shifted by so many bits, which come in again from below.
    let turned = |sum: u64, bits: u32| (sum << bits & PRIME) + (sum >> (61 - bits));
    let one = |first: u64, second: u64, third: u64| {
        let first = (first & PRIME) + (first >> 61);
        almost(first + turned(second, PIECE_BITS) + turned(third, 2 * PIECE_BITS))
    };
    [one(sums[0], sums[1], sums[2]), one(sums[3], sums[4], sums[5])]
}

/// Adds up 64 bytes for each of the chunks, [`MOST_CHUNKS`] at most.
///
/// The bytes must be readable from the address on; the processor must be of the kind that the function
/// was chosen for.
pub(crate) type Dot = unsafe fn(*const u8, &[Chunk]) -> Sums;

/// The fastest that this processor can do.
pub(crate) fn choose() -> Dot {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        return dot_avx2;
    }
    dot_plain
}

/// # Safety
///
/// As [`Dot`] says.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn dot_avx2(bytes: *const u8, chunks: &[Chunk]) -> Sums {
    use std::arch::x86_64::{
        __m256i, _mm_add_epi64, _mm_storeu_si128, _mm256_add_epi64, _mm256_castsi256_si128,
        _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_mul_epu32, _mm256_setzero_si256,
        _mm256_srli_epi64, _mm256_unpackhi_epi64, _mm256_unpacklo_epi64,
    };
    let [mut a, mut b, mut c, mut d, mut e, mut f] = [_mm256_setzero_si256(); 2 * PIECES];
    for (number, chunk) in chunks.iter().enumerate() {
        // SAFETY: 64 bytes are readable here, and need not be aligned.
        let (first, second) = unsafe {
            let at = bytes.add(number * 4 * WORDS).cast::<__m256i>();
            (_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1)))
        };
        // Products are of the low halves of lanes: the even words, then the odd ones.
        let odd = (_mm256_srli_epi64::<32>(first), _mm256_srli_epi64::<32>(second));
        let add = |sum: __m256i, weights: &[[u64; LANES]; 2]| {
            // SAFETY: sixteen weights of 64 bits are four vectors.
            let weight =
                |n| unsafe { _mm256_loadu_si256(weights.as_ptr().cast::<__m256i>().add(n)) };
            let even = _mm256_add_epi64(
                _mm256_mul_epu32(first, weight(0)),
                _mm256_mul_epu32(second, weight(1)),
            );
            let odd = _mm256_add_epi64(
                _mm256_mul_epu32(odd.0, weight(2)),
                _mm256_mul_epu32(odd.1, weight(3)),
            );
            _mm256_add_epi64(sum, _mm256_add_epi64(even, odd))
        };
        // One by one, so that the sums stay in registers.
        let [of_a, of_b, of_c, of_d, of_e, of_f] = &chunk.0;
        (a, b, c) = (add(a, of_a), add(b, of_b), add(c, of_c));
        (d, e, f) = (add(d, of_d), add(e, of_e), add(f, of_f));
    }
    let sums = [a, b, c, d, e, f];
    let mut out = [0; 2 * PIECES];
    for (pair, out) in sums.chunks_exact(2).zip(out.chunks_exact_mut(2)) {
        let halves = _mm256_add_epi64(
            _mm256_unpacklo_epi64(pair[0], pair[1]),
            _mm256_unpackhi_epi64(pair[0], pair[1]),
        );
        let (low, high) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
        // SAFETY: two sums of 64 bits are a vector.
        unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), _mm_add_epi64(low, high)) };
    }
    out
}

/// # Safety
///
/// As [`Dot`] says.
unsafe fn dot_plain(mut bytes: *const u8, chunks: &[Chunk]) -> Sums {
    const LOW: u64 = u32::MAX as u64;
    let mut sums = [[0u64; LANES]; 2 * PIECES];
    for chunk in chunks {
        // SAFETY: 64 bytes are readable here. Nothing is assumed about what they are: if somebody
        // writes them meanwhile, the sum is of no use, and that is what it is for.
        let words: [u64; LANES] = unsafe { bytes.cast::<[u64; LANES]>().read_unaligned() };
        for (sums, weights) in sums.iter_mut().zip(&chunk.0) {
            for lane in 0..LANES {
                let word = u64::from_le(words[lane]);
                let even = (word & LOW) * (weights[0][lane] & LOW);
                let odd = (word >> 32) * (weights[1][lane] & LOW);
                sums[lane] += even + odd;
            }
        }
        // SAFETY: at most the end of what is readable.
        bytes = unsafe { bytes.add(4 * WORDS) };
    }
    sums.map(|lanes| lanes.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is chosen for this processor adds up to what the plain loop does.
    #[test]
    fn vectors_add_up_to_the_same() {
        let mut state = 1_u64;
        let mut any = || {
            state = state.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(1);
            state ^ state >> 32
        };
        let bytes: Vec<u8> = (0..64 * MOST_CHUNKS + 1).map(|_| any() as u8).collect();
        let weights: Vec<Pair> =
            (0..WORDS * MOST_CHUNKS).map(|_| [any() >> 3, any() >> 3]).collect();
        let chunks: Vec<Chunk> = weights.chunks(WORDS).map(Chunk::new).collect();
        for (start, count) in [(0, MOST_CHUNKS), (1, MOST_CHUNKS), (3, 1), (0, 0), (7, 5)] {
            let at = bytes[start..].as_ptr();
            // SAFETY: so many chunks are there, or one fewer and a byte more.
            let (plain, chosen) =
                unsafe { (dot_plain(at, &chunks[..count]), choose()(at, &chunks[..count])) };
            assert_eq!(plain, chosen);
            let mut slow = [0_u128; 2];
            for (word, weight) in bytes[start..].chunks_exact(4).zip(&weights[..count * WORDS]) {
                let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                for (slow, weight) in slow.iter_mut().zip(weight) {
                    *slow += u128::from(word) * u128::from(*weight);
                }
            }
            assert_eq!(whole(&chosen).map(|sum| sum % PRIME), slow.map(crate::field::fold));
        }
    }

    /// The largest words and weights do not overflow.
    #[test]
    fn the_most_that_is_added_up_fits() {
        let bytes = vec![0xff_u8; 64 * MOST_CHUNKS];
        let chunk = Chunk::new(&[[PRIME - 1; 2]; WORDS]);
        let chunks = vec![chunk; MOST_CHUNKS];
        // SAFETY: so many chunks are there.
        let sums = unsafe { choose()(bytes.as_ptr(), &chunks) };
        let all = (WORDS * MOST_CHUNKS) as u128;
        let wide = all * u128::from(u32::MAX) * u128::from(PRIME - 1);
        assert_eq!(whole(&sums).map(|sum| sum % PRIME), [crate::field::fold(wide); 2]);
    }
}
