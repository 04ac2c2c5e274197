//! What reads have taught about one source: how far off its rates are.

use kvferry_plan::cost::Way;
use kvferry_transport::{Price, Rates};

/// How much of what one read tells is believed: machines are busy with other things, too.
const BELIEF: f64 = 0.25;
/// No read makes a way look so many times dearer or cheaper than was measured.
const MOST: f64 = 8.0;

/// Factors on the rates that were measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Learned {
    direct: f64,
    packed: f64,
}

impl Default for Learned {
    fn default() -> Self {
        Self { direct: 1.0, packed: 1.0 }
    }
}

impl Learned {
    /// A read took so long where the rates, as they are [applied](Self::apply) now, made one expect
    /// something else.
    pub(crate) fn learn(&mut self, way: Way, expected: f64, took: f64) {
        let factor = match way {
            Way::Direct | Way::OverRead => &mut self.direct,
            Way::Packed => &mut self.packed,
        };
        let off = took / expected;
        if off.is_finite() && off > 0.0 {
            *factor = (*factor * off.powf(BELIEF)).clamp(1.0 / MOST, MOST);
        }
    }

    /// How many times as much as was measured a way takes, as far as is known now.
    pub(crate) fn factor(&self, way: Way) -> f64 {
        match way {
            Way::Direct | Way::OverRead => self.direct,
            Way::Packed => self.packed,
        }
    }

    /// The rates, as far as is known now.
    pub(crate) fn apply(&self, rates: Rates) -> Rates {
        let times = |price: Price, factor: f64| Price {
            launch: price.launch * factor,
            copy: price.copy * factor,
            byte: price.byte * factor,
        };
        Rates {
            direct: times(rates.direct, self.direct),
            packed: rates.packed.map(|packed| times(packed, self.packed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATES: Rates = Rates {
        direct: Price { launch: 10.0, copy: 600.0, byte: 0.5 },
        packed: Some(Price { launch: 10.0, copy: 20.0, byte: 1.0 }),
    };

    #[test]
    fn what_reads_say_is_believed_in_the_end() {
        let mut learned = Learned::default();
        let truth = RATES.direct.of(1000, 1 << 20) * 3.0;
        for _ in 0..40 {
            let expected = learned.apply(RATES).direct.of(1000, 1 << 20);
            learned.learn(Way::Direct, expected, truth);
        }
        let now = learned.apply(RATES);
        assert!((now.direct.of(1000, 1 << 20) / truth - 1.0).abs() < 0.01, "{now:?}");
        assert_eq!(now.packed, RATES.packed, "the other way is as it was");
    }

    #[test]
    fn no_read_makes_a_way_impossible_or_free() {
        let mut learned = Learned::default();
        for took in [f64::INFINITY, f64::NAN, 0.0, -1.0] {
            learned.learn(Way::Packed, 100.0, took);
            learned.learn(Way::Packed, 0.0, 100.0);
        }
        assert_eq!(learned, Learned::default());
        for _ in 0..1000 {
            learned.learn(Way::Packed, 1.0, 1e12);
        }
        assert_eq!(learned.apply(RATES).packed.unwrap().copy, 20.0 * MOST);
    }
}
