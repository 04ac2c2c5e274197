//! The proof of a plan, by other means than those that made it.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use kvferry_layout::{MAX_AXES, Manifest, StateBox};

use crate::compile::cover::{Budget, Cover, Part, common, in_cycle};
use crate::compile::merge::Merged;
use crate::compile::series::{Value, pair, repeated};
use crate::compile::unwritten::Unwritten;
use crate::incompatible::Incompatible;
use crate::nest::{BothSteps, Loop, Steps};
use crate::walk::{BlockLayout, Pairing};

/// Proves that the parts cover every piece of the destination exactly once, each from a source piece
/// of the same state that holds it: every part lies in both pieces, no two parts of a piece share an
/// element, and together they have as many elements as the piece. And that of every piece those tokens
/// are copied that it needs, none that its group does not keep, and none that the source does not.
pub(crate) fn prove_cover(
    destination: &Manifest,
    sources: &[&Manifest],
    cover: &Cover,
    budget: &mut Budget,
) -> Result<(), Incompatible> {
    let mut by_piece: BTreeMap<(usize, usize), Vec<&Part>> = BTreeMap::new();
    for part in &cover.parts {
        by_piece.entry(part.to).or_default().push(part);
    }
    for (group, facts) in destination.groups().iter().enumerate() {
        for (number, piece) in facts.pieces.iter().enumerate() {
            let unproven = |problem: String| {
                Err(Incompatible::Unproven { state: piece.state.clone(), problem })
            };
            let Some(window) = cover.windows.get(group).and_then(|windows| windows.get(number))
            else {
                return unproven("it is not said which tokens are copied".to_owned());
            };
            if !window.keeps(&facts.need(piece)) || !facts.window.keeps(window) {
                return unproven(format!("{window} are copied"));
            }
            let parts = by_piece.remove(&(group, number)).unwrap_or_default();
            let mut cycle = if piece.phase.is_all() { 1 } else { piece.phase.modulus };
            for part in &parts {
                cycle = cycle.max(part.phase.modulus);
            }
            let whole = in_cycle(&piece.bounds, piece.phase, cycle);
            let mut taken: Vec<StateBox> = vec![];
            let mut volume = 0;
            for part in parts {
                let source_group = sources[part.source].groups().get(part.from.0);
                let held = source_group.and_then(|group| group.pieces.get(part.from.1));
                let Some(held) = held.filter(|held| held.state == piece.state) else {
                    return unproven(format!("{part:?} is not read from a piece of the state"));
                };
                let entries = destination.kind(piece).law.entries;
                if entries > 0 && !source_group.is_some_and(|group| group.window.keeps(window)) {
                    return unproven(format!("{part:?} is read where {window} are not kept"));
                }
                let held = in_cycle(&held.bounds, held.phase, cycle);
                for one in in_cycle(&part.bounds, part.phase, cycle) {
                    budget.spend(taken.len() + whole.len() + held.len(), &piece.state)?;
                    let size = common(&one, &one);
                    let inside = |boxes: &[StateBox]| {
                        boxes.iter().map(|outer| common(outer, &one)).sum::<u128>() == size
                    };
                    if !inside(&whole) || !inside(&held) {
                        return unproven(format!("{part:?} lies outside its pieces"));
                    }
                    if taken.iter().any(|other| common(other, &one) > 0) {
                        return unproven(format!("{part:?} is written twice"));
                    }
                    volume += size;
                    taken.push(one);
                }
            }
            let needed: u128 = whole.iter().map(|whole| common(whole, whole)).sum();
            if volume != needed {
                return unproven(format!("{volume} of {needed} elements are covered"));
            }
        }
    }
    Ok(())
}

/// What [`prove_merging`] is about: what a plan makes of its parts and of the destination's own blocks.
pub(crate) struct Claims<'a> {
    pub(crate) cover: &'a Cover,
    pub(crate) pairings: &'a [Pairing],
    /// For every source rank.
    pub(crate) sources: &'a [Vec<Merged>],
    pub(crate) unwritten: &'a [Unwritten],
    pub(crate) rest: &'a [Merged],
}

