//! The proof of a plan, by other means than those that made it.

use std::collections::BTreeMap;

use kvferry_layout::{Manifest, StateBox};

use crate::cover::{Part, Steps, common, in_cycle};
use crate::incompatible::Incompatible;

/// Proves that the parts cover every piece of the destination exactly once, each from a source piece
/// of the same state that holds it: every part lies in both pieces, no two parts of a piece share an
/// element, and together they have as many elements as the piece.
pub(crate) fn prove(
    destination: &Manifest,
    sources: &[&Manifest],
    parts: &[Part],
    steps: &mut Steps,
) -> Result<(), Incompatible> {
    let mut by_piece: BTreeMap<(usize, usize), Vec<&Part>> = BTreeMap::new();
    for part in parts {
        by_piece.entry(part.to).or_default().push(part);
    }
    for (group, facts) in destination.groups().iter().enumerate() {
        for (number, piece) in facts.pieces.iter().enumerate() {
            let unproven = |problem: String| {
                Err(Incompatible::Unproven { state: piece.state.clone(), problem })
            };
            let parts = by_piece.remove(&(group, number)).unwrap_or_default();
            let mut cycle = if piece.phase.is_all() { 1 } else { piece.phase.modulus };
            for part in &parts {
                cycle = cycle.max(part.phase.modulus);
            }
            let whole = in_cycle(&piece.bounds, piece.phase, cycle);
            let mut taken: Vec<StateBox> = vec![];
            let mut volume = 0;
            for part in parts {
                let held = sources[part.source].groups().get(part.from.0);
                let held = held.and_then(|group| group.pieces.get(part.from.1));
                let Some(held) = held.filter(|held| held.state == piece.state) else {
                    return unproven(format!("{part:?} is not read from a piece of the state"));
                };
                let held = in_cycle(&held.bounds, held.phase, cycle);
                for one in in_cycle(&part.bounds, part.phase, cycle) {
                    steps.spend(taken.len() + whole.len() + held.len(), &piece.state)?;
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
