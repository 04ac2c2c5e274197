//! Full attention and MLA in one group; KDA and MLA in one pool (Kimi-Linear).

use kvferry_plan::Incompatible;
use kvferry_testkit::drive::{compile, prove};
use kvferry_testkit::model::{Layer, Model};
use kvferry_testkit::plain::Memory::{BlockOutermost, Separate};
use kvferry_testkit::plain::orders::{head_major, interleaved_by_block, token_major};
use kvferry_testkit::recipe::Recipe;

use crate::models::{attention, kimi_engine};

/// A GQA model with an MLA draft: heads are split, latents are replicated and have no V, both in one
/// group, at different widths in both directions.
#[test]
fn c_heads_and_latents_in_one_group() {
    let model =
        Model::new(vec![attention(0, 8, 2), attention(1, 8, 2), Layer::latent("draft.0", 9)]);
    for (from, to) in [(2, 4), (4, 2), (1, 8), (8, 1), (4, 4)] {
        for memory in [Separate, BlockOutermost] {
            let engine = |name: &str, lanes| {
                Recipe::plain(name, &model, lanes).lay_out(memory, &head_major())
            };
            let (source, destination) = (engine("p", from), engine("d", to));
            assert_eq!(source.recipe.groups.len(), 1);
            let tallies = prove(&source, &destination, &[33, 16]);
            // The latent comes with a rank that is read for its heads anyway.
            let needed = from.div_ceil(to).max(1);
            assert!(
                tallies.iter().all(|tally| tally.sources == needed),
                "{from} to {to}: {tallies:?}"
            );
        }
    }
}

/// Sparse-attention indexers: another size in the same group.
#[test]
fn c_indexers_of_another_size_in_one_group() {
    let layers = (0..3).map(|index| Layer::indexed_latent(&format!("layers.{index}"), 6, 5));
    let model = Model::new(layers.collect());
    for (from, to, memory) in [(1, 4, Separate), (4, 1, BlockOutermost), (2, 2, Separate)] {
        let engine =
            |name: &str, lanes| Recipe::plain(name, &model, lanes).lay_out(memory, &token_major());
        prove(&engine("p", from), &engine("d", to), &[20]);
    }
}

/// Where both sides are alike and blocks hold all layers, states of different widths lie side by side
/// on both: blocks in a row are one copy.
#[test]
fn c_states_of_different_widths_move_together() {
    let latents = (0..10).map(|index| Layer::indexed_latent(&format!("layers.{index}"), 6, 5));
    let mut heads: Vec<Layer> = (0..4).map(|index| attention(index, 2, 3)).collect();
    heads.push(Layer::latent("draft.0", 5));
    for model in [Model::new(latents.collect()), Model::new(heads)] {
        for order in [interleaved_by_block(), token_major(), head_major()] {
            let engine =
                |name: &str| Recipe::plain(name, &model, 1).lay_out(BlockOutermost, &order);
            let tallies = prove(&engine("p"), &engine("d"), &[64, 63, 16, 5]);
            assert_eq!(tallies[0].copies, 1);
        }
    }
}

/// A block length that is scaled wrongly for its kind is refused for each kind: K with other heads,
/// a latent with another dimension.
#[test]
fn c_wrong_lengths_are_refused_for_each_kind() {
    let model =
        |heads, dim| Model::new(vec![attention(0, heads, 2), Layer::latent("draft.0", dim)]);
    let engine =
        |heads, dim| Recipe::plain("e", &model(heads, dim), 2).lay_out(Separate, &head_major());
    let destination = engine(8, 6);
    for (source, state) in [(engine(4, 6), "layers.0/k"), (engine(8, 12), "draft.0/latent")] {
        let refusal = compile(&source, &[0, 1], &destination, 0).unwrap_err();
        let Incompatible::Axes { state: named, .. } = &refusal else { panic!("{refusal}") };
        assert_eq!(named, state);
    }
}

// D. KDA and MLA in one pool (Kimi-Linear).

/// The stride of states depends on the width, that of latents does not: reading latents at the states'
/// stride cost half of gsm8k (vllm#44848).
#[test]
fn d_kda_and_mla_share_tensors() {
    let source = kimi_engine("p", 4, 1, 8);
    let groups = source.ranks[0].manifest.groups();
    assert_eq!(groups[0].pieces[0].view.block, groups[1].pieces[0].view.block);
    prove(&source, &kimi_engine("d", 4, 1, 8), &[30]);
}

/// "TP2's block size cannot be divided by TP4's."
#[test]
fn d_block_sizes_that_do_not_divide_each_other() {
    prove(&kimi_engine("p", 4, 2, 15), &kimi_engine("d", 4, 4, 8), &[31]);
    prove(&kimi_engine("p", 4, 4, 8), &kimi_engine("d", 4, 2, 15), &[31]);
    prove(&kimi_engine("p", 4, 1, 45), &kimi_engine("d", 4, 2, 6), &[46]);
}
