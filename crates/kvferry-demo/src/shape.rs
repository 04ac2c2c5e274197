//! The engines of a demo: a released model with fewer layers, in pools of a handy size.

use kvferry_layout::Manifest;
use kvferry_models::rules::vllm;
use kvferry_models::{Model, Topology, presets};

use crate::words::Setup;

/// About how large a rank's pool may be.
const POOL_BYTES: u64 = 48 << 20;
const FEWEST_BLOCKS: u64 = 24;
const MOST_BLOCKS: u64 = 512;

/// The first layers of a model: at least `fewest`, and so many that every kind of memory is there.
pub(crate) fn reduced(name: &str, fewest: u32) -> Result<Model, String> {
    let mut model =
        presets::find(name).and_then(|p| p.model()).map_err(|error| error.to_string())?;
    let mut layers = 0;
    let mut seen = vec![];
    for cache in model.caches.iter().filter(|cache| !cache.draft) {
        if !seen.contains(&cache.sort) {
            seen.push(cache.sort.clone());
            layers = layers.max(cache.layer + 1);
        }
    }
    model.layers = layers.max(fewest).min(model.layers);
    let layers = model.layers;
    model.caches.retain(|cache| cache.layer < layers);
    Ok(model)
}

/// The manifests of an engine's ranks, at made-up addresses.
pub(crate) fn manifests(setup: &Setup) -> Result<Vec<Manifest>, String> {
    let model = reduced(&setup.model, setup.layers)?;
    let topology = setup.topology.parse::<Topology>().map_err(|error| error.to_string())?;
    engine(&model, &topology, &setup.engine)
}

/// The same, from its parts. A topology that does not say how many blocks there are gets as many as
/// fit into a pool of a handy size.
pub(crate) fn engine(
    model: &Model,
    topology: &Topology,
    name: &str,
) -> Result<Vec<Manifest>, String> {
    let mut topology = topology.clone();
    if topology.blocks.is_none() {
        let probe = Topology { blocks: Some(FEWEST_BLOCKS as u32), ..topology.clone() };
        let probed = vllm::manifests(model, &probe, name).map_err(|error| error.to_string())?;
        let bytes = probed.iter().map(|rank| rank.regions().iter().map(|r| r.bytes).sum::<u64>());
        let block = (bytes.max().unwrap_or(1) / FEWEST_BLOCKS).max(1);
        topology.blocks = Some((POOL_BYTES / block).clamp(FEWEST_BLOCKS, MOST_BLOCKS) as u32);
    }
    vllm::manifests(model, &topology, name).map_err(|error| error.to_string())
}
