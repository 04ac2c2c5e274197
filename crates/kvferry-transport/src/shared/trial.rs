//! What reads take, by trying a few.

use kvferry_layout::{BlockPair, Loop, Loops, Price};

/// Bytes of a short copy, and how many of them are read together.
const SHORT: u64 = 64;
const COUNT: u64 = 256;
/// A small read that took so many nanoseconds says more about the machine than about reads.
const ABSURD: f64 = 5e6;

/// How far apart copies of so many bytes start, so that they do not touch.
pub(crate) fn stride(bytes: u64) -> u64 {
    2 * bytes
}

/// One such read, as loops between two addresses.
pub(crate) fn loops(between: (u64, u64), count: u64, bytes: u64) -> Option<Loops> {
    let apart = stride(bytes);
    let mut loops = Loops::default();
    let table = loops.add_table([BlockPair::default()]);
    let repeated = [Loop { count, source: apart, destination: apart }];
    loops.add_nest(between, bytes, (0, 0), &repeated, table).ok()?;
    Some(loops)
}

/// The least bytes of a long read.
pub(crate) const LEAST_LONG: u64 = 2 * SHORT * COUNT;

/// Works out what reads take. `read` reads so many copies of so many bytes, [`stride`] apart: one short one, one of
/// `long` bytes, and many short ones. It answers with nanoseconds, or with `None` if it could not.
pub(crate) fn price(long: u64, mut read: impl FnMut(u64, u64) -> Option<f64>) -> Option<Price> {
    let mut take = |count, bytes| quickest(|| read(count, bytes));
    let launch = take(1, SHORT)?;
    if launch > ABSURD {
        return None;
    }
    let (whole, short) = (take(1, long)?, take(COUNT, SHORT)?);
    let byte = (whole - launch).max(0.0) / long as f64;
    let copy = (short - launch) / COUNT as f64 - SHORT as f64 * byte;
    Some(Price { launch, copy: copy.max(0.1), byte: byte.max(0.0001) })
}

/// Nanoseconds of the quickest of a few reads of a kind. The first does not count: it sets things up, and takes up
/// to a hundred times as long as any other. Some of the others may be late, so there are a few; but one that takes
/// long is not tried again.
fn quickest(mut read: impl FnMut() -> Option<f64>) -> Option<f64> {
    const LEAST: usize = 3;
    const MOST: usize = 8;
    /// Nanoseconds for more than the least of them, and for one.
    const ENOUGH: f64 = 2e6;
    const LONG: f64 = 20e6;
    read()?;
    let (mut best, mut sum) = (f64::INFINITY, 0.0);
    for round in 0..MOST {
        if best > LONG && round > 0 || round >= LEAST && sum > ENOUGH {
            break;
        }
        let took = read()?;
        (best, sum) = (best.min(took), sum + took);
    }
    Some(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As it was seen over UCX: the first list of copies took 39 ms, and those behind it 0.3.
    #[test]
    fn what_sets_things_up_does_not_count() {
        let measured = |times: &[f64]| {
            let (mut next, mut count) = (times.iter().copied(), 0);
            let best = quickest(|| {
                count += 1;
                next.next()
            });
            (best, count)
        };
        let many = [39e6, 0.3e6, 0.28e6, 0.31e6, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0];
        assert_eq!(measured(&many), (Some(9.0), 9));
        // Late ones are enough when there were a few.
        assert_eq!(measured(&[39e6, 4e6, 0.3e6, 3e6, 9.0]), (Some(0.3e6), 4));
        // What takes long is known after one.
        assert_eq!(measured(&[139e6, 134e6, 9.0]), (Some(134e6), 2));
        // One that failed says nothing.
        assert_eq!(measured(&[39e6, 0.3e6]), (None, 3));
    }

    #[test]
    fn a_price_is_found_again() {
        let true_price = Price { launch: 20_000.0, copy: 900.0, byte: 0.25 };
        let mut first = std::collections::BTreeSet::new();
        let found = price(128 << 10, |count, bytes| {
            let slow = if first.insert((count, bytes)) { 100.0 } else { 1.0 };
            Some(slow * (true_price.of(count, count * bytes) - true_price.copy))
        });
        let found = found.unwrap();
        assert!((found.byte - 0.25).abs() < 1e-3 && (found.copy - 900.0).abs() < 10.0, "{found:?}");
        assert!(price(128 << 10, |_, _| Some(6e6)).is_none());
        assert!(price(128 << 10, |count, _| (count == 1).then_some(1e4)).is_none());
    }
}
