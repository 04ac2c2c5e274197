//! Made-up requests: block tables as an engine could hand them out.

use kvferry_layout::Manifest;
use kvferry_plan::Table;

/// How a request's blocks lie in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spread {
    /// No two that follow each other in a table follow each other in memory: what a busy engine's
    /// tables look like.
    Scattered,
    /// One after the other: the best case.
    Contiguous,
}

impl Spread {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Scattered => "scattered",
            Self::Contiguous => "contiguous",
        }
    }
}

/// The block tables of one engine.
pub(crate) struct Tables {
    /// For every group: the position of its first live block, and the ids from there on.
    groups: Vec<(u64, Vec<u32>)>,
}

/// Blocks that a request of `tokens` tokens takes, one for null included.
pub(crate) fn blocks_needed(rank: &Manifest, tokens: u64) -> u64 {
    1 + spans(rank, tokens).map(|(first, end)| end - first).sum::<u64>()
}

/// For every group: the first live table position, and the end.
fn spans(rank: &Manifest, tokens: u64) -> impl Iterator<Item = (u64, u64)> {
    rank.groups().iter().map(move |group| match group.tokens_per_block {
        None => (0, 1),
        Some(block) => {
            let first = group.window.first_live(tokens).min(tokens);
            (first / block, tokens.div_ceil(block))
        }
    })
}

impl Tables {
    /// Tables for a request of `tokens` tokens, or the number of blocks that it would take.
    pub(crate) fn new(rank: &Manifest, tokens: u64, spread: Spread) -> Result<Self, u64> {
        let needed = blocks_needed(rank, tokens);
        let smallest = rank.groups().iter().map(|group| u64::from(group.blocks)).min().unwrap_or(0);
        if needed > smallest {
            return Err(needed);
        }
        // Block 0 is left out: engines use it to mark dead entries.
        let usable = smallest - 1;
        let step = match spread {
            Spread::Contiguous => 1,
            Spread::Scattered => scatter(usable),
        };
        let mut id = 0;
        let mut next = || {
            let block = u32::try_from(1 + id).expect("block ids have 32 bits");
            id = (id + step) % usable;
            block
        };
        let groups = spans(rank, tokens)
            .map(|(first, end)| (first, (first..end).map(|_| next()).collect()))
            .collect();
        Ok(Self { groups })
    }

    /// The table position of a block, if it is one of the group's.
    pub(crate) fn position(&self, group: usize, block: u32) -> Option<u64> {
        let (first, blocks) = &self.groups[group];
        blocks.iter().position(|&id| id == block).map(|index| first + index as u64)
    }

    pub(crate) fn tables(&self) -> Vec<Table<'_>> {
        self.groups.iter().map(|(first, blocks)| Table { first: *first, blocks }).collect()
    }
}

/// A step through `count` blocks that meets each once and never goes to a neighbour, where `count`
/// allows it.
fn scatter(count: u64) -> u64 {
    let wanted = (count as f64 * 0.618) as u64;
    let coprime = |step: &u64| gcd(*step, count) == 1;
    (2..=wanted.max(2)).rev().find(coprime).unwrap_or(1)
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
