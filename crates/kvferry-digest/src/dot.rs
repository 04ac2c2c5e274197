//! Words times weights, 64 bytes at a time.

#![allow(unsafe_code, reason = "memory that is named by its address is read here")]

use crate::field::Pair;

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

/// The pair that sums of pieces stand for.
#[inline(always)]
pub(crate) fn whole(sums: &Sums) -> Pair {
    let one = |pieces: &[u64]| {
        let wide = u128::from(pieces[0])
            + (u128::from(pieces[1]) << PIECE_BITS)
            + (u128::from(pieces[2]) << (2 * PIECE_BITS));
        crate::field::fold(wide)
    };
    [one(&sums[..PIECES]), one(&sums[PIECES..])]
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
unsafe fn dot_plain(bytes: *const u8, chunks: &[Chunk]) -> Sums {
    // SAFETY: the caller's promise.
    unsafe { dot(bytes, chunks) }
}

/// # Safety
///
/// As [`Dot`] says.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi2")]
unsafe fn dot_avx2(bytes: *const u8, chunks: &[Chunk]) -> Sums {
    // SAFETY: the caller's promise.
    unsafe { dot(bytes, chunks) }
}

/// # Safety
///
/// As [`Dot`] says.
#[inline(always)]
unsafe fn dot(mut bytes: *const u8, chunks: &[Chunk]) -> Sums {
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
