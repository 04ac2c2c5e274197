//! Arithmetic of whole numbers that the standard library lacks.

/// The greatest common divisor; of a number and zero it is the number.
pub const fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// The least common multiple; `None` where it does not fit in 64 bits. Of any number and zero it is
/// zero.
pub const fn lcm(a: u64, b: u64) -> Option<u64> {
    if a == 0 || b == 0 { Some(0) } else { (a / gcd(a, b)).checked_mul(b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_and_multiples_are_those_found_by_trying() {
        for a in 1..40 {
            for b in 1..40 {
                let divisor = (1..=a).rev().find(|by| a % by == 0 && b % by == 0);
                let multiple = (1..=a * b).find(|of| of % a == 0 && of % b == 0);
                assert_eq!((Some(gcd(a, b)), lcm(a, b)), (divisor, multiple), "{a} and {b}");
            }
        }
        assert_eq!((gcd(0, 7), gcd(7, 0), lcm(0, 7)), (7, 7, Some(0)));
        assert_eq!(lcm(u64::MAX, u64::MAX - 1), None);
    }
}