/// Proves that the merged nests copy each byte of an entry that the parts name, from where and to where the
/// parts say, once, at the pace of the part's pairing, and nothing else; and that those of the
/// rest are the destination's own pieces and scratch. What the parts say is read off the manifests; the
/// two are compared as [`series`](crate::compile::series), in time that grows with the number of parts.
pub(crate) fn prove_merging(
    destination: &Manifest,
    sources: &[&Manifest],
    claims: &Claims<'_>,
) -> Result<(), Incompatible> {
    let Cover { parts, windows } = claims.cover;
    let mut pairings = Numbers::new(claims.pairings);
    let mut ledger = Ledger::default();
    for part in parts {
        let source = sources[part.source];
        let from = &source.groups()[part.from.0].pieces[part.from.1];
        let to = &destination.groups()[part.to.0].pieces[part.to.1];
        let (kept, copied) = (source.groups()[part.from.0].window, windows[part.to.0][part.to.1]);
        let (source_holding, source_steps) = BlockLayout::new(source, part.from, kept);
        let (destination_holding, destination_steps) =
            BlockLayout::new(destination, part.to, copied);
        let kind = destination.kind(to);
        let pairing = Pairing {
            law: kind.law,
            phase: part.phase,
            source: source_holding,
            destination: destination_holding,
        };
        let class = Class {
            source: part.source,
            pairing: pairings.of(&pairing, &to.state)?,
            regions: (from.view.region, to.view.region),
            steps: BothSteps { source: source_steps, destination: destination_steps },
        };
        let mut at = (
            start(source, from.view.region, from.view.offset),
            start(destination, to.view.region, to.view.offset),
        );
        let mut loops = [Loop::default(); MAX_AXES];
        for (axis, span) in part.bounds.0.iter().enumerate() {
            let strides = (from.view.axes[axis], to.view.axes[axis]);
            at.0 += (span.start - from.bounds.0[axis].start) * strides.0;
            at.1 += (span.start - to.bounds.0[axis].start) * strides.1;
            loops[axis] = Loop { count: span.len(), source: strides.0, destination: strides.1 };
        }
        let loops = &loops[..part.bounds.0.len()];
        ledger.expect(class, &to.state, at, kind.format.bytes.into(), loops);
    }
    for (source, nests) in claims.sources.iter().enumerate() {
        ledger.take(source, nests)?;
    }
    ledger.settle()?;
    prove_rest(destination, claims)
}

fn prove_rest(destination: &Manifest, claims: &Claims<'_>) -> Result<(), Incompatible> {
    let mut unwritten = Numbers::new(claims.unwritten);
    let mut ledger = Ledger::default();
    for (index, group) in destination.groups().iter().enumerate() {
        let own = |count, stride| Loop { count, source: stride, destination: stride };
        for (piece_index, piece) in group.pieces.iter().enumerate() {
            let window = claims.cover.windows[index][piece_index];
            let (held, steps) = BlockLayout::new(destination, (index, piece_index), window);
            let kind = destination.kind(piece);
            let entries = Unwritten::Entries(kind.law, held);
            let class = Class {
                source: 0,
                pairing: unwritten.of(&entries, &piece.state)?,
                regions: (piece.view.region, piece.view.region),
                steps: BothSteps { source: steps, destination: steps },
            };
            let at = start(destination, piece.view.region, piece.view.offset);
            let mut loops = [Loop::default(); MAX_AXES];
            let spans = piece.bounds.0.iter().zip(&piece.view.axes);
            for (repeat, (span, &stride)) in loops.iter_mut().zip(spans) {
                *repeat = own(span.len(), stride);
            }
            let loops = &loops[..piece.bounds.0.len()];
            ledger.expect(class, &piece.state, (at, at), kind.format.bytes.into(), loops);
        }
        for scratch in &group.scratch {
            let steps = Steps { block: scratch.block, ..Steps::default() };
            let blocks = Unwritten::Blocks { group: index };
            let class = Class {
                source: 0,
                pairing: unwritten.of(&blocks, "scratch")?,
                regions: (scratch.region, scratch.region),
                steps: BothSteps { source: steps, destination: steps },
            };
            let at = start(destination, scratch.region, scratch.offset);
            let loops: Vec<Loop> =
                scratch.dims.iter().map(|&(count, stride)| own(count, stride)).collect();
            ledger.expect(class, "scratch", (at, at), scratch.run, &loops);
        }
    }
    ledger.take(0, claims.rest)?;
    ledger.settle()
}

fn start(manifest: &Manifest, region: u32, offset: u64) -> u64 {
    manifest.regions()[region as usize].base + offset
}

