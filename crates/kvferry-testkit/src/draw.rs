//! Random engines for a model.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::engine::{
    Arm, Engine, GroupRecipe, Recipe, Slab, Spread, Step, TensorAt, balanced_parts, equal_turns,
    one_turn,
};
use crate::model::{Model, Sight, State, Tensor};
use crate::random::Dice;

/// Which side of a transfer an engine is for: what it keeps beyond a window depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// It is read: it often keeps more than it must.
    Source,
    /// It is filled: it seldom asks for more than it must.
    Destination,
}

/// A random engine that runs `model`, laid out in a way that is sound.
pub fn engine(model: &Model, side: Side, dice: &mut Dice) -> Engine {
    let layers = model.layers.len();
    let stages = draw_stages(layers, dice);
    let lanes = match stages.len() {
        1 => dice.pick(&[1, 1, 2, 2, 3, 4, 4, 5, 6, 8]),
        _ => dice.pick(&[1, 1, 2, 2, 3, 4]),
    };
    let divisors: Vec<u64> = (1..=lanes).filter(|turns| lanes % turns == 0).collect();
    let context = if dice.chance(30) { dice.pick(&divisors) } else { 1 };
    let shared_turns = draw_turns(context, dice);
    let wild = dice.chance(40);
    let mut spreads = BTreeMap::new();
    for (at, tensor) in model.tensors() {
        let (turns, modulus) = match tensor.law.entries > 0 && dice.chance(85) {
            true => shared_turns.clone(),
            false => (one_turn(), 1),
        };
        let turns_first = dice.chance(50);
        let lanes = lanes / turns.len() as u64;
        let parts = tensor.states.iter().map(|state| draw_parts(state, lanes, wild, dice));
        let spread = Spread { parts: parts.collect(), turns, modulus, turns_first, kernels: 1 };
        spreads.insert(at, spread);
    }
    let mut groups = draw_groups(model, side, &spreads, dice);
    for group in &groups {
        for at in &group.tensors {
            let tensor = &model.layers[at.0].tensors[at.1];
            let spread = spreads.get_mut(at).expect("every tensor has a spread");
            // Lanes with turns of different lengths have different numbers of slots in a block.
            let slots =
                spread.turns.iter().map(|turn| group.slots(tensor.law, spread.modulus, turn));
            let slots: Vec<u64> = slots.collect();
            if group.tokens_per_block.is_some() && dice.chance(40) {
                let all = |count: &u64| slots.iter().all(|slots| slots % count == 0);
                let divisors: Vec<u64> = (1..=slots[0]).filter(all).collect();
                spread.kernels = dice.pick(&divisors);
            }
        }
    }
    draw_pools(&mut groups, dice);
    let slabs = draw_slabs(model, &groups, dice);
    Recipe {
        name: format!("{side:?}").to_lowercase(),
        model: model.clone(),
        stages,
        lanes,
        spreads,
        groups,
        slabs,
        speculative: dice.pick(&[0, 0, 1, 2]),
        adjacent_regions: dice.chance(40),
        idle_stride: dice.chance(15).then(|| dice.pick(&[0, 1, 7, 1 << 40, u64::MAX])),
    }
    .build()
}

/// The turns of `lanes` lanes: equal ones, or ranges of any length, which may overlap.
fn draw_turns(lanes: u64, dice: &mut Dice) -> (Vec<Range<u64>>, u64) {
    if dice.chance(60) {
        let interleave = dice.pick(&[1, 1, 2, 3]);
        return (equal_turns(lanes, interleave), lanes * interleave);
    }
    let mut turns = vec![];
    let mut end = 0;
    for _ in 0..lanes {
        let start = end - u64::from(end > 0 && dice.chance(30));
        end += dice.within(1, 2);
        turns.push(start..end);
    }
    (turns, end)
}

/// Any assignment of layers to stages.
fn draw_stages(layers: usize, dice: &mut Dice) -> Vec<Vec<usize>> {
    let count = if dice.chance(50) { 1 } else { dice.within(1, 3) as usize };
    let mut stages = vec![vec![]; count];
    let contiguous = dice.chance(70);
    for layer in 0..layers {
        let stage = if contiguous { layer * count / layers } else { dice.index(count) };
        stages[stage].push(layer);
    }
    stages
}

