//! Back from what one rank holds to the sizes of the whole model.
//!
//! An engine tells an adapter the shapes of a rank's tensors. Each length is an equation in the sizes of
//! the kind, and so is each of its checks. Whatever equation has one unknown left is solved, until none
//! is. A length that ranks share allows several answers where ranks may hold the same unit: then the size
//! is left open, for somebody else to tell.

use std::collections::BTreeMap;

use super::expression::{Expression, MAX_VALUE};
use super::kind::{Check, PackingWord, StateFacts, StateKind, TensorFacts};
use crate::error::FactsError;
use crate::model::Rule;

/// Far more ranks than any engine has.
const MAX_RANKS: u64 = 1 << 16;

type Sizes = BTreeMap<String, u64>;

impl StateKind {
    /// The sizes that follow from the shapes on one of `ranks` ranks and from those that are `told`.
    /// Sizes that do not follow are left out.
    pub(super) fn solve(
        &self,
        name: &str,
        shapes: &[Vec<u64>],
        told: &Sizes,
        ranks: u64,
    ) -> Result<Sizes, FactsError> {
        let wrong = |problem: String| FactsError::Sizes { kind: name.to_owned(), problem };
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(wrong(format!("{ranks} ranks, but there are 1 to {MAX_RANKS}")));
        }
        self.check_given(shapes, told).map_err(wrong)?;
        let mut sizes = told.clone();
        loop {
            let before = sizes.len();
            for Check(left, right) in &self.checks {
                for (one, other) in [(left, right), (right, left)] {
                    if let Some(value) = value(other, &sizes) {
                        let size = solved(one, value, &sizes);
                        sizes.extend(size.map_err(|()| wrong(check_problem(one, other, &sizes)))?);
                    }
                }
            }
            for (tensor, shape) in self.tensors.iter().zip(shapes) {
                let misfit = |sizes: &Sizes| wrong(shape_problem(tensor, shape, ranks, sizes));
                for (axis, length) in shape.iter().enumerate().skip(1) {
                    for state in &tensor.states {
                        let size = solved(&state.axes[axis].1, *length, &sizes);
                        sizes.extend(size.map_err(|()| misfit(&sizes))?);
                    }
                }
                if let Some(length) = shape.first() {
                    let size = self.solved_share(tensor, *length, &sizes, ranks);
                    sizes.extend(size.map_err(|()| misfit(&sizes))?);
                }
            }
            if sizes.len() == before {
                break;
            }
        }
        for (tensor, shape) in self.tensors.iter().zip(shapes) {
            if !fits(tensor, shape, &sizes, ranks) {
                return Err(wrong(shape_problem(tensor, shape, ranks, &sizes)));
            }
        }
        for Check(left, right) in &self.checks {
            if is_known(left, &sizes)
                && is_known(right, &sizes)
                && value(left, &sizes) != value(right, &sizes)
            {
                return Err(wrong(check_problem(left, right, &sizes)));
            }
        }
        Ok(sizes)
    }

    /// What is wrong with the numbers themselves, before anything is computed.
    fn check_given(&self, shapes: &[Vec<u64>], told: &Sizes) -> Result<(), String> {
        if let Some(size) = told.keys().find(|size| !self.sizes.contains(size)) {
            return Err(format!("it has no size '{size}', only {}", self.sizes.join(", ")));
        }
        if let Some((size, _)) = told.iter().find(|(_, value)| **value == 0) {
            return Err(format!("its size '{size}' is 0, but should be at least 1"));
        }
        let mut numbers = told.values().chain(shapes.iter().flatten());
        if let Some(number) = numbers.find(|number| **number > MAX_VALUE) {
            return Err(format!("{number} is larger than any size"));
        }
        if shapes.len() != self.tensors.len() {
            let (found, expected) = (shapes.len(), self.tensors.len());
            return Err(format!("there are {found} shapes, but it has {expected} tensors"));
        }
        for (tensor, shape) in self.tensors.iter().zip(shapes) {
            let names = names(tensor);
            if tensor.states.len() > 1 && tensor.packing != PackingWord::Convolution {
                return Err(format!("one shape for {names}, which only a convolution joins"));
            }
            if let Some(state) = tensor.states.iter().find(|it| it.axes.len() != shape.len()) {
                let axes = state.axes.len();
                return Err(format!(
                    "the shape {shape:?} of {names}, which should have {axes} axes"
                ));
            }
            if shape.contains(&0) {
                return Err(format!("the shape {shape:?} of {names} is empty"));
            }
        }
        Ok(())
    }

    /// The size that follows from the first axis of a tensor, along which its states follow each other
    /// and ranks share them. `Err` where no size fits.
    fn solved_share(
        &self,
        tensor: &TensorFacts,
        length: u64,
        sizes: &Sizes,
        ranks: u64,
    ) -> Result<Option<(String, u64)>, ()> {
        let (known, open): (Vec<_>, Vec<_>) =
            tensor.states.iter().partition(|state| is_held_known(state, sizes));
        let Some(first) = open.first() else { return Ok(None) };
        let whole = &first.axes[0].1;
        if open.iter().any(|state| state.axes[0].1 != *whole || state.split != first.split) {
            return Ok(None);
        }
        let Some(size) = unknown(whole, sizes) else { return Ok(None) };
        let mut left = length;
        for state in known {
            left = left.checked_sub(held(state, sizes, ranks).ok_or(())?).ok_or(())?;
        }
        let count = open.len() as u64;
        if left == 0 || !left.is_multiple_of(count) {
            return Err(());
        }
        let Some((_, units)) = &first.split else {
            return solved(whole, left / count, sizes);
        };
        if unknown(units, sizes).is_some_and(|other| other != size) || has_several(units, sizes) {
            return Ok(None);
        }
        // All ranks together hold so many different shares.
        let even = self.limits.iter().any(|it| it.count == *units && it.rule == Rule::Divides);
        let shares = (1..=ranks).filter(|shares| match even {
            true => *shares == ranks,
            false => ranks.is_multiple_of(*shares),
        });
        let mut found: Vec<u64> = vec![];
        for shares in shares {
            let total = (left / count).checked_mul(shares).ok_or(())?;
            let Ok(Some((_, value))) = solved(whole, total, sizes) else { continue };
            let mut all = sizes.clone();
            all.insert(size.to_owned(), value);
            if held(first, &all, ranks) == Some(left / count) && !found.contains(&value) {
                found.push(value);
            }
        }
        match found[..] {
            [] => Err(()),
            [value] => Ok(Some((size.to_owned(), value))),
            _ => Ok(None),
        }
    }
}