/// The numbers of a plan's pairings, or of what it may leave unwritten.
struct Numbers<'a, T> {
    list: &'a [T],
    numbers: HashMap<&'a T, usize>,
    /// The one that was asked for last.
    last: usize,
}

impl<'a, T: Eq + Hash> Numbers<'a, T> {
    fn new(list: &'a [T]) -> Self {
        Self { list, numbers: list.iter().zip(0..).collect(), last: 0 }
    }

    fn of(&mut self, wanted: &T, state: &str) -> Result<usize, Incompatible> {
        if self.list.get(self.last) != Some(wanted) {
            let known = self.numbers.get(wanted).copied();
            self.last = known.ok_or_else(|| unproven(state, "its entries are not walked"))?;
        }
        Ok(self.last)
    }
}

fn unproven(state: &str, problem: &str) -> Incompatible {
    Incompatible::Unproven { state: state.to_owned(), problem: problem.to_owned() }
}

/// What pairs of bytes must have in common to be walked alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Class {
    source: usize,
    pairing: usize,
    regions: (u32, u32),
    steps: BothSteps,
}

/// Pairs of bytes that are expected, less those that are found, by class.
#[derive(Default)]
struct Ledger<'a> {
    accounts: Vec<Account<'a>>,
    numbers: HashMap<Class, usize>,
    /// The account that was used last.
    last: usize,
    /// Loops seen lately, and what they amount to: layers are alike.
    lately: Vec<(u64, Vec<Loop>, Value)>,
}

struct Account<'a> {
    class: Class,
    /// One of its states.
    state: &'a str,
    balance: Value,
}

impl<'a> Ledger<'a> {
    /// Adds what a part says: a run with loops around it, from `at` on.
    fn expect(&mut self, class: Class, state: &'a str, at: (u64, u64), run: u64, loops: &[Loop]) {
        let value = self.value(at, run, loops);
        let index = self.find(class).unwrap_or_else(|| {
            self.numbers.insert(class, self.accounts.len());
            self.accounts.push(Account { class, state, balance: Value::default() });
            self.accounts.len() - 1
        });
        self.last = index;
        self.accounts[index].balance += value;
    }

    /// Takes what the merged nests of one source say.
    fn take(&mut self, source: usize, merged: &[Merged]) -> Result<(), Incompatible> {
        for Merged { key, nest } in merged {
            let (pairing, regions) = (key.pairing, key.regions);
            let found = self.find(Class { source, pairing, regions, steps: nest.steps });
            let blocks = (nest.steps.source.block, nest.steps.destination.block);
            let index = found.filter(|_| blocks == key.blocks);
            let index = index.ok_or_else(|| unproven("all", "merging made up steps of its own"))?;
            let value = self.value((nest.source, nest.destination), nest.run, &nest.loops);
            self.last = index;
            self.accounts[index].balance -= value;
        }
        Ok(())
    }

    /// Nothing must be left.
    fn settle(self) -> Result<(), Incompatible> {
        match self.accounts.iter().find(|account| account.balance != Value::default()) {
            Some(account) => {
                let problem = "what merging made of it, or of what is walked with it, differs";
                Err(unproven(account.state, problem))
            }
            None => Ok(()),
        }
    }

    fn find(&self, class: Class) -> Option<usize> {
        let last = self.accounts.get(self.last).filter(|account| account.class == class);
        last.map(|_| self.last).or_else(|| self.numbers.get(&class).copied())
    }

    fn value(&mut self, at: (u64, u64), run: u64, loops: &[Loop]) -> Value {
        let known = self.lately.iter().find(|known| known.0 == run && known.1 == loops);
        let repeated = known.map(|known| known.2).unwrap_or_else(|| {
            let value = repeated(run, loops.iter());
            if self.lately.len() < MAX_LATELY {
                self.lately.push((run, loops.to_vec(), value));
            }
            value
        });
        pair(at) * repeated
    }
}

