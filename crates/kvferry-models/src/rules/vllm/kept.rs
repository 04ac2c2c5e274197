//! A model as an engine that is told so keeps it: what depends on more than the model itself.

use std::borrow::Cow;

use super::quantised;
use super::spec::OWN_BLOCK;
use crate::error::RulesError;
use crate::model::{Cache, Model, Sort};
use crate::rules::topology::Topology;

/// The model with what the engine decides of its caches. They stay the same in number and order.
pub(super) fn kept<'a>(
    model: &'a Model,
    topology: &Topology,
) -> Result<Cow<'a, Model>, RulesError> {
    let mut model = Cow::Borrowed(model);
    widen_rings(&mut model, topology);
    if let Some(kv) = topology.kv {
        quantised::quantise(&mut model, topology, kv)?;
    }
    Ok(model)
}

/// A ring has a slot for every token of a step, and for the one before: a power of two.
fn widen_rings(model: &mut Cow<'_, Model>, topology: &Topology) {
    let slots = (u64::from(topology.spec) + 2).next_power_of_two();
    let is_narrow = |cache: &Cache| {
        let mut axes = cache.states().flat_map(|state| &state.kind.axes);
        matches!(&cache.sort, Sort::Recurrent(kind) if OWN_BLOCK.contains(&kind.word()))
            && axes.any(|axis| axis.name == SLOT && axis.length < slots)
    };
    if !model.caches.iter().any(is_narrow) {
        return;
    }
    for cache in model.to_mut().caches.iter_mut().filter(|cache| is_narrow(cache)) {
        let states = cache.tensors.iter_mut().flat_map(|tensor| &mut tensor.states);
        let axes = states.flat_map(|state| &mut state.kind.axes);
        for axis in axes.filter(|axis| axis.name == SLOT) {
            axis.length = slots;
        }
    }
}

/// The axis of a ring along which its tokens lie.
const SLOT: &str = "slot";
