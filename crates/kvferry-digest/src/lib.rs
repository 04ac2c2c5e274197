//! A digest of what a request's cache means: the same whatever the layout, the order and the ranks.
//!
//! A digest is a sum over the bytes of elements. Each byte counts with a weight that depends on a
//! secret [`Key`] and on *what* the byte is (state, entry, index on every axis, place in the element),
//! never on *where* it lies. Two ranks that hold the same part of a request in different layouts
//! compute the same number; parts add up, so that what was read from several ranks can be compared with
//! what one holds.
//!
//! Numbers are taken modulo the prime 2^61 - 1, twice, with independent weights. The weight of a byte is
//!
//! ```text
//! state[name] * entry[t] * axis[0][i0] * ... * word[b / 4] * 256^(b % 4)
//! ```
//!
//! where `i0`, `i1`, … are its indices on all axes but the last, and `b` is its place in the row of the
//! last axis (the index there times the bytes of an element, plus the place in the element). Each
//! factor is drawn from the key. A byte `v` counts `(v + 1)` times its weight, so that a zero and
//! nothing are not the same.
//!
//! What can be missed: two different contents have the same digest for at most (9 / 2^61)^2, less than
//! 2^-115, of all keys, whatever the difference (Schwartz and Zippel: their difference is a polynomial
//! in the factors, of degree 9 at most, in which the monomial of every word of four bytes that differs
//! has a coefficient that is not zero, because it is below 2^33).
//!
//! * [`Part`] says which bytes, in logical words alone.
//! * [`Program`] is made of parts by the manifest and the block tables of the rank that holds them:
//!   addresses and weights.
//! * [`host`] carries a program out on host memory, in vectors. A GPU does so by a kernel of its own.

#![deny(unsafe_code)]

mod dot;
mod error;
mod field;
pub mod host;
mod keys;
#[doc(hidden)]
pub mod model;
mod program;

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign};

use kvferry_layout::{Phase, Span, StateBox};
use serde::{Deserialize, Serialize};

pub use error::DigestError;
pub use keys::Key;
pub use program::{Course, Held, Level, Nest, Program, Run, Stretch, Weights};

/// A part of a request's cache: a box of some entries of a state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The state's name.
    pub state: String,
    /// Which part of every entry, in the state's coordinates.
    pub bounds: StateBox,
    /// Which of the entries.
    pub phase: Phase,
    /// From which entry to which.
    pub entries: Span,
}

/// What a digest is: two numbers below 2^61 - 1.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Digest(pub [u64; 2]);

impl Add for Digest {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(field::add(field::reduced(self.0), field::reduced(other.0)))
    }
}

impl Digest {
    /// So many times as much, for sums that lack a factor.
    pub fn times(self, factor: [u64; 2]) -> Self {
        Self(field::multiply(field::reduced(self.0), field::reduced(factor)))
    }
}

impl AddAssign for Digest {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Digest {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Self::add)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.0[0], self.0[1])
    }
}
