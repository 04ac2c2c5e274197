//! Which way to read: every run by itself, or packed.
//!
//! A run that is read by itself costs the same however short it is, and one that is packed costs by the byte, which is
//! moved twice more. So short ones are packed, and how short is a constant of what carries the bytes: measured for each
//! pair, and learned from what reads took, it chose no better in any row of `docs/measured/lowering-2026-11-1*.json`.

use std::fmt;
use std::str::FromStr;

use kvferry_layout::Loops;

/// So few short runs beside long ones take less than a second operation.
const FEW: u64 = 32;

/// A way to read.
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
    /// The length of the runs does.
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

/// The ways to read what loops describe, and what is read each way. Runs of less than `packs_below` bytes are better
/// packed; where that is 0 nothing can be, and the bytes are read all the same.
pub fn lower(loops: Loops, packs_below: u64, choice: Choice) -> Vec<(Way, Loops)> {
    let short = |run: u64| run < packs_below;
    let runs = loops.nests().filter(|nest| short(nest.run)).map(|nest| nest.runs());
    let runs = runs.fold(0, u64::saturating_add);
    let all = match choice {
        _ if packs_below == 0 => Some(Way::Direct),
        Choice::Only(way) => Some(way),
        Choice::Auto if runs == loops.runs() => Some(Way::Packed),
        Choice::Auto if runs <= FEW => Some(Way::Direct),
        Choice::Auto => None,
    };
    match all {
        _ if loops.is_empty() => vec![],
        Some(way) => vec![(way, loops)],
        None => vec![
            (Way::Direct, loops.of(|nest| !short(nest.run))),
            (Way::Packed, loops.of(|nest| short(nest.run))),
        ],
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kvferry_layout::{BlockPair, ByteCopy};
    use proptest::prelude::*;

    use super::*;

    /// A nest for each of some (runs, bytes of a run).
    fn loops(nests: &[(u32, u64)]) -> Loops {
        let mut loops = Loops::default();
        let mut start = 0;
        for &(runs, bytes) in nests {
            let pairs = (0..runs).map(|at| BlockPair { source: at, destination: at });
            let table = loops.add_table(pairs);
            let block = bytes + 1;
            loops.add_nest((start, start), bytes, (block, block), &[], table).unwrap();
            start += block * u64::from(runs);
        }
        loops
    }

    fn ways(nests: &[(u32, u64)], packs_below: u64, choice: Choice) -> Vec<(Way, u64)> {
        let lowered = lower(loops(nests), packs_below, choice);
        lowered.into_iter().map(|(way, loops)| (way, loops.bytes())).collect()
    }

    #[test]
    fn short_runs_are_packed_and_long_ones_are_not() {
        use Way::{Direct, Packed};
        let auto = |nests: &[(u32, u64)]| ways(nests, 1000, Choice::Auto);
        assert_eq!(auto(&[(100, 1000)]), [(Direct, 100_000)]);
        assert_eq!(auto(&[(1, 999)]), [(Packed, 999)]);
        assert_eq!(auto(&[(33, 10), (1, 5000)]), [(Direct, 5000), (Packed, 330)]);
        // So few are not worth an operation of their own.
        assert_eq!(auto(&[(32, 10), (1, 5000)]), [(Direct, 5320)]);
        assert_eq!(auto(&[]), []);
        assert_eq!(ways(&[(100, 10)], 0, Choice::Auto), [(Direct, 1000)]);
    }

    proptest! {
        /// What is read is what there was, whoever chooses; and what is forced is done, where it is possible.
        #[test]
        fn everything_is_read_once(
            nests in prop::collection::vec((1u32..60, 1u64..50), 0..6),
            packs_below in 0u64..60,
            only in prop::option::of(prop::sample::select(Way::ALL.to_vec())),
        ) {
            let loops = loops(&nests);
            let all: BTreeSet<ByteCopy> = loops.copies().collect();
            let choice = only.map_or(Choice::Auto, Choice::Only);
            let lowered = lower(loops, packs_below, choice);
            let mut read = BTreeSet::new();
            for (way, part) in &lowered {
                prop_assert!(!part.is_empty());
                let possible = if packs_below == 0 { Some(Way::Direct) } else { only };
                prop_assert!(possible.is_none_or(|only| only == *way));
                for copy in part.copies() {
                    prop_assert!(read.insert(copy), "{copy:?} is read twice");
                }
            }
            prop_assert_eq!(read, all);
        }
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
