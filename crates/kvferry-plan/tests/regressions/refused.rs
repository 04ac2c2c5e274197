//! Pairs that others refuse.

use kvferry_layout::Window;
use kvferry_plan::Incompatible;
use kvferry_testkit::drive::{compile, prove};
use kvferry_testkit::kinds::f32;
use kvferry_testkit::model::{Layer, Model, Sight, State, Tensor};
use kvferry_testkit::plain::Memory::{BlockOutermost, LayerOutermost, Separate};
use kvferry_testkit::plain::orders::{head_major, token_major};
use kvferry_testkit::recipe::Recipe;

use crate::models::{attention, bytes};

/// Widths that do not divide each other: 3 to 2, 6 to 4.
#[test]
fn refused_elsewhere_widths_that_do_not_divide() {
    let model = Model::new(vec![attention(0, 12, 2), Layer::mamba2("layers.1", 12, 1, 12, 2, 3)]);
    for (from, to) in [(3, 2), (2, 3), (6, 4), (4, 6)] {
        let engine = |name: &str, lanes| {
            Recipe::plain(name, &model, lanes).lay_out(Separate, &token_major())
        };
        prove(&engine("p", from), &engine("d", to), &[22]);
    }
}

/// Sliding windows at different widths and block sizes: only live tokens move, also where one side
/// keeps everything because it has promoted the window.
#[test]
fn refused_elsewhere_sliding_windows() {
    let model = Model::new(vec![
        Layer::attention("layers.0", Sight::Sliding(10), 4, 2, 2),
        attention(1, 4, 2),
        Layer::attention("layers.2", Sight::Chunked(8), 4, 2, 2),
    ]);
    let destination = Recipe::plain("d", &model, 4).block(6).lay_out(Separate, &head_major());
    let source =
        Recipe::plain("p", &model, 2).block(4).blocks(16).lay_out(Separate, &token_major());
    let tallies = prove(&source, &destination, &[35]);
    // 9 of the sliding window, all, and the 3 since token 32, of one head of K and V.
    assert!(tallies.iter().all(|tally| tally.bytes == (9 + 35 + 3) * 2 * 2 * 2), "{tallies:?}");
    let promoted = Recipe::plain("p", &model, 2)
        .block(4)
        .blocks(16)
        .promoted()
        .lay_out(Separate, &token_major());
    assert_eq!(prove(&promoted, &destination, &[35]), tallies);
}

/// D keeps sliding layers as if they looked back at every token (no hybrid allocator), P keeps them as
/// windows: D needs no more than the window, and the pair fits. Full layers in the same group move
/// whole. What D's own blocks hold besides is left over.
#[test]
fn refused_elsewhere_d_keeps_a_sliding_layer_in_full() {
    let sliding = |index| Layer::attention(&format!("layers.{index}"), Sight::Sliding(20), 4, 2, 2);
    let model = Model::new(vec![attention(0, 4, 2), sliding(1), attention(2, 4, 2), sliding(3)]);
    let source = Recipe::plain("p", &model, 2).lay_out(Separate, &token_major());
    let plain = || Recipe::plain("d", &model, 1).promoted().grouped(&[&[0, 1, 2, 3]]);
    for order in [token_major(), head_major()] {
        for memory in [Separate, LayerOutermost, BlockOutermost] {
            let needing = plain().needing(&[1, 3]).lay_out(memory, &order);
            let tallies = prove(&source, &needing, &[100, 1, 19, 20, 21, 64]);
            // 16 bytes of K and as many of V for each head and token; 19 tokens look back.
            let token = 4 * (2 + 2) * 2;
            assert_eq!(bytes(&tallies), token * (2 * 100 + 2 * 19));
            let plan = compile(&source, &[0, 1], &needing, 0).unwrap();
            let states = plan.windowed().iter().map(|&(group, piece)| {
                needing.ranks[0].manifest.groups()[group].pieces[piece].state.clone()
            });
            let states: Vec<String> = states.collect();
            assert_eq!(states, ["layers.1/k", "layers.1/v", "layers.3/k", "layers.3/v"]);

            // Where P keeps every token too, all of them move, and D's blocks are whole.
            let promoted =
                Recipe::plain("p", &model, 2).promoted().lay_out(Separate, &token_major());
            assert_eq!(bytes(&prove(&promoted, &needing, &[100])), token * 4 * 100);
            assert!(compile(&promoted, &[0, 1], &needing, 0).unwrap().windowed().is_empty());
        }
    }
    // D has to say so: else it needs what its group keeps. And P may keep less than D needs.
    let silent = plain().lay_out(Separate, &token_major());
    let half = plain().needing(&[1]).lay_out(Separate, &token_major());
    for (destination, state) in [(silent, "layers.1/k"), (half, "layers.3/k")] {
        let refusal = compile(&source, &[0, 1], &destination, 0).unwrap_err();
        let Incompatible::Window { state: found, kept, needed, .. } = refusal else {
            panic!("{refusal}")
        };
        assert_eq!((found.as_str(), kept, needed), (state, Window::sliding(20), Window::FULL));
    }
}

/// Context parallelism on one side, on both, with turns of different lengths.
#[test]
fn refused_elsewhere_context_parallelism() {
    let model = Model::new(vec![Layer::latent("layers.0", 3), Layer::latent("layers.1", 3)]);
    let engine = |name: &str, lanes, turn| {
        let recipe = Recipe::plain(name, &model, lanes).block(12);
        let recipe = if turn == 0 { recipe } else { recipe.context(turn) };
        recipe.lay_out(Separate, &token_major())
    };
    for (from, turn, to, other) in
        [(4, 1, 1, 0), (1, 0, 4, 1), (2, 3, 4, 1), (3, 1, 2, 2), (4, 3, 2, 0), (2, 1, 2, 1)]
    {
        prove(&engine("p", from, turn), &engine("d", to, other), &[41, 12, 1]);
    }
}

/// Several tensors of a layer in one page, and a layer with four of them.
#[test]
fn refused_elsewhere_more_than_two_state_tensors() {
    let mut layer = Layer::kda("layers.0", 4, 2, 3);
    let ring = State::new("layers.0/ring", &f32(), &[("head", 4), ("at", 3)]);
    layer.tensors.push(Tensor::snapshot(vec![ring.cut(0, 4)]));
    let model = Model::new(vec![layer]);
    let engine = |name: &str, lanes| {
        Recipe::plain(name, &model, lanes).lay_out(BlockOutermost, &token_major())
    };
    prove(&engine("p", 4), &engine("d", 2), &[3]);
}