/// The one unknown of `expression`, for which it has the value `result`. `Err` where no size does.
fn solved(
    expression: &Expression,
    result: u64,
    sizes: &Sizes,
) -> Result<Option<(String, u64)>, ()> {
    let Some(size) = unknown(expression, sizes) else { return Ok(None) };
    if !expression.can_be_solved_for(size) {
        return Ok(None);
    }
    let found = expression.solved_for(size, result, &|part| value(part, sizes));
    let found = found.filter(|value| (1..=MAX_VALUE).contains(value));
    found.map(|value| Some((size.to_owned(), value))).ok_or(())
}

/// What one of `ranks` ranks holds along the first axis of a state: `None` where not all of its sizes
/// are known, or where ranks cannot share it.
fn held(state: &StateFacts, sizes: &Sizes, ranks: u64) -> Option<u64> {
    let whole = value(&state.axes.first()?.1, sizes)?;
    let Some((_, units)) = &state.split else { return Some(whole) };
    let units = value(units, sizes).filter(|units| *units > 0)?;
    let shared = units.is_multiple_of(ranks) || ranks.is_multiple_of(units);
    (shared && whole.is_multiple_of(units)).then(|| (units / ranks).max(1) * (whole / units))
}

fn is_held_known(state: &StateFacts, sizes: &Sizes) -> bool {
    let whole = state.axes.first().is_none_or(|(_, whole)| is_known(whole, sizes));
    whole && state.split.as_ref().is_none_or(|(_, units)| is_known(units, sizes))
}

/// Whether a shape is what the sizes make of it, as far as they are known.
fn fits(tensor: &TensorFacts, shape: &[u64], sizes: &Sizes, ranks: u64) -> bool {
    let states = &tensor.states;
    let inner = shape.iter().enumerate().skip(1).all(|(axis, length)| {
        let axes = states.iter().map(|state| &state.axes[axis].1);
        axes.filter(|axis| is_known(axis, sizes)).all(|axis| value(axis, sizes) == Some(*length))
    });
    let Some(first) = shape.first() else { return true };
    if !states.iter().all(|state| is_held_known(state, sizes)) {
        return inner;
    }
    let total: Option<u64> = states.iter().map(|state| held(state, sizes, ranks)).sum();
    inner && total == Some(*first)
}

