//! How many ranks of an engine read the same, as far as one of them can tell.

use std::collections::HashMap;

use kvferry_layout::arithmetic::gcd;
use kvferry_layout::{Manifest, StateBox};

use crate::compile::cover::Wanted;

/// How many ranks of the destination's engine read each state's elements.
pub(crate) struct Readers<'a> {
    /// Which part of a state this rank has.
    parts: HashMap<&'a str, f64>,
    /// Ranks in the engine, or a divisor of their number: of the state of which this rank has least, each
    /// has as much. `None` if that does not look like an even split by rank numbers.
    ranks: Option<f64>,
}

impl<'a> Readers<'a> {
    pub(crate) fn of(destination: &Manifest, wanted: &[Wanted<'a>]) -> Self {
        let mut parts: HashMap<&str, f64> = HashMap::new();
        let (mut most, mut even) = (1, true);
        for want in wanted {
            let piece = &destination.groups()[want.group].pieces[want.piece];
            let axes = &destination.kind(piece).axes;
            let whole = StateBox::whole(axes).volume() as f64;
            *parts.entry(want.state).or_default() += piece.bounds.volume() as f64 / whole;
            for (axis, span) in axes.iter().zip(&piece.bounds.0) {
                let shares = axis.length.div_ceil(span.len());
                if shares < most {
                    continue;
                }
                let place = u64::from(destination.rank()) % shares;
                let fits = shares * span.len() == axis.length && place * span.len() == span.start;
                even = fits && piece.phase.is_all() && (even || shares > most);
                most = shares;
            }
        }
        let ranks = even.then_some(most);
        Self { parts, ranks: ranks.map(|ranks| ranks as f64) }
    }

    /// How many seats of a set a rank has to read so that all readers together, each with the next
    /// ones, read all seats equally often. All of them if the readers cannot be counted.
    pub(crate) fn seats(&self, states: impl Iterator<Item = &'a str>, set: usize) -> usize {
        let Some(ranks) = self.ranks else { return set };
        let mut readers = None;
        for state in states {
            let count = ranks * self.parts[state];
            let whole = count.round();
            if (count - whole).abs() > 1e-6 || readers.is_some_and(|other| other != whole) {
                return set;
            }
            readers = Some(whole);
        }
        set / gcd(set as u64, readers.unwrap_or(1.0) as u64).max(1) as usize
    }
}