/// The ranges of the cut axis that each of `lanes` lanes holds. Every element is held somewhere.
fn draw_parts(state: &State, lanes: u64, wild: bool, dice: &mut Dice) -> Vec<Vec<Range<u64>>> {
    let Some(cut) = state.cut else { return vec![vec![]; lanes as usize] };
    let length = state.axes[cut.axis].length;
    let unit = length / cut.units;
    let choice = if wild { dice.within(0, 6) } else { 0 };
    match choice {
        // Any cuts, at any element; a lane may hold nothing.
        1 | 2 => {
            let unit = if choice == 1 { 1 } else { unit };
            let mut cuts: Vec<u64> =
                (1..lanes).map(|_| dice.within(0, length / unit) * unit).collect();
            cuts.extend([0, length]);
            cuts.sort_unstable();
            let parts = cuts.windows(2).map(|pair| pair[0]..pair[1]);
            parts.map(|part| if part.is_empty() { vec![] } else { vec![part] }).collect()
        }
        // Overlapping ranges.
        3 => {
            let halo = dice.within(1, 2) * unit;
            let widen = |range: Range<u64>| {
                range.start.saturating_sub(halo)..(range.end + halo).min(length)
            };
            let parts = balanced_parts(state, lanes);
            parts.into_iter().map(|part| part.into_iter().map(widen).collect()).collect()
        }
        // Two ranges for each lane, from both ends.
        4 => {
            let mut parts = vec![vec![]; lanes as usize];
            for at in 0..cut.units {
                let turn = at % (2 * lanes);
                let lane = turn.min(2 * lanes - 1 - turn);
                parts[lane as usize].push(at * unit..(at + 1) * unit);
            }
            parts
        }
        // Its part, and some of it or of another's once more, at other bytes.
        6 => {
            let mut parts = balanced_parts(state, lanes);
            for part in &mut parts {
                let start = dice.within(0, cut.units - 1);
                part.push(start * unit..dice.within(start + 1, cut.units) * unit);
            }
            parts
        }
        // Everything everywhere.
        5 => vec![vec![0..length]; lanes as usize],
        _ => balanced_parts(state, lanes),
    }
}

fn draw_groups(
    model: &Model,
    side: Side,
    spreads: &BTreeMap<TensorAt, Spread>,
    dice: &mut Dice,
) -> Vec<GroupRecipe> {
    let promote = dice.chance(if side == Side::Source { 35 } else { 20 });
    // Tensors that may share a group have equal keys.
    let mut classes: BTreeMap<(bool, Sight, u64), Vec<TensorAt>> = BTreeMap::new();
    let by_layer_kind = dice.chance(50);
    for (at, tensor) in model.tensors() {
        let recurrent = tensor.law.entries == 0;
        let sight = if promote { Sight::Full } else { tensor.sight };
        let class = if by_layer_kind { at.1 as u64 } else { 0 };
        classes.entry((recurrent, sight, class)).or_default().push(at);
    }
    let mut groups = vec![];
    for ((recurrent, sight, _), mut tensors) in classes {
        let split = if dice.chance(60) { 1 } else { dice.within(1, 3) as usize };
        if dice.chance(20) {
            dice.shuffle(&mut tensors);
        }
        let mut parts = vec![vec![]; split];
        for (index, at) in tensors.into_iter().enumerate() {
            parts[index % split].push(at);
        }
        for tensors in parts.into_iter().filter(|part| !part.is_empty()) {
            let tokens_per_block = (!recurrent).then(|| draw_block(model, &tensors, spreads, dice));
            let extra = match side {
                Side::Source => dice.pick(&[0, 0, 1, 3]),
                Side::Destination => dice.pick(&[0, 0, 0, 0, 0, 1]),
            };
            let outspoken = dice.chance(60);
            let needs = tensors.iter().copied().filter(|_| outspoken && dice.chance(75)).collect();
            groups.push(GroupRecipe {
                name: format!("group {}", groups.len()),
                needs,
                tensors,
                tokens_per_block,
                sight,
                extra,
                blocks: 0,
                null_block: None,
                pool: 0,
            });
        }
    }
    dice.shuffle(&mut groups);
    groups
}

/// A number of tokens that gives every tensor a whole number of turns in a block.
fn draw_block(
    model: &Model,
    tensors: &[TensorAt],
    spreads: &BTreeMap<TensorAt, Spread>,
    dice: &mut Dice,
) -> u64 {
    let fits = |tokens: u64, at: &TensorAt| {
        let law = model.layers[at.0].tensors[at.1].law;
        let spread = &spreads[at];
        let entries = tokens * u64::from(law.entries);
        entries.is_multiple_of(u64::from(law.tokens))
            && (entries / u64::from(law.tokens)).is_multiple_of(spread.modulus)
    };
    let unit = (1..).find(|&tokens| tensors.iter().all(|at| fits(tokens, at))).expect("some block");
    unit * dice.within(1, (12 / unit).max(1))
}

/// Decides which groups share their blocks, and how many blocks there are.
fn draw_pools(groups: &mut [GroupRecipe], dice: &mut Dice) {
    let style = dice.within(0, 2);
    let count = groups.len();
    for (index, group) in groups.iter_mut().enumerate() {
        group.pool = match style {
            0 => index,
            1 => 0,
            _ => dice.index(count),
        };
    }
    for pool in 0..count {
        let members = groups.iter().filter(|group| group.pool == pool).count() as u64;
        let blocks = (dice.within(3, 9) + members * dice.within(2, 4)) as u32;
        let null_block = dice.chance(60).then(|| dice.pick(&[0, blocks - 1, blocks / 2]));
        for group in groups.iter_mut().filter(|group| group.pool == pool) {
            let fewer = dice.pick(&[0, 0, 1, 2]);
            let low = null_block.map_or(0, |id| id + 1);
            group.blocks = (blocks - fewer).max(low).max(1);
            if null_block.is_none() && group.tokens_per_block.is_none() && dice.chance(10) {
                group.blocks = 1;
            }
            group.null_block = null_block;
        }
    }
}

