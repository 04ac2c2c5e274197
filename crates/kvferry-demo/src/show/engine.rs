//! What the show knows of an engine, and the blocks it hands out.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use fastrand::Rng;
use kvferry_layout::Manifest;
use kvferry_models::Topology;
use kvferry_plan::BlockTable;

use crate::crew::MemberId;

pub(super) struct Engine {
    pub(super) name: String,
    pub(super) topology: Topology,
    pub(super) manifests: Vec<Manifest>,
    pub(super) scheduler: Option<MemberId>,
    pub(super) ranks: Vec<MemberId>,
    pub(super) cards: HashMap<MemberId, Vec<u8>>,
    pub(super) listening: bool,
    pub(super) up: bool,
    /// Counts its lives.
    pub(super) life: usize,
    pub(super) restart_at: Option<Instant>,
    pub(super) free: VecDeque<u32>,
    pub(super) blocks: usize,
}

impl Engine {
    pub(super) fn new(name: String, topology: Topology, manifests: Vec<Manifest>) -> Self {
        let groups = manifests.iter().flat_map(Manifest::groups);
        let blocks = groups.map(|group| group.blocks).min().unwrap_or(0);
        Self {
            name,
            topology,
            manifests,
            scheduler: None,
            ranks: vec![],
            cards: HashMap::new(),
            listening: false,
            up: false,
            life: 0,
            restart_at: None,
            // Block 0 marks dead entries.
            free: (1..blocks).collect(),
            blocks: blocks.saturating_sub(1) as usize,
        }
    }

    /// How many blocks a request of so many tokens takes.
    pub(super) fn need(&self, tokens: u64) -> usize {
        let groups = self.manifests[0].groups().iter();
        groups
            .map(|group| match group.tokens_per_block {
                None => 1,
                Some(block) => {
                    (tokens.div_ceil(block) - group.window.first_live(tokens) / block) as usize
                }
            })
            .sum()
    }

    /// Block tables for a request; `None` when there are not enough blocks.
    pub(super) fn allocate(&mut self, tokens: u64, dice: &mut Rng) -> Option<Vec<BlockTable>> {
        if self.free.len() < self.need(tokens) {
            return None;
        }
        let tables = self.manifests[0].groups().iter().map(|group| {
            let Some(block) = group.tokens_per_block else {
                return BlockTable { first: 0, blocks: self.free.drain(..1).collect() };
            };
            let dead = group.window.first_live(tokens) / block;
            let live = (tokens.div_ceil(block) - dead) as usize;
            let live = self.free.drain(..live);
            // Some engines clip what is dead, others mark it.
            if chance(dice, 50) {
                BlockTable { first: dead, blocks: live.collect() }
            } else {
                let dead = std::iter::repeat_n(0, dead as usize);
                BlockTable { first: 0, blocks: dead.chain(live).collect() }
            }
        });
        Some(tables.collect())
    }

    pub(super) fn give_back(&mut self, tables: &[BlockTable]) {
        let blocks = tables.iter().flat_map(|table| &table.blocks).filter(|block| **block != 0);
        self.free.extend(blocks);
    }
}

/// The longest request for which a quarter of every pool is enough.
pub(super) fn longest(engines: &[Engine]) -> u64 {
    let fits = |tokens: u64| engines.iter().all(|engine| engine.need(tokens) * 4 <= engine.blocks);
    (0..=11).map(|shift| 1 << shift).take_while(|tokens| fits(*tokens)).last().unwrap_or(0)
}

/// True in `percent` of a hundred throws.
pub(super) fn chance(dice: &mut Rng, percent: u8) -> bool {
    dice.u8(0..100) < percent
}
