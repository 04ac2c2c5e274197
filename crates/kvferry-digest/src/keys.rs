//! The factors of weights, drawn from a key.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::field::{PRIME, Pair};

/// What weights are drawn from. Draw one for every comparison: a difference that one key misses, the
/// next one finds.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key(pub [u64; 2]);

impl fmt::Debug for Key {
    /// Not the key itself: it is of no use in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// What a factor stands for.
#[derive(Clone, Copy)]
pub(crate) enum Of {
    Entry,
    Word,
    Axis(usize),
}

impl Key {
    /// A number from 1 to 2^61 - 2, twice.
    pub(crate) fn factor(&self, of: Of, index: u64) -> Pair {
        let domain = match of {
            Of::Entry => 1,
            Of::Word => 2,
            Of::Axis(axis) => 16 + axis as u64,
        };
        self.0.map(|key| within(mixed(key, domain, index)))
    }

    /// The factor of a state.
    pub(crate) fn state(&self, name: &str) -> Pair {
        let drawn = |key: u64| {
            let length = mixed(key, 3, name.len() as u64);
            name.as_bytes().chunks(8).fold(length, |drawn, chunk| {
                let mut bytes = [0; 8];
                bytes[..chunk.len()].copy_from_slice(chunk);
                mixed(key, drawn, u64::from_le_bytes(bytes))
            })
        };
        self.0.map(|key| within(drawn(key)))
    }
}

fn within(drawn: u64) -> u64 {
    drawn % (PRIME - 1) + 1
}

/// Two numbers, mixed under a key.
fn mixed(key: u64, a: u64, b: u64) -> u64 {
    let first = scramble(key ^ a.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let second = scramble(first ^ b.wrapping_mul(0xd6e8_feb8_6659_fd93));
    scramble(second.wrapping_add(key.rotate_left(32)))
}

/// Steele, Lea and Flood's finaliser (SplitMix64): every bit of the result depends on every bit.
fn scramble(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