/// Distinct loops that are remembered.
const MAX_LATELY: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::merge::{Key, merge};
    use crate::nest::Nest;

    /// Four layers, 1024 bytes apart on the source and 4096 on the destination, each with two heads of
    /// K and V: 8 bytes a head, K before V on both sides, but at different distances.
    fn layers() -> Vec<(Key, Nest)> {
        let steps = BothSteps {
            source: Steps { block: 256, kernel: 0, entry: 64 },
            destination: Steps { block: 512, kernel: 0, entry: 128 },
        };
        let key = Key { group: 0, pairing: 0, regions: (0, 0), blocks: (256, 512), layer: 0 };
        let nest = |layer: u64, section: u64| {
            let start = (layer * 1024 + section * 32, 100_000 + layer * 4096 + section * 64);
            let heads = Loop { count: 2, source: 8, destination: 16 };
            (key, Nest::new(start, steps, 8, vec![heads]))
        };
        (0..4).flat_map(|layer| [nest(layer, 0), nest(layer, 1)]).collect()
    }

    /// Whether merged nests are proven to be the layers.
    fn proven(merged: &[Merged]) -> bool {
        let mut ledger = Ledger::default();
        for (key, nest) in layers() {
            let (pairing, regions) = (key.pairing, key.regions);
            let class = Class { source: 0, pairing, regions, steps: nest.steps };
            ledger.expect(class, "layers", (nest.source, nest.destination), nest.run, &nest.loops);
        }
        ledger.take(0, merged).and_then(|()| ledger.settle()).is_ok()
    }

    #[test]
    fn what_merging_makes_of_layers_is_proven() {
        let merged = merge(layers());
        assert_eq!(merged.len(), 1);
        assert!(proven(&merged));
        // Not merged at all, it is too.
        let apart: Vec<Merged> = layers().into_iter().flat_map(|nest| merge(vec![nest])).collect();
        assert_eq!(apart.len(), 8);
        assert!(proven(&apart));
    }

    /// Every number of a merged nest, one at a time.
    #[test]
    fn no_number_of_a_merged_nest_can_change() {
        type Number = fn(&mut Merged) -> &mut u64;
        let numbers: [Number; 14] = [
            |merged| &mut merged.nest.source,
            |merged| &mut merged.nest.destination,
            |merged| &mut merged.nest.run,
            |merged| &mut merged.nest.loops[0].count,
            |merged| &mut merged.nest.loops[0].source,
            |merged| &mut merged.nest.loops[0].destination,
            |merged| &mut merged.nest.loops[2].count,
            |merged| &mut merged.nest.loops[2].source,
            |merged| &mut merged.nest.loops[2].destination,
            |merged| &mut merged.nest.steps.source.entry,
            |merged| &mut merged.nest.steps.destination.entry,
            |merged| &mut merged.nest.steps.source.block,
            |merged| &mut merged.key.blocks.0,
            |merged| &mut merged.key.blocks.1,
        ];
        for (which, number) in numbers.iter().enumerate() {
            for change in [1, 2, 8, u64::MAX] {
                let mut merged = merge(layers());
                let number = number(&mut merged[0]);
                *number = number.wrapping_add(change);
                assert!(!proven(&merged), "number {which}, {change} more");
            }
        }
    }

    /// As many bytes, the same source bytes and the same destination bytes, but other pairs.
    #[test]
    fn sections_of_equal_size_cannot_change_places() {
        let mut nests = layers();
        for pair in nests.chunks_exact_mut(2) {
            let [keys, values] = pair else { unreachable!() };
            std::mem::swap(&mut keys.1.source, &mut values.1.source);
        }
        assert!(!proven(&merge(nests)));
        // Nor can two layers, nor two strides.
        let mut nests = layers();
        let (first, third) = (nests[0].1.source, nests[4].1.source);
        (nests[0].1.source, nests[4].1.source) = (third, first);
        assert!(!proven(&merge(nests)));
    }

    #[test]
    fn nothing_is_lost_or_said_twice() {
        let mut nests = layers();
        let lost = nests.pop().expect("eight nests");
        assert!(!proven(&merge(nests.clone())));
        // The same number of bytes: one nest twice, another not at all.
        nests.push(nests[0].clone());
        let apart: Vec<Merged> = nests.iter().flat_map(|nest| merge(vec![nest.clone()])).collect();
        assert!(!proven(&apart));
        nests.pop();
        nests.push(lost);
        assert!(proven(&merge(nests)));
    }

    #[test]
    fn another_rhythm_or_region_is_another_thing() {
        let mut merged = merge(layers());
        merged[0].key.pairing = 1;
        assert!(!proven(&merged));
        let mut merged = merge(layers());
        merged[0].key.regions = (0, 1);
        assert!(!proven(&merged));
    }
}
