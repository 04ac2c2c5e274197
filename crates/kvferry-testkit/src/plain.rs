//! Engines as they are usually built, to start from when a case is written by hand.

use std::collections::{BTreeMap, BTreeSet};

use crate::engine::{Arm, Engine, GroupRecipe, Recipe, Slab, Spread, Step, TensorAt, equal_turns};
use crate::model::{Model, Sight};

/// How the groups of a hand-written engine lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Every tensor in a region of its own.
    Separate,
    /// The i-th layers of all groups in one region, on the same bytes: blocks of one layer are
    /// neighbours, and a page is as long as the longest.
    LayerOutermost,
    /// All groups on the same bytes of one region: a block holds all layers of its group.
    BlockOutermost,
}

impl Recipe {
    /// An engine of `lanes` ranks with balanced splits, all layers on one stage, blocks of 16 tokens,
    /// one group for every window and one for all recurrent states.
    pub fn plain(name: &str, model: &Model, lanes: u64) -> Self {
        let mut classes: BTreeMap<(bool, Sight), Vec<TensorAt>> = BTreeMap::new();
        for (at, tensor) in model.tensors() {
            classes.entry((tensor.law.entries == 0, tensor.sight)).or_default().push(at);
        }
        let spreads =
            model.tensors().map(|(at, tensor)| (at, Spread::balanced(tensor, lanes))).collect();
        let groups = classes.into_iter().enumerate();
        let groups = groups.map(|(index, ((recurrent, sight), tensors))| GroupRecipe {
            name: format!("{} {index}", if recurrent { "states" } else { "attention" }),
            tensors,
            tokens_per_block: (!recurrent).then_some(16),
            sight,
            extra: 0,
            needs: BTreeSet::new(),
            blocks: 8,
            null_block: None,
            pool: index,
        });
        Self {
            name: name.to_owned(),
            model: model.clone(),
            stages: Vec::from([(0..model.layers.len()).collect()]),
            lanes,
            spreads,
            groups: groups.collect(),
            slabs: vec![],
            speculative: 0,
            adjacent_regions: false,
            idle_stride: None,
        }
    }

    /// Other groups: the layers of each. All tensors of a layer are in its group.
    pub fn grouped(mut self, groups: &[&[usize]]) -> Self {
        let old = self.groups.clone();
        let made = groups.iter().enumerate().map(|(index, layers)| {
            let all = self.model.tensors().map(|(at, _)| at);
            let tensors: Vec<TensorAt> = all.filter(|at| layers.contains(&at.0)).collect();
            let like = old.iter().find(|group| group.tensors.contains(&tensors[0]));
            let like = like.expect("every tensor has a group");
            GroupRecipe { name: format!("group {index}"), tensors, pool: index, ..like.clone() }
        });
        self.groups = made.collect();
        self
    }

    /// Blocks of so many tokens.
    pub fn block(mut self, tokens: u64) -> Self {
        for group in &mut self.groups {
            group.tokens_per_block = group.tokens_per_block.map(|_| tokens);
        }
        self
    }

    /// So many blocks in every group.
    pub fn blocks(mut self, blocks: u32) -> Self {
        for group in &mut self.groups {
            group.blocks = blocks;
        }
        self
    }

    /// Blocks of so many kernel blocks, where they hold tokens.
    pub fn kernels(mut self, kernels: u64) -> Self {
        for group in self.groups.iter().filter(|group| group.tokens_per_block.is_some()) {
            for at in &group.tensors {
                self.spreads.get_mut(at).expect("every tensor has a spread").kernels = kernels;
            }
        }
        self
    }

    /// Entries of all per-token states go in turns of `interleave` to all lanes; each lane then holds
    /// whole entries.
    pub fn context(mut self, interleave: u64) -> Self {
        for (at, tensor) in self.model.tensors().filter(|(_, tensor)| tensor.law.entries > 0) {
            let spread = Spread {
                turns: equal_turns(self.lanes, interleave),
                modulus: self.lanes * interleave,
                ..Spread::balanced(tensor, 1)
            };
            self.spreads.insert(at, spread);
        }
        self
    }

    /// The layers of each pipeline stage.
    pub fn stages(mut self, stages: &[&[usize]]) -> Self {
        self.stages = stages.iter().map(|layers| layers.to_vec()).collect();
        self
    }