fn draw_slabs(model: &Model, groups: &[GroupRecipe], dice: &mut Dice) -> Vec<Slab> {
    let one_region = dice.chance(40);
    let mut slabs: Vec<Slab> = vec![];
    for pool in 0..groups.len() {
        let members: Vec<usize> =
            (0..groups.len()).filter(|&group| groups[group].pool == pool).collect();
        let longest = members.iter().map(|&group| groups[group].tensors.len()).max().unwrap_or(0);
        if longest == 0 {
            continue;
        }
        // One slab: the block is outermost. As many as tensors: the layer is.
        let count = match dice.within(0, 2) {
            0 => 1,
            1 => longest,
            _ => dice.within(1, longest as u64) as usize,
        };
        for slab in 0..count {
            let mut arms = vec![];
            for &group in &members {
                let tensors: Vec<TensorAt> = groups[group]
                    .tensors
                    .iter()
                    .enumerate()
                    .filter(|(index, _)| index % count == slab)
                    .map(|(_, &at)| at)
                    .collect();
                if !tensors.is_empty() {
                    arms.push(draw_arm(model, group, tensors, dice));
                }
            }
            if !arms.is_empty() {
                let region = if one_region { 0 } else { slabs.len() };
                slabs.push(Slab { region, lead: dice.pick(&[0, 0, 1, 16, 37]), arms });
            }
        }
    }
    slabs
}

fn draw_arm(model: &Model, group: usize, tensors: Vec<TensorAt>, dice: &mut Dice) -> Arm {
    let mut axes: Vec<Step> = vec![];
    for at in &tensors {
        let tensor: &Tensor = &model.layers[at.0].tensors[at.1];
        for axis in tensor.states.iter().flat_map(|state| &state.axes) {
            let step = Step::Axis(axis.name.clone());
            if !axes.contains(&step) {
                axes.push(step);
            }
        }
    }
    let order = if dice.chance(55) { usual_order(dice) } else { any_order(axes.clone(), dice) };
    let mut pads = vec![];
    for _ in 0..dice.pick(&[0, 0, 0, 1, 2]) {
        let mut steps = axes.clone();
        steps.extend([Step::Block, Step::Block, Step::Kernel, Step::Slot]);
        pads.push((dice.pick(&steps), dice.pick(&[1, 2, 8])));
    }
    let scratch = dice.pick(&[0, 0, 0, 0, 5]);
    // Scratch has few dimensions, and all axes may lie outside of the block.
    let scratch = if axes.len() > 4 { 0 } else { scratch };
    Arm { group, tensors, order, pads, lead: dice.pick(&[0, 0, 0, 4]), scratch }
}

/// The orders that engines use.
fn usual_order(dice: &mut Dice) -> Vec<Step> {
    let axis = |name: &str| Step::Axis(name.to_owned());
    let head = axis("head");
    let mut order = match dice.within(0, 7) {
        0 => vec![Step::Layer, Step::Block, Step::Kernel, head, Step::Slot],
        1 => vec![Step::Layer, Step::Block, Step::Kernel, Step::Slot, head],
        2 => vec![Step::Layer, head, Step::Block, Step::Kernel, Step::Slot],
        3 => vec![Step::Block, Step::Layer, Step::Kernel, head, Step::Slot],
        4 => vec![Step::Block, Step::Layer, Step::Kernel, Step::Slot, head],
        5 => vec![Step::Block, head, Step::Layer, Step::Kernel, Step::Slot],
        // K and V in planes of their own, and interleaved by block.
        6 => vec![Step::Layer, Step::Section, Step::Block, Step::Kernel, Step::Slot, head],
        _ => vec![Step::Layer, Step::Block, Step::Section, Step::Kernel, head, Step::Slot],
    };
    // A convolution is (dim, width) or (width, dim).
    match dice.chance(50) {
        true => order.extend([Step::Section, axis("channel"), axis("column")]),
        false => order.extend([axis("column"), Step::Section, axis("channel")]),
    }
    let mut seen = vec![];
    order.retain(|step| {
        let new = !seen.contains(step);
        seen.push(step.clone());
        new
    });
    order
}

/// An order that nobody uses.
fn any_order(mut order: Vec<Step>, dice: &mut Dice) -> Vec<Step> {
    order.extend([Step::Layer, Step::Section, Step::Block, Step::Kernel, Step::Slot]);
    dice.shuffle(&mut order);
    order
}
