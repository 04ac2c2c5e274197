//! Models and engines of the cases.

use kvferry_testkit::engine::Engine;
use kvferry_testkit::judge::Tally;
use kvferry_testkit::model::{Layer, Model, Sight};
use kvferry_testkit::plain::Memory::LayerOutermost;
use kvferry_testkit::plain::orders::token_major;
use kvferry_testkit::recipe::Recipe;

pub(crate) fn attention(index: usize, heads: u64, dim: u64) -> Layer {
    Layer::attention(&format!("layers.{index}"), Sight::Full, heads, dim, dim)
}

pub(crate) fn mamba2(index: usize, heads: u64, groups: u64) -> Layer {
    Layer::mamba2(&format!("layers.{index}"), heads, 2, groups, 3, 3)
}

/// Attention and Mamba2 in turns, as in a Nemotron-H: 4 KV heads, 8 state heads.
pub(crate) fn hybrid(groups: u64) -> Model {
    Model::new(vec![
        mamba2(0, 8, groups),
        attention(1, 4, 4),
        mamba2(2, 8, groups),
        attention(3, 4, 4),
    ])
}

pub(crate) fn bytes(tallies: &[Tally]) -> u64 {
    tallies.iter().map(|tally| tally.bytes).sum()
}

/// 20 KDA and 7 MLA layers: every fourth is MLA. As the allocator groups them: three groups of KDA
/// layers and one of MLA layers, seven shared tensors.
pub(crate) fn kimi(heads: u64) -> Model {
    let layers = (0..27).map(|index| {
        let name = format!("layers.{index}");
        if is_mla(index) { Layer::latent(&name, 5) } else { Layer::kda(&name, heads, 1, 3) }
    });
    Model::new(layers.collect())
}

pub(crate) fn is_mla(index: usize) -> bool {
    index % 4 == 3 || index == 26
}

pub(crate) fn kimi_engine(name: &str, heads: u64, lanes: u64, block: u64) -> Engine {
    let mla: Vec<usize> = (0..27).filter(|&index| is_mla(index)).collect();
    let kda: Vec<usize> = (0..27).filter(|&index| !is_mla(index)).collect();
    assert_eq!((kda.len(), mla.len()), (20, 7));
    let part = |part: usize| kda.iter().copied().skip(part).step_by(3).collect::<Vec<_>>();
    let (first, second, third) = (part(0), part(1), part(2));
    let engine = Recipe::plain(name, &kimi(heads), lanes)
        .grouped(&[&mla, &first, &second, &third])
        .block(block)
        .blocks(12)
        .lay_out(LayerOutermost, &token_major());
    assert_eq!(engine.ranks[0].manifest.regions().len(), 7, "seven shared tensors");
    engine
}

/// The bytes that all destination ranks move for a request of `tokens` tokens of which the groups hold
/// `cached`, judged as always.
pub(crate) fn moved_with(
    source: &Engine,
    destination: &Engine,
    tokens: u64,
    cached: &[u64],
) -> u64 {
    bytes(&kvferry_testkit::drive::prove_cached(source, destination, tokens, cached))
}
