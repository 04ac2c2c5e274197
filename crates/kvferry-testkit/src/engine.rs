//! Engines: how a model is spread over ranks and laid out in their memories.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::{fmt, iter};

use kvferry_layout::{
    Draft, Group, Kernel, Law, Manifest, Phase, Piece, Place, Region, Scratch, Span, StateBox, View,
};

use crate::memory::{Dim, Index, Met, Node, Seen};
use crate::model::{Model, Sight, State, Tensor};

/// A tensor of a model: the indices of its layer and of itself.
pub type TensorAt = (usize, usize);

/// Everything that is decided about an engine before its memory is laid out.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Its name.
    pub name: String,
    /// The model that it runs.
    pub model: Model,
    /// The layers of each pipeline stage.
    pub stages: Vec<Vec<usize>>,
    /// Ranks of a stage.
    pub lanes: u64,
    /// How each tensor is spread over the lanes.
    pub spreads: BTreeMap<TensorAt, Spread>,
    /// The groups.
    pub groups: Vec<GroupRecipe>,
    /// The memory of a rank.
    pub slabs: Vec<Slab>,
    /// Columns of every convolution beyond the live ones.
    pub speculative: u64,
    /// Whether regions follow each other without a byte between them.
    pub adjacent_regions: bool,
    /// What the manifest says for strides that are never taken, because there is but one of a thing.
    pub idle_stride: Option<u64>,
}

/// How a tensor is spread over the lanes of a stage.
#[derive(Clone, Debug)]
pub struct Spread {
    /// Lanes that take turns with the entries (context parallelism): which of every `modulus` entries
    /// each of them holds.
    pub turns: Vec<Range<u64>>,
    /// See `turns`.
    pub modulus: u64,
    /// Whether neighbouring lanes differ in their turn (and not in their part).
    pub turns_first: bool,
    /// `parts[state][part]`: the ranges on the cut axis that lanes of this part hold. Empty: none.
    pub parts: Vec<Vec<Vec<Range<u64>>>>,
    /// Kernel blocks in a block.
    pub kernels: u64,
}

/// What is decided about a group.
#[derive(Clone, Debug)]
pub struct GroupRecipe {
    /// Its name.
    pub name: String,
    /// What it holds, over all stages.
    pub tensors: Vec<TensorAt>,
    /// Tokens of a block; `None` for recurrent states.
    pub tokens_per_block: Option<u64>,
    /// What it keeps live.
    pub sight: Sight,
    /// Tokens kept beyond that.
    pub extra: u64,
    /// Tensors that say how far back their layer looks, though the group may keep more.
    pub needs: BTreeSet<TensorAt>,
    /// Number of blocks.
    pub blocks: u32,
    /// The id of dead entries.
    pub null_block: Option<u32>,
    /// Groups with equal pools must not use one block id twice.
    pub pool: usize,
}

/// A stretch of memory.
#[derive(Clone, Debug)]
pub struct Slab {
    /// The region that it is part of.
    pub region: usize,
    /// Padding before it.
    pub lead: u64,
    /// Groups whose tensors lie here; several overlay each other block by block.
    pub arms: Vec<Arm>,
}

/// The tensors of one group in a slab, and their order in memory.
#[derive(Clone, Debug)]
pub struct Arm {
    /// The group.
    pub group: usize,
    /// Which of its tensors.
    pub tensors: Vec<TensorAt>,
    /// From the outermost loop to the innermost. What is not named follows in the order block, layer,
    /// kernel block, slot, section, axes.
    pub order: Vec<Step>,
    /// Padding after every turn of a loop.
    pub pads: Vec<(Step, u64)>,
    /// Padding before the arm, inside of a block where arms overlay each other.
    pub lead: u64,
    /// Bytes of every block that hold nothing to move.
    pub scratch: u64,
}

/// One level of a memory order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Layer after layer.
    Layer,
    /// Section after section: K and V, x|B|C.
    Section,
    /// Blocks.
    Block,
    /// Kernel blocks of a block.
    Kernel,
    /// Entries of a kernel block.
    Slot,
    /// An axis.
    Axis(String),
}

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
    addresses: Vec<u64>,
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

const UNASSIGNED: u64 = u64::MAX;

impl Spread {
    /// The usual split: whole units, as even as they go; fewer units than ranks are replicated.
    pub fn balanced(tensor: &Tensor, lanes: u64) -> Self {
        let parts = tensor.states.iter().map(|state| balanced_parts(state, lanes)).collect();
        Self { turns: one_turn(), modulus: 1, turns_first: false, parts, kernels: 1 }
    }

    /// The same with blocks of `kernels` kernel blocks.
    pub fn kernels(mut self, kernels: u64) -> Self {
        self.kernels = kernels;
        self
    }
}

/// The turns of a single lane: everything.
pub fn one_turn() -> Vec<Range<u64>> {
    iter::once(0..1).collect()
}

/// The turns of `lanes` lanes that take `interleave` entries each.
pub fn equal_turns(lanes: u64, interleave: u64) -> Vec<Range<u64>> {
    (0..lanes).map(|lane| lane * interleave..(lane + 1) * interleave).collect()
}

/// The ranges of the cut axis on each of `lanes` lanes: units from `r * units / lanes` on, at least one.
pub fn balanced_parts(state: &State, lanes: u64) -> Vec<Vec<Range<u64>>> {
    let Some(cut) = state.cut else { return vec![vec![]; lanes as usize] };
    let unit = state.axes[cut.axis].length / cut.units;
    let part = |lane: u64| {
        let first = lane * cut.units / lanes;
        let end = ((lane + 1) * cut.units / lanes).max(first + 1);
        iter::once(first * unit..end * unit).collect()
    };
    (0..lanes).map(part).collect()
}

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

impl GroupRecipe {
    /// Entries of a block on a rank that holds `turn` of every `modulus` of them.
    pub fn slots(&self, law: Law, modulus: u64, turn: &Range<u64>) -> u64 {
        let Some(tokens) = self.tokens_per_block else { return law.open.into() };
        let entries = tokens * u64::from(law.entries) / u64::from(law.tokens);
        assert_eq!(entries * u64::from(law.tokens), tokens * u64::from(law.entries));
        assert_eq!(entries % modulus, 0);
        entries / modulus * (turn.end - turn.start)
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
