//! From a recipe to an engine: every rank's memory is laid out, walked, and described.

use std::iter;
use std::ops::Range;

use kvferry_layout::{
    Draft, Group, Kernel, Manifest, Phase, Piece, Place, Region, Scratch, Span, StateBox, View,
};

use crate::engine::{Engine, Holding, Rank, Share, UNASSIGNED};
use crate::memory::{Dim, Index, Met, Node, Seen};
use crate::model::{Sight, State, Tensor};
use crate::recipe::{Arm, Recipe, Slab, Step, TensorAt};

/// A part of a state on one rank, on its way into memory.
struct Item<'a> {
    group: usize,
    at: TensorAt,
    state: &'a State,
    section: (usize, usize),
    tensor: &'a Tensor,
    bounds: Vec<Range<u64>>,
    need: Option<Sight>,
    share: Share,
    slots: u64,
    kernels: u64,
    axes: Vec<usize>,
}

impl Recipe {
    /// Lays the engine out. Panics where the recipe makes no engine or the manifest is refused: that
    /// is a defect of the recipe or of the checks.
    pub fn build(self) -> Engine {
        let mut names: Vec<String> = vec![];
        for (_, state) in self.model.states() {
            for axis in &state.axes {
                if !names.contains(&axis.name) {
                    names.push(axis.name.clone());
                }
            }
        }
        let mut ranks = vec![];
        for stage in 0..self.stages.len() {
            for lane in 0..self.lanes {
                ranks.push(self.rank(stage, lane, &names));
            }
        }
        Engine { recipe: self, ranks }
    }

