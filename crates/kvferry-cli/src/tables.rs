//! Made-up requests: block tables as an engine could hand them out.

use std::collections::BTreeSet;

use kvferry_layout::Manifest;
use kvferry_layout::arithmetic::gcd;
use kvferry_plan::{BlockTable, Table};

/// How a request's blocks lie in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// No two that follow each other in a table follow each other in memory: what a busy engine's
    /// tables look like.
    Scattered,
    /// One after the other: the best case.
    Contiguous,
}

impl Spread {
    /// What it is called.
    pub fn word(self) -> &'static str {
        match self {
            Self::Scattered => "scattered",
            Self::Contiguous => "contiguous",
        }
    }
}

/// A pool is too small for a request.
#[derive(Clone, Copy, Debug)]
pub struct TooFew {
    /// Blocks that the request takes, those that mark dead entries included.
    pub needed: u64,
    /// Blocks that there are.
    pub blocks: u64,
}

/// One block table for every group of an engine, for a request of `tokens` tokens. No block id is in
/// two of them, so that a block id tells its group.
pub fn for_request(
    rank: &Manifest,
    tokens: u64,
    spread: Spread,
) -> Result<Vec<BlockTable>, TooFew> {
    let needed = blocks_needed(rank, tokens);
    let blocks = rank.groups().iter().map(|group| u64::from(group.blocks)).min().unwrap_or(0);
    if needed > blocks {
        return Err(TooFew { needed, blocks });
    }
    let dead = dead_ids(rank);
    let usable = blocks - dead.iter().filter(|&&id| u64::from(id) < blocks).count() as u64;
    let step = match spread {
        Spread::Contiguous => 1,
        Spread::Scattered => scatter(usable),
    };
    let mut at = 0;
    let mut next = || {
        // The id of the usable block number `at`.
        let mut id = u32::try_from(at).expect("there are fewer blocks than ids");
        dead.iter().for_each(|&dead| id += u32::from(dead <= id));
        at = (at + step) % usable;
        id
    };
    let tables = spans(rank, tokens);
    Ok(tables
        .map(|(first, end)| BlockTable { first, blocks: (first..end).map(|_| next()).collect() })
        .collect())
}

/// The tables as requests want them.
pub fn borrowed(tables: &[BlockTable]) -> Vec<Table<'_>> {
    tables.iter().map(BlockTable::borrow).collect()
}

/// Blocks that a request of `tokens` tokens takes, those that mark dead entries included.
pub fn blocks_needed(rank: &Manifest, tokens: u64) -> u64 {
    let taken: u64 = spans(rank, tokens).map(|(first, end)| end - first).sum();
    taken + dead_ids(rank).len() as u64
}

/// Ids that no request gets. Engines mark dead entries with one; where a manifest does not say which,
/// it is block 0 in all that are known.
fn dead_ids(rank: &Manifest) -> BTreeSet<u32> {
    rank.groups().iter().filter_map(|group| group.null_block).chain([0]).collect()
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

/// A step through `count` blocks that meets each once and never goes to a neighbour, where `count`
/// allows it.
fn scatter(count: u64) -> u64 {
    let wanted = (count as f64 * 0.618) as u64;
    let coprime = |step: &u64| gcd(*step, count) == 1;
    (2..=wanted.max(2)).rev().find(coprime).unwrap_or(1)
}
