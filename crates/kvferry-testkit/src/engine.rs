//! Engines with their ranks laid out: what each rank says, and the truth about its memory.

use std::fmt;
use std::ops::Range;

use kvferry_layout::{Law, Manifest};

use crate::model::Sight;
use crate::recipe::Recipe;

/// An engine with its ranks laid out.
#[derive(Clone, Debug)]
pub struct Engine {
    /// What was decided.
    pub recipe: Recipe,
    /// Its ranks, stage by stage.
    pub ranks: Vec<Rank>,
}

impl fmt::Display for Engine {
    /// What a person wants to know of an engine that failed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let recipe = &self.recipe;
        let (stages, lanes, speculative) = (&recipe.stages, recipe.lanes, recipe.speculative);
        writeln!(
            f,
            "{}: stages {stages:?}, {lanes} lanes, {speculative} extra columns",
            recipe.name
        )?;
        for (index, group) in recipe.groups.iter().enumerate() {
            writeln!(
                f,
                "  group {index}: {} blocks of {:?} tokens, pool {}, null {:?}, {}",
                group.blocks,
                group.tokens_per_block,
                group.pool,
                group.null_block,
                group.sight.window(group.extra)
            )?;
            for rank in &self.ranks {
                for (piece, holding) in
                    rank.manifest.groups()[index].pieces.iter().zip(&rank.holdings[index])
                {
                    writeln!(
                        f,
                        "    rank {}: {}{} of {:?}, {}, {}; need {:?}; {} slots; {:?}",
                        rank.manifest.rank(),
                        piece.state,
                        piece.bounds,
                        holding.lengths,
                        holding.law,
                        piece.phase,
                        holding.need,
                        holding.slots,
                        piece.view
                    )?;
                }
                for scratch in &rank.manifest.groups()[index].scratch {
                    writeln!(f, "    rank {}: {scratch:?}", rank.manifest.rank())?;
                }
            }
        }
        Ok(())
    }
}

/// One rank: the manifest that it would send, and the truth about its memory.
#[derive(Clone, Debug)]
pub struct Rank {
    /// What it says.
    pub manifest: Manifest,
    /// What it holds, by group, in the order of the manifest's pieces.
    pub holdings: Vec<Vec<Holding>>,
    /// `scratch[group][block]`: addresses of the scratch bytes.
    pub scratch: Vec<Vec<Vec<u64>>>,
}

/// A part of a state on a rank, with the address of every element.
#[derive(Clone, Debug)]
pub struct Holding {
    /// The state's name.
    pub state: String,
    /// The state's law.
    pub law: Law,
    /// Bytes of an element.
    pub element: u64,
    /// Lengths of the axes in the whole model.
    pub lengths: Vec<u64>,
    /// The range held on each axis.
    pub bounds: Vec<Range<u64>>,
    /// How far back its layer looks, where the rank says so.
    pub need: Option<Sight>,
    /// Which entries are held.
    pub share: Share,
    /// Entries of a block.
    pub slots: u64,
    /// `addresses[block][slot][element]`, flat; elements in row-major order of the range held.
    pub(crate) addresses: Vec<u64>,
}

/// The entries that a rank holds: those of its turns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Which of every `modulus` entries.
    pub turn: Range<u64>,
    /// See `turn`.
    pub modulus: u64,
}

impl Share {
    /// Whether entry `entry` is held.
    pub fn holds(&self, entry: u64) -> bool {
        self.turn.contains(&(entry % self.modulus))
    }

    /// The first `count` entries that are held: an entry's place in this list is its place on the rank.
    pub fn first(&self, count: u64) -> Vec<u64> {
        (0..).filter(|&entry| self.holds(entry)).take(count as usize).collect()
    }
}

impl Holding {
    /// Elements of an entry.
    pub fn volume(&self) -> u64 {
        self.bounds.iter().map(|range| range.end - range.start).product()
    }

    /// Address of an element of an entry.
    pub fn address(&self, block: u32, slot: u64, element: u64) -> u64 {
        let at = (u64::from(block) * self.slots + slot) * self.volume() + element;
        let address = self.addresses[at as usize];
        assert_ne!(address, UNASSIGNED, "{}: the walk missed an element", self.state);
        address
    }

    /// The number of an element in the whole state, from its number on this rank.
    pub fn whole(&self, mut element: u64) -> u64 {
        let mut place = 1;
        let mut whole = 0;
        for (range, length) in self.bounds.iter().zip(&self.lengths).rev() {
            let count = range.end - range.start;
            whole += (range.start + element % count) * place;
            element /= count;
            place *= length;
        }
        whole
    }
}

/// No address yet.
pub(crate) const UNASSIGNED: u64 = u64::MAX;