    fn items(&self, stage: usize, lane: u64, names: &[String]) -> Vec<Item<'_>> {
        let mut items = vec![];
        for (group, facts) in self.groups.iter().enumerate() {
            for &at in facts.tensors.iter().filter(|at| self.stages[stage].contains(&at.0)) {
                let tensor = &self.model.layers[at.0].tensors[at.1];
                let spread = &self.spreads[&at];
                let turns = spread.turns.len() as u64;
                let parts = self.lanes / turns;
                let (part, turn) = match spread.turns_first {
                    true => (lane / turns, lane % turns),
                    false => (lane % parts, lane / parts),
                };
                let turn = spread.turns[turn as usize].clone();
                let share = Share { turn, modulus: spread.modulus };
                let slots = facts.slots(tensor.law, spread.modulus, &share.turn);
                for (section, state) in tensor.states.iter().enumerate() {
                    let ranges = match state.cut {
                        Some(_) => spread.parts[section][part as usize].clone(),
                        None => iter::once(0..0).collect(),
                    };
                    for (number, range) in ranges.into_iter().enumerate() {
                        let mut bounds: Vec<Range<u64>> =
                            state.axes.iter().map(|axis| 0..axis.length).collect();
                        if let Some(cut) = state.cut {
                            bounds[cut.axis] = range;
                        }
                        let named = |name: &String| names.iter().position(|other| other == name);
                        let axes = state.axes.iter().map(|axis| named(&axis.name).unwrap());
                        items.push(Item {
                            group,
                            at,
                            state,
                            section: (section, number),
                            tensor,
                            bounds,
                            need: facts.needs.contains(&at).then_some(tensor.sight),
                            share: share.clone(),
                            slots,
                            kernels: spread.kernels,
                            axes: axes.collect(),
                        });
                    }
                }
            }
        }
        items
    }

    fn rank(&self, stage: usize, lane: u64, names: &[String]) -> Rank {
        let items = self.items(stage, lane, names);
        let mut trees: Vec<Vec<Node>> = vec![];
        for slab in &self.slabs {
            if trees.len() <= slab.region {
                trees.resize(slab.region + 1, vec![]);
            }
            if let Some(tree) = self.slab(slab, &items, names) {
                trees[slab.region].push(Node::Gap(slab.lead));
                trees[slab.region].push(tree);
            }
        }
        let trees: Vec<Node> =
            trees.into_iter().filter(|parts| !parts.is_empty()).map(Node::Sequence).collect();

        let mut holdings: Vec<Holding> = items.iter().map(|item| self.holding(item)).collect();
        let mut scratch: Vec<Vec<Vec<u64>>> =
            self.groups.iter().map(|group| vec![vec![]; group.blocks as usize]).collect();
        let mut draft = self.draft(stage, lane);
        let mut pieces: Vec<Option<Piece>> = items.iter().map(|_| None).collect();
        let mut base = 0x10_0000 * (1 + stage as u64 * self.lanes + lane);
        for (region, tree) in trees.iter().enumerate() {
            let mut cursor = base;
            let mut index = Index { block: 0, kernel: 0, slot: 0, axes: vec![0; names.len()] };
            tree.walk(&mut cursor, &mut index, &mut |address, index, met| match met {
                Met::Element(item) => {
                    let blocks = u64::from(self.groups[items[item].group].blocks);
                    if index.block < blocks {
                        holdings[item].assign(&items[item], index, address);
                    }
                }
                Met::Scratch(group, bytes) => {
                    if index.block < u64::from(self.groups[group].blocks) {
                        scratch[group][index.block as usize].extend(address..address + bytes);
                    }
                }
            });
            let bytes = cursor - base;
            draft.regions.push(Region { base, bytes, place: Place::Host });
            base = cursor + if self.adjacent_regions { 0 } else { 256 - cursor % 128 };

            let mut seen = vec![];
            tree.describe(0, &mut vec![], &mut seen);
            for fact in seen {
                match fact.met {
                    Met::Element(item) => {
                        let piece =
                            piece(&items[item], region as u32, &fact, self.idle_stride, &mut draft);
                        assert!(pieces[item].replace(piece).is_none(), "one place for an item");
                    }
                    Met::Scratch(group, run) => {
                        draft.groups[group].scratch.push(scratch_fact(region as u32, run, &fact));
                    }
                }
            }
        }
        let mut by_group: Vec<Vec<Holding>> = self.groups.iter().map(|_| vec![]).collect();
        for ((item, piece), holding) in items.iter().zip(pieces).zip(holdings) {
            let at = item.at;
            let piece = piece.unwrap_or_else(|| panic!("tensor {at:?} is in no slab"));
            draft.groups[item.group].pieces.push(piece);
            by_group[item.group].push(holding);
        }
        let manifest = match Manifest::new(draft.clone()) {
            Ok(manifest) => manifest,
            Err(error) => panic!("a sound engine was refused: {error}\n{draft:#?}"),
        };
        Rank { manifest, holdings: by_group, scratch }
    }

    fn draft(&self, stage: usize, lane: u64) -> Draft {
        let groups = self.groups.iter().map(|group| Group {
            name: group.name.clone(),
            blocks: group.blocks,
            null_block: group.null_block,
            tokens_per_block: group.tokens_per_block,
            window: group.sight.window(group.extra),
            pieces: vec![],
            scratch: vec![],
        });
        Draft {
            identity: self.model.identity.clone(),
            engine: self.name.clone(),
            rank: (stage as u64 * self.lanes + lane) as u32,
            label: format!("pp{stage} tp{lane}"),
            regions: vec![],
            kinds: vec![],
            writers: Default::default(),
            groups: groups.collect(),
        }
    }

    fn holding(&self, item: &Item<'_>) -> Holding {
        let mut holding = Holding {
            state: item.state.name.clone(),
            law: item.tensor.law,
            element: item.state.format.bytes.into(),
            lengths: item.state.axes.iter().map(|axis| axis.length).collect(),
            bounds: item.bounds.clone(),
            need: item.need,
            share: item.share.clone(),
            slots: item.slots,
            addresses: vec![],
        };
        let blocks = u64::from(self.groups[item.group].blocks);
        holding.addresses = vec![UNASSIGNED; (blocks * item.slots * holding.volume()) as usize];
        holding
    }

    fn slab(&self, slab: &Slab, items: &[Item<'_>], names: &[String]) -> Option<Node> {
        let mut arms = vec![];
        let overlaid = slab.arms.len() > 1;
        let mut blocks = 0;
        for arm in &slab.arms {
            let chosen: Vec<usize> = (0..items.len())
                .filter(|&item| {
                    items[item].group == arm.group && arm.tensors.contains(&items[item].at)
                })
                .collect();
            if chosen.is_empty() {
                continue;
            }
            let mut order = arm.order.clone();
            let usual = [Step::Block, Step::Layer, Step::Kernel, Step::Slot, Step::Section];
            let axes = names.iter().map(|name| Step::Axis(name.clone()));
            for step in usual.into_iter().chain(axes) {
                if !order.contains(&step) {
                    order.push(step);
                }
            }
            if overlaid {
                order.retain(|step| *step != Step::Block);
            }
            let group_blocks = u64::from(self.groups[arm.group].blocks);
            blocks = blocks.max(group_blocks);
            let builder = Builder { items, names, arm, blocks: group_blocks, recipe: self };
            let mut node = builder.build(&chosen, &order);
            if overlaid && arm.scratch > 0 {
                node = Node::Sequence(vec![node, Node::Scratch(arm.group, arm.scratch)]);
            }
            arms.push(match arm.lead {
                0 => node,
                lead => Node::Sequence(vec![Node::Gap(lead), node]),
            });
        }
        match (arms.len(), overlaid) {
            (0, _) => None,
            (_, false) => arms.pop(),
            (_, true) => Some(Node::Loop(Dim::Block, blocks, Node::Overlay(arms).into())),
        }
    }
}