fn value(expression: &Expression, sizes: &Sizes) -> Option<u64> {
    let look = |size: &str| Ok::<_, std::convert::Infallible>(sizes.get(size).copied());
    expression.value(&look).ok()
}

fn is_known(expression: &Expression, sizes: &Sizes) -> bool {
    expression.names().into_iter().all(|name| sizes.contains_key(name))
}

/// The one size in it that is not known.
fn unknown<'a>(expression: &'a Expression, sizes: &Sizes) -> Option<&'a str> {
    let mut names = expression.names().into_iter().filter(|name| !sizes.contains_key(*name));
    let first = names.next()?;
    names.all(|name| name == first).then_some(first)
}

fn has_several(expression: &Expression, sizes: &Sizes) -> bool {
    !is_known(expression, sizes) && unknown(expression, sizes).is_none()
}

fn shape_problem(tensor: &TensorFacts, shape: &[u64], ranks: u64, sizes: &Sizes) -> String {
    let (names, sizes) = (names(tensor), list(sizes));
    format!("the shape {shape:?} of {names} on one of {ranks} ranks does not fit the sizes {sizes}")
}

fn check_problem(one: &Expression, other: &Expression, sizes: &Sizes) -> String {
    format!("{one} should equal {other}, which does not fit the sizes {}", list(sizes))
}

fn names(tensor: &TensorFacts) -> String {
    tensor.states.iter().map(|state| state.name.as_str()).collect::<Vec<_>>().join(" + ")
}

fn list(sizes: &Sizes) -> String {
    let sizes: Vec<_> = sizes.iter().map(|(name, size)| format!("{name} = {size}")).collect();
    sizes.join(", ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::Facts;
    use super::super::kind::LawWord;
    use super::*;
    use crate::model::{Sort, Tensor};
    use crate::presets;

    /// The shapes that a rank's tensors have.
    fn shapes(tensors: &[Tensor], ranks: u64) -> Vec<Vec<u64>> {
        let shape = |tensor: &Tensor| {
            let held: Vec<_> = tensor.states.iter().map(|state| state.held(0, ranks)).collect();
            let mut shape: Vec<u64> = held[0].0.iter().map(kvferry_layout::Span::len).collect();
            shape[0] = held.iter().map(|held| held.0[0].len()).sum();
            shape
        };
        tensors.iter().map(shape).collect()
    }

    #[test]
    fn every_preset_is_found_again_from_its_shapes() {
        let states = Facts::shipped().states();
        let (mut kinds, mut seen) = (BTreeSet::new(), BTreeSet::new());
        for preset in presets::all() {
            let model = preset.model().unwrap();
            for ranks in [1, 2, 4, 8] {
                if model.limits.iter().any(|limit| limit.refuses(ranks).is_some()) {
                    continue;
                }
                for cache in &model.caches {
                    let Sort::Recurrent(kind) = &cache.sort else { continue };
                    let shapes = shapes(&cache.tensors, ranks);
                    kinds.insert(kind.clone());
                    if !seen.insert((kind.clone(), shapes.clone(), ranks)) {
                        continue;
                    }
                    let mut sizes =
                        states.solve(kind.word(), &shapes, &Sizes::new(), ranks).unwrap();
                    if !sizes.contains_key("groups") && kind.word() == "mamba2" {
                        // One group on each of several ranks: only the whole model tells.
                        assert!(ranks > 1);
                        let whole = self::shapes(&cache.tensors, 1);
                        sizes = states.solve(kind.word(), &whole, &Sizes::new(), 1).unwrap();
                    }
                    let given: Vec<(&str, u64)> =
                        sizes.iter().map(|(name, size)| (name.as_str(), *size)).collect();
                    let format = &cache.states().next().unwrap().kind.format;
                    let formats = [("model", format), ("state", format)];
                    let found = states.tensors(kind.word(), &given, &formats).unwrap();
                    for (found, own) in found.iter().zip(&cache.tensors) {
                        for (found, own) in found.states.iter().zip(&own.states) {
                            assert_eq!(found.kind.axes, own.kind.axes, "{kind:?} on {ranks}");
                            assert_eq!(found.split, own.split, "{kind:?} on {ranks}");
                        }
                    }
                }
            }
        }
        let recurrent = states.kinds.values().filter(|kind| kind.law == LawWord::Sequence);
        let all = recurrent.count();
        assert_eq!(kinds.len(), all, "every recurrent kind: {kinds:?}");
    }
}
