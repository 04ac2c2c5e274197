//! What of a request can be read layer by layer, while the source still computes the layers after it.

use std::collections::BTreeSet;

use kvferry_layout::{Manifest, Piece};

use crate::compile::{Plan, Spread};
use crate::incompatible::Incompatible;

/// A plan that can be read layer by layer: in it nothing of one layer is merged with anything of another.
/// It reads what the usual plan reads, in more copies.
#[derive(Clone, Debug)]
pub struct LayerPlan {
    plan: Plan,
    layers: Vec<Layer>,
}

/// The states whose names have the same beginning, up to the last slash: those of them that grow with the
/// request ([`Growth`](crate::Growth)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// That beginning.
    pub name: String,
    /// What it is read from: a source rank, by its index, and a state there.
    pub reads: BTreeSet<(usize, String)>,
}

impl LayerPlan {
    /// Compiles the plan of `destination`, as [`Plan::compile_spread`] does.
    pub fn compile(
        destination: &Manifest,
        sources: &[&Manifest],
        how: Spread,
    ) -> Result<Self, Incompatible> {
        let pieces = destination.groups().iter().flat_map(|group| &group.pieces);
        let names: BTreeSet<&str> = pieces.map(Piece::layer).collect();
        let names: Vec<&str> = names.into_iter().collect();
        let piece = |(group, piece): (usize, usize)| &destination.groups()[group].pieces[piece];
        let number = |to| names.binary_search(&piece(to).layer()).unwrap_or(0);
        let mut plan = Plan::compile_by_layer(destination, sources, how, &number)?;

        let grows = plan.growth().groups;
        let mut reads = vec![BTreeSet::new(); names.len()];
        for part in plan.parts.iter().filter(|part| grows[part.to.0]) {
            reads[number(part.to)].insert((part.source, piece(part.to).state.clone()));
        }
        // Layers of which nothing grows are not counted.
        let mut layers = vec![];
        let mut numbers = vec![usize::MAX; names.len()];
        for (index, reads) in reads.into_iter().enumerate().filter(|(_, reads)| !reads.is_empty()) {
            numbers[index] = layers.len();
            layers.push(Layer { name: names[index].to_owned(), reads });
        }
        for merged in plan.sources.iter_mut().flatten() {
            merged.key.layer = numbers[merged.key.layer];
        }
        Ok(Self { plan, layers })
    }

    /// All layers that grow with the request.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The part of the plan that reads some of the layers, by their index, and nothing else. It leaves no
    /// rest: that is for whoever reads what comes last.
    pub fn of(&self, layers: impl Fn(usize) -> bool) -> Plan {
        let Plan { pairings, sources, groups, source_groups, reads, holds, .. } = &self.plan;
        let chosen = sources.iter().map(|nests| {
            let chosen = nests.iter().filter(|merged| layers(merged.key.layer));
            chosen.cloned().collect()
        });
        Plan {
            parts: vec![],
            pairings: pairings.clone(),
            sources: chosen.collect(),
            rest: vec![],
            unwritten: vec![],
            groups: groups.clone(),
            source_groups: *source_groups,
            reads: reads.clone(),
            windowed: vec![],
            holds: holds.clone(),
        }
    }
}