impl Holding {
    fn assign(&mut self, item: &Item<'_>, index: &Index, address: u64) {
        let mut element = 0;
        for (range, &axis) in self.bounds.iter().zip(&item.axes) {
            element = element * (range.end - range.start) + index.axes[axis];
        }
        let slot = index.kernel * (item.slots / item.kernels) + index.slot;
        let at = ((index.block * self.slots + slot) * self.volume() + element) as usize;
        assert_eq!(self.addresses[at], UNASSIGNED, "{}: one address for an element", self.state);
        self.addresses[at] = address;
    }
}

/// Turns an order of loops into memory.
struct Builder<'a> {
    items: &'a [Item<'a>],
    names: &'a [String],
    arm: &'a Arm,
    blocks: u64,
    recipe: &'a Recipe,
}

impl Builder<'_> {
    fn build(&self, chosen: &[usize], order: &[Step]) -> Node {
        let Some((step, rest)) = order.split_first() else {
            let element =
                |&item: &usize| Node::Element(item, u64::from(self.items[item].state.format.bytes));
            return Node::Sequence(chosen.iter().map(element).collect());
        };
        // Items that differ at this step lie one after the other.
        let mut parts: Vec<(Key, Vec<usize>)> = vec![];
        for &item in chosen {
            let key = self.key(&self.items[item], step);
            match parts.iter_mut().find(|(other, _)| *other == key) {
                Some((_, part)) => part.push(item),
                None => parts.push((key, vec![item])),
            }
        }
        let mut nodes: Vec<Node> = parts
            .into_iter()
            .map(|(key, part)| match key {
                Key::Count(dim, live, extra) => self.repeat(step, dim, live, extra, &part, rest),
                _ => self.build(&part, rest),
            })
            .collect();
        if nodes.len() == 1 { nodes.remove(0) } else { Node::Sequence(nodes) }
    }

    fn repeat(
        &self,
        step: &Step,
        dim: Dim,
        live: u64,
        extra: u64,
        part: &[usize],
        rest: &[Step],
    ) -> Node {
        let mut body = vec![self.build(part, rest)];
        if dim == Dim::Block && self.arm.scratch > 0 {
            body.push(Node::Scratch(self.arm.group, self.arm.scratch));
        }
        if let Some((_, pad)) = self.arm.pads.iter().find(|(padded, _)| padded == step) {
            body.push(Node::Gap(*pad));
        }
        let body = if body.len() == 1 { body.remove(0) } else { Node::Sequence(body) };
        let stale = body.as_scratch(self.arm.group);
        let live = Node::Loop(dim, live, body.into());
        match extra {
            0 => live,
            _ => Node::Sequence(vec![live, Node::Loop(Dim::Repeat, extra, stale.into())]),
        }
    }

    fn key(&self, item: &Item<'_>, step: &Step) -> Key {
        match step {
            Step::Layer => Key::Layer(item.at.0),
            Step::Section => Key::Section(item.at, item.section),
            Step::Block => Key::Count(Dim::Block, self.blocks, 0),
            Step::Kernel if item.kernels > 1 => Key::Count(Dim::Kernel, item.kernels, 0),
            Step::Kernel => Key::Same,
            Step::Slot => Key::Count(Dim::Slot, item.slots / item.kernels, 0),
            Step::Axis(name) => {
                let axes = item.axes.iter().map(|&axis| (&self.names[axis], axis)).enumerate();
                let Some((at, (_, axis))) = axes.into_iter().find(|(_, (other, _))| *other == name)
                else {
                    return Key::Same;
                };
                let live = item.bounds[at].end - item.bounds[at].start;
                let extra = if name == "column" { self.recipe.speculative } else { 0 };
                Key::Count(Dim::Axis(axis), live, extra)
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Key {
    Same,
    Layer(usize),
    Section(TensorAt, (usize, usize)),
    Count(Dim, u64, u64),
}

/// The facts of a piece, from how its item is seen from outside.
fn piece(
    item: &Item<'_>,
    region: u32,
    seen: &Seen,
    idle_stride: Option<u64>,
    draft: &mut Draft,
) -> Piece {
    let stride = |dim: Dim| {
        let found = seen.loops.iter().find(|(other, _, _)| *other == dim);
        match (found, idle_stride) {
            (None | Some((_, 1, _)), Some(idle)) => idle,
            (found, _) => found.map_or(0, |&(_, _, stride)| stride),
        }
    };
    let kind = item.state.kind(item.tensor.law);
    let kind = match draft.kinds.iter().position(|other| *other == kind) {
        Some(index) => index,
        None => {
            draft.kinds.push(kind);
            draft.kinds.len() - 1
        }
    };
    let held = Span { start: item.share.turn.start, end: item.share.turn.end };
    Piece {
        state: item.state.name.clone(),
        kind: kind as u32,
        bounds: StateBox::new(item.bounds.iter().cloned()),
        phase: Phase { modulus: item.share.modulus, held },
        need: item.need.map(|sight| sight.window(0)),
        view: View {
            region,
            offset: seen.offset,
            block: stride(Dim::Block),
            kernel: (item.kernels > 1 || idle_stride.is_some()).then(|| Kernel {
                entries: item.slots / item.kernels,
                stride: stride(Dim::Kernel),
            }),
            entry: stride(Dim::Slot),
            axes: item.axes.iter().map(|&axis| stride(Dim::Axis(axis))).collect(),
        },
    }
}

fn scratch_fact(region: u32, run: u64, seen: &Seen) -> Scratch {
    let block = seen.loops.iter().find(|(dim, _, _)| *dim == Dim::Block);
    let others = seen.loops.iter().filter(|(dim, count, _)| *dim != Dim::Block && *count > 1);
    Scratch {
        region,
        offset: seen.offset,
        block: block.map_or(0, |&(_, _, stride)| stride),
        run,
        dims: others.map(|&(_, count, stride)| (count, stride)).collect(),
    }
}
