//! A digest byte by byte, as it is defined and as slowly: what the rest of this crate is held to.

use crate::Digest;
use crate::field::{add, multiply};
use crate::keys::{Key, Of};

/// What one byte of an element counts.
#[derive(Clone, Copy, Debug)]
pub struct Byte<'a> {
    /// The state.
    pub state: &'a str,
    /// The entry.
    pub entry: u64,
    /// The index on every axis.
    pub index: &'a [u64],
    /// Bytes of an element.
    pub width: u64,
    /// Its place in the element.
    pub at: u64,
    /// Its value.
    pub value: u8,
}

impl Byte<'_> {
    /// Its share of the digest.
    pub fn digest(&self, key: &Key) -> Digest {
        let (last, outer) =
            self.index.split_last().map_or((0, &[][..]), |(last, outer)| (*last, outer));
        let place = last * self.width + self.at;
        let mut weight = multiply(key.state(self.state), key.factor(Of::Entry, self.entry));
        for (axis, index) in outer.iter().enumerate() {
            weight = multiply(weight, key.factor(Of::Axis(axis), *index));
        }
        weight = multiply(weight, key.factor(Of::Word, place / 4));
        let times = (u64::from(self.value) + 1) << (8 * (place % 4));
        Digest(add([0, 0], multiply(weight, [times, times])))
    }
}
