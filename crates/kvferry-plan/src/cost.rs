//! Which way to read is the cheapest: a pure function of what is to be read and of what the ways take.
//!
//! What is read from one source is a sum over the destination's groups, and so is its price: each group
//! is read one way, and each way that is used at all costs one launch. So the cheapest choice is one of
//! three: nothing packed, everything packed, or every group by what is cheaper for it alone.

use std::fmt;
use std::str::FromStr;

use kvferry_layout::{Price, Rates};

use crate::summary::Summary;

/// A way to read a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Way {
    /// Every copy by itself.
    Direct,
    /// Gathered by the source, moved in one piece, scattered by the destination.
    Packed,
}

impl Way {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Direct, Self::Packed];

    /// Its name: `direct` or `packed`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Packed => "packed",
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Who chooses the way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// The prices do.
    #[default]
    Auto,
    /// It is this one, wherever it is possible.
    Only(Way),
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let way = Way::ALL.into_iter().find(|way| way.name() == text);
        match (text, way) {
            ("auto", _) => Ok(Self::Auto),
            (_, Some(way)) => Ok(Self::Only(way)),
            _ => Err(format!("no lowering is called '{text}': use auto, direct or packed")),
        }
    }
}

/// What one way takes for a group, without the launch. `None` where it is not possible.
fn takes(rates: &Rates, way: Way, group: &Summary) -> Option<f64> {
    let price = match way {
        Way::Direct => rates.direct,
        Way::Packed => rates.packed?,
    };
    Some(Price { launch: 0.0, ..price }.of(group.copies, group.bytes))
}

/// What it takes to read every group its way, in nanoseconds. `None` where one of them is not possible.
pub fn cost(rates: &Rates, groups: &[Summary], ways: &[Way]) -> Option<f64> {
    let mut sum = 0.0;
    for (group, way) in groups.iter().zip(ways) {
        sum += if group.bytes == 0 { 0.0 } else { takes(rates, *way, group)? };
    }
    let used = |way| groups.iter().zip(ways).any(|(group, its)| group.bytes > 0 && *its == way);
    if used(Way::Direct) {
        sum += rates.direct.launch;
    }
    if used(Way::Packed) {
        sum += rates.packed?.launch;
    }
    Some(sum)
}

/// The cheapest way for every group that is read from one source.
pub fn choose(rates: &Rates, groups: &[Summary], choice: Choice) -> Vec<Way> {
    let all = |way| vec![way; groups.len()];
    // Where nothing can be packed, the bytes are read all the same.
    if rates.packed.is_none() {
        return all(Way::Direct);
    }
    match choice {
        Choice::Only(way) => all(way),
        Choice::Auto => {
            let each = groups.iter().map(|group| {
                let [direct, packed] = Way::ALL.map(|way| takes(rates, way, group));
                if packed < direct { Way::Packed } else { Way::Direct }
            });
            let candidates = [all(Way::Direct), all(Way::Packed), each.collect()];
            let price = |ways: &Vec<Way>| cost(rates, groups, ways).unwrap_or(f64::INFINITY);
            let best = candidates.into_iter().min_by(|a, b| price(a).total_cmp(&price(b)));
            best.unwrap_or_default()
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sum(copies: u64, bytes: u64) -> Summary {
        Summary { copies, bytes, ..Summary::default() }
    }

    prop_compose! {
        fn prices()(launch in 0.0..1e5f64, copy in 0.5..1e4f64, byte in 0.001..2.0f64) -> Price {
            Price { launch, copy, byte }
        }
    }

    prop_compose! {
        fn some_rates()(direct in prices(), packed in prop::option::of(prices())) -> Rates {
            Rates { direct, packed }
        }
    }

    prop_compose! {
        fn groups()(copies in 0u64..100_000, length in 1u64..100_000) -> Summary {
            sum(copies, copies * length)
        }
    }

    fn cheapest(rates: &Rates, works: &[Summary]) -> f64 {
        cost(rates, works, &choose(rates, works, Choice::Auto)).unwrap()
    }

    proptest! {
        /// The choice is the least of all that there are.
        #[test]
        fn nothing_is_cheaper(rates in some_rates(), works in prop::collection::vec(groups(), 0..5)) {
            let chosen = cheapest(&rates, &works);
            for number in 0..2usize.pow(works.len() as u32) {
                let ways: Vec<Way> =
                    (0..works.len()).map(|at| Way::ALL[number >> at & 1]).collect();
                if let Some(other) = cost(&rates, &works, &ways) {
                    prop_assert!(chosen <= other * (1.0 + 1e-12), "{ways:?}: {other} < {chosen}");
                }
            }
        }

        /// More to read, and dearer ways, are never cheaper.
        #[test]
        fn more_is_never_cheaper(
            rates in some_rates(),
            works in prop::collection::vec(groups(), 1..4),
            which in any::<prop::sample::Index>(),
            more in (0u64..1000, 0u64..1 << 20),
            factor in 1.0..5.0f64,
            field in 0usize..6,
        ) {
            let before = cheapest(&rates, &works);
            let mut larger = works.clone();
            let group = &mut larger[which.index(works.len())];
            group.copies += more.0;
            group.bytes += more.1;
            prop_assert!(cheapest(&rates, &larger) >= before * (1.0 - 1e-12));
            let mut dearer = rates;
            let mut fields: Vec<&mut f64> = vec![];
            for price in [Some(&mut dearer.direct), dearer.packed.as_mut()].into_iter().flatten() {
                fields.extend([&mut price.launch, &mut price.copy, &mut price.byte]);
            }
            let field = field % fields.len();
            *fields[field] *= factor;
            prop_assert!(cheapest(&dearer, &works) >= before * (1.0 - 1e-12));
        }

        /// What is forced is done, where it is possible, and otherwise the bytes are read all the same.
        #[test]
        fn what_is_forced_is_done(rates in some_rates(), works in prop::collection::vec(groups(), 1..4)) {
            for way in Way::ALL {
                let possible = way == Way::Direct || rates.packed.is_some();
                let expected = vec![if possible { way } else { Way::Direct }; works.len()];
                prop_assert_eq!(choose(&rates, &works, Choice::Only(way)), expected);
            }
        }
    }

    #[test]
    fn short_runs_are_packed_and_long_ones_are_not() {
        let direct = Price { launch: 20e3, copy: 600.0, byte: 0.3 };
        let packed = Price { launch: 20e3, copy: 20.0, byte: 0.5 };
        let rates = Rates { direct, packed: Some(packed) };
        let works = [sum(100_000, 100_000 * 512), sum(10, 100 << 20)];
        assert_eq!(choose(&rates, &works, Choice::Auto), [Way::Packed, Way::Direct]);
        // A little beside much is not worth a launch of its own.
        let works = [sum(100_000, 100_000 * 512), sum(1, 30_000)];
        assert_eq!(choose(&rates, &works, Choice::Auto), [Way::Packed, Way::Packed]);
        let without = Rates { direct, packed: None };
        assert_eq!(choose(&without, &works, Choice::Auto), [Way::Direct, Way::Direct]);
    }

    #[test]
    fn names_are_read() {
        assert_eq!("auto".parse(), Ok(Choice::Auto));
        for way in Way::ALL {
            assert_eq!(way.to_string().parse(), Ok(Choice::Only(way)));
        }
        let error = "packing".parse::<Choice>().unwrap_err();
        assert!(error.contains("'packing'") && error.contains("use auto"), "{error}");
    }
}