    /// Columns of convolutions beyond the live ones.
    pub fn speculative(mut self, columns: u64) -> Self {
        self.speculative = columns;
        self
    }

    /// A window that keeps everything, where it kept less.
    pub fn promoted(mut self) -> Self {
        for group in &mut self.groups {
            group.sight = Sight::Full;
        }
        self
    }

    /// The layers say how far back they look.
    pub fn needing(mut self, layers: &[usize]) -> Self {
        for group in &mut self.groups {
            let stated = group.tensors.iter().filter(|at| layers.contains(&at.0));
            group.needs = stated.copied().collect();
        }
        self
    }

    /// Lays the engine out, every tensor in the given order.
    pub fn lay_out(mut self, memory: Memory, order: &[Step]) -> Engine {
        self.slabs.clear();
        let mut order = order.to_vec();
        if memory == Memory::BlockOutermost {
            order.retain(|step| *step != Step::Block);
            order.insert(0, Step::Block);
        }
        let arm = |group: usize, tensors: Vec<TensorAt>| Arm {
            group,
            tensors,
            order: order.clone(),
            pads: vec![],
            lead: 0,
            scratch: 0,
        };
        match memory {
            Memory::Separate => {
                for (group, facts) in self.groups.iter().enumerate() {
                    for &at in &facts.tensors {
                        let region = self.slabs.len();
                        let arms = vec![arm(group, vec![at])];
                        self.slabs.push(Slab { region, lead: 0, arms });
                    }
                }
            }
            Memory::LayerOutermost => {
                let layers = |group: &GroupRecipe| {
                    let mut layers: Vec<usize> = group.tensors.iter().map(|at| at.0).collect();
                    layers.dedup();
                    layers
                };
                let longest = self.groups.iter().map(|group| layers(group).len()).max();
                for region in 0..longest.unwrap_or(0) {
                    let mut arms = vec![];
                    for (group, facts) in self.groups.iter().enumerate() {
                        let Some(&layer) = layers(facts).get(region) else { continue };
                        let tensors = facts.tensors.iter().copied();
                        arms.push(arm(group, tensors.filter(|at| at.0 == layer).collect()));
                    }
                    self.slabs.push(Slab { region, lead: 0, arms });
                }
            }
            Memory::BlockOutermost => {
                let groups = self.groups.iter().enumerate();
                let arms = groups.map(|(group, facts)| arm(group, facts.tensors.clone()));
                self.slabs.push(Slab { region: 0, lead: 0, arms: arms.collect() });
            }
        }
        if memory != Memory::Separate {
            for group in &mut self.groups {
                group.pool = 0;
            }
        }
        self.build()
    }
}

/// Memory orders by their usual names.
pub mod orders {
    use crate::engine::Step;

    fn axis(name: &str) -> Step {
        Step::Axis(name.to_owned())
    }

    /// Tokens outside of heads, K beside V; convolutions (dim, width).
    pub fn token_major() -> Vec<Step> {
        let mut order = vec![Step::Layer, Step::Block, Step::Kernel, Step::Slot, axis("head")];
        order.extend([Step::Section, axis("channel"), axis("column")]);
        order
    }

    /// Heads outside of tokens, K beside V; convolutions (dim, width).
    pub fn head_major() -> Vec<Step> {
        let mut order = vec![Step::Layer, Step::Block, Step::Kernel, axis("head"), Step::Slot];
        order.extend([Step::Section, axis("channel"), axis("column")]);
        order
    }

    /// Tokens outside of heads, convolutions (width, dim).
    pub fn column_major() -> Vec<Step> {
        let mut order = vec![Step::Layer, Step::Block, Step::Kernel, Step::Slot, axis("head")];
        order.extend([axis("column"), Step::Section, axis("channel")]);
        order
    }

    /// K of all blocks before V of all blocks.
    pub fn planes() -> Vec<Step> {
        vec![Step::Layer, Step::Section, Step::Block, Step::Kernel, Step::Slot, axis("head")]
    }

    /// K of a block, then V of the same block.
    pub fn interleaved_by_block() -> Vec<Step> {
        vec![Step::Layer, Step::Block, Step::Section, Step::Kernel, Step::Slot, axis("head")]
    }
}
