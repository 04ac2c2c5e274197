//! Sets of pairs of bytes, compared without writing them out.
//!
//! A set of pairs (source byte, destination byte) is the polynomial that has a term `x^source *
//! y^destination` for each of them; two collections of pairs are the same, each as often, just when
//! their polynomials are. What nested loops around a run amount to is a product of geometric series,
//! so a value of the polynomial takes a few multiplications for each loop, however many bytes there
//! are. Polynomials that differ have equal values at almost no point: at a point chosen without regard
//! to them, in this field and with addresses of 64 bits, with a chance below 2^-61 (Schwartz and
//! Zippel).

use std::ops::{Add, AddAssign, Mul, SubAssign};

use crate::nest::Loop;

/// 2^127 - 1, a prime.
const PRIME: u128 = (1 << 127) - 1;

/// A number modulo [`PRIME`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Value(u128);

impl Value {
    const ONE: Self = Self(1);

    const fn times(self, other: Self) -> Self {
        let (a1, a0) = (self.0 >> 64, self.0 & u64::MAX as u128);
        let (b1, b0) = (other.0 >> 64, other.0 & u64::MAX as u128);
        // Both middle products are below 2^127.
        let middle = a1 * b0 + a0 * b1;
        let (low, carry) = (a0 * b0).overflowing_add(middle << 64);
        let high = a1 * b1 + (middle >> 64) + carry as u128;
        // 2^127 is 1 here.
        let sum = (low & PRIME) + (high << 1 | low >> 127);
        let sum = (sum & PRIME) + (sum >> 127);
        Self(if sum >= PRIME { sum - PRIME } else { sum })
    }
}

impl Mul for Value {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        self.times(other)
    }
}

impl Add for Value {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let sum = self.0 + other.0;
        Self(if sum >= PRIME { sum - PRIME } else { sum })
    }
}

impl AddAssign for Value {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl SubAssign for Value {
    fn sub_assign(&mut self, other: Self) {
        *self = *self + Self(if other.0 == 0 { 0 } else { PRIME - other.0 });
    }
}

/// The powers of a number: `digits[k][d]` is its power to `d * 16^k`.
struct Powers {
    digits: [[Value; 16]; 16],
}

impl Powers {
    const fn new(base: u128) -> Self {
        let mut digits = [[Value::ONE; 16]; 16];
        let (mut k, mut step) = (0, Value(base % PRIME));
        while k < 16 {
            let mut digit = 1;
            while digit < 16 {
                digits[k][digit] = digits[k][digit - 1].times(step);
                digit += 1;
            }
            step = digits[k][15].times(step);
            k += 1;
        }
        Self { digits }
    }

    fn to(&self, mut exponent: u64) -> Value {
        let mut power = Value::ONE;
        for digits in &self.digits {
            if exponent == 0 {
                break;
            }
            if exponent % 16 > 0 {
                power = power * digits[(exponent % 16) as usize];
            }
            exponent /= 16;
        }
        power
    }
}

/// The point: the first 256 bits of pi behind its point.
static X: Powers = Powers::new(0x243f_6a88_85a3_08d3_1319_8a2e_0370_7344);
static Y: Powers = Powers::new(0xa409_3822_299f_31d0_082e_fa98_ec4e_6c89);

/// The pair of bytes `source` and `destination`.
pub(crate) fn pair((source, destination): (u64, u64)) -> Value {
    X.to(source) * Y.to(destination)
}

/// The pairs of a run and of loops around it that starts at byte 0 on both sides.
pub(crate) fn repeated<'a>(run: u64, loops: impl Iterator<Item = &'a Loop>) -> Value {
    loops.fold(geometric(pair((1, 1)), run), |value, repeat| {
        value * geometric(pair((repeat.source, repeat.destination)), repeat.count)
    })
}

/// 1 + z + z^2 + ..., `count` terms.
fn geometric(z: Value, count: u64) -> Value {
    let (mut sum, mut power) = (Value::default(), Value::ONE);
    for bit in (0..u64::BITS - count.leading_zeros()).rev() {
        // From n terms and z^n to 2n, then to 2n + 1.
        sum = sum * (Value::ONE + power);
        power = power * power;
        if count >> bit & 1 == 1 {
            sum += power;
            power = power * z;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Multiplication by adding and doubling.
    fn slow(a: u128, mut b: u128) -> Value {
        let (mut sum, mut twice) = (Value::default(), Value(a));
        while b > 0 {
            if b & 1 == 1 {
                sum += twice;
            }
            twice += twice;
            b >>= 1;
        }
        sum
    }

    proptest! {
        #[test]
        fn products_are_sums(a in 0..PRIME, b in 0..PRIME) {
            prop_assert_eq!(Value(a) * Value(b), slow(a, b));
        }

        #[test]
        fn loops_are_the_sum_of_their_pairs(
            run in 1u64..6,
            loops in prop::collection::vec((1u64..5, 0u64..1 << 40, 0u64..1 << 40), 0..3),
        ) {
            let mut starts = vec![(0, 0)];
            let mut nested = vec![];
            for (count, source, destination) in loops {
                nested.push(Loop { count, source, destination });
                starts = starts
                    .iter()
                    .flat_map(|at| (0..count).map(move |i| (at.0 + i * source, at.1 + i * destination)))
                    .collect();
            }
            let mut sum = Value::default();
            for (source, destination) in starts {
                for byte in 0..run {
                    sum += pair((source + byte, destination + byte));
                }
            }
            prop_assert_eq!(repeated(run, nested.iter()), sum);
        }
    }

    #[test]
    fn the_ends_of_the_range() {
        let top = Value(PRIME - 1);
        assert_eq!(top * top, Value::ONE);
        assert_eq!(top + Value::ONE, Value::default());
        assert_eq!(pair((u64::MAX, 0)) * pair((1, 0)), {
            let half = pair((1 << 63, 0));
            half * half
        });
        assert_eq!(geometric(top, 0), Value::default());
        assert_eq!(geometric(Value::ONE, 12), Value(12));
    }
}
