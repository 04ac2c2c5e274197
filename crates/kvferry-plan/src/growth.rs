//! What of a request can be read while the source still computes it.

use crate::compile::Plan;
use crate::walk::Pairing;

/// How a request can be read while it grows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Growth {
    /// For every group of the destination: whether what it needs of a shorter request stays as it is when
    /// the request grows, so that it can be read part by part. Windows move on and snapshots are rewritten:
    /// those wait for the end.
    pub groups: Vec<bool>,
    /// Whole blocks of the source, for all groups that grow: in steps of so many tokens no block is read
    /// twice. Out of reach where no group grows.
    pub step: u64,
}

impl Plan {
    /// How a request can be read while it grows.
    pub fn growth(&self) -> Growth {
        let grows = |group: usize| {
            let layouts = &self.groups[group].layouts;
            let appended = |law: &kvferry_layout::Law| law.entries > 0 && law.open == 0;
            !layouts.is_empty()
                && layouts
                    .iter()
                    .all(|(law, layout)| appended(law) && layout.window.tokens.is_none())
        };
        let groups: Vec<bool> = (0..self.groups.len()).map(grows).collect();
        let read = self.pairings.iter().filter(|pairing| groups[pairing.destination.group]);
        let step = read.map(tokens_in_source_block).reduce(common);
        Growth { step: step.unwrap_or(u64::MAX), groups }
    }
}

/// How many tokens of the sequence end with one block of the source.
fn tokens_in_source_block(pairing: &Pairing) -> u64 {
    let phase = &pairing.source.phase;
    let entries = u128::from(pairing.source.entries) * u128::from(phase.modulus)
        / u128::from(phase.held.len().max(1));
    let tokens = entries * u128::from(pairing.law.tokens) / u128::from(pairing.law.entries.max(1));
    u64::try_from(tokens).unwrap_or(u64::MAX).max(1)
}

/// The least that is a multiple of both, or the larger where that is absurd.
fn common(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    let both = u128::from(a / x) * u128::from(b);
    if both <= 1 << 20 { both as u64 } else { a.max(b) }
}

#[cfg(test)]
mod tests {
    use super::common;

    #[test]
    fn steps_of_several_groups() {
        assert_eq!(common(16, 64), 64);
        assert_eq!(common(48, 64), 192);
        assert_eq!(common(1 << 19, (1 << 19) + 1), (1 << 19) + 1);
        assert_eq!(common(u64::MAX, 16), u64::MAX);
    }
}
