//! Pairs of numbers modulo the prime 2^61 - 1.

/// 2^61 - 1, a prime.
pub(crate) const PRIME: u64 = (1 << 61) - 1;

/// Two independent numbers.
pub(crate) type Pair = [u64; 2];

/// Brings any number below the prime.
#[inline(always)]
pub(crate) fn fold(wide: u128) -> u64 {
    // 2^61 is 1 here.
    let sum = (wide as u64 & PRIME) + ((wide >> 61) as u64 & PRIME) + (wide >> 122) as u64;
    let sum = (sum & PRIME) + (sum >> 61);
    if sum >= PRIME { sum - PRIME } else { sum }
}

/// Brings a number of 64 bits to 61 and a little: at most the prime and 7.
#[inline(always)]
pub(crate) fn almost(sum: u64) -> u64 {
    (sum & PRIME) + (sum >> 61)
}

#[inline(always)]
pub(crate) fn multiply(a: Pair, b: Pair) -> Pair {
    [fold(u128::from(a[0]) * u128::from(b[0])), fold(u128::from(a[1]) * u128::from(b[1]))]
}

#[inline(always)]
pub(crate) fn add(a: Pair, b: Pair) -> Pair {
    let one = |a: u64, b: u64| if a + b >= PRIME { a + b - PRIME } else { a + b };
    [one(a[0], b[0]), one(a[1], b[1])]
}

/// Any two numbers, as numbers modulo the prime.
pub(crate) fn reduced(pair: Pair) -> Pair {
    pair.map(|n| n % PRIME)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn arithmetic_is_that_of_long_division(a in 0..PRIME, b in 0..PRIME) {
            let prime = u128::from(PRIME);
            let (long, wide) = (u128::from(a), u128::from(b));
            prop_assert_eq!(u128::from(multiply([a, b], [b, a])[0]), long * wide % prime);
            prop_assert_eq!(u128::from(add([a, b], [b, a])[1]), (long + wide) % prime);
        }

        #[test]
        fn whatever_there_is_is_folded(wide: u128, sum: u64) {
            prop_assert_eq!(u128::from(fold(wide)), wide % u128::from(PRIME));
            prop_assert_eq!(almost(sum) % PRIME, sum % PRIME);
            prop_assert!(almost(sum) <= PRIME + 7);
        }
    }

    #[test]
    fn the_ends_of_the_range() {
        let top = PRIME - 1;
        assert_eq!(multiply([top; 2], [top; 2]), [1, 1]);
        assert_eq!(add([top; 2], [1, 1]), [0, 0]);
        assert_eq!(fold((1 << 122) - 1), 0);
        assert_eq!(u128::from(fold(u128::MAX)), u128::MAX % u128::from(PRIME));
        assert_eq!(reduced([PRIME, u64::MAX]), [0, 7]);
    }
}
