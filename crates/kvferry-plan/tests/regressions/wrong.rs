//! Wrong answers that users have met.

use kvferry_plan::Incompatible;
use kvferry_testkit::drive::{compile, prove};
use kvferry_testkit::engine::Engine;
use kvferry_testkit::kinds::{bf16, f32};
use kvferry_testkit::model::{Layer, Model};
use kvferry_testkit::plain::Memory::{BlockOutermost, LayerOutermost, Separate};
use kvferry_testkit::plain::orders::{column_major, head_major, planes, token_major};
use kvferry_testkit::recipe::Recipe;

use crate::models::{attention, hybrid, kimi_engine, moved_with};

/// 1: KDA and MLA, one prefill and one decode engine, corrupt only under load, when block ids of the
/// groups are scattered over a nearly full pool (vllm#52627). 12 heads at widths 3, 6 and 12.
#[test]
fn wrong_1_kda_and_mla_in_a_full_pool() {
    for (from, to) in [(3, 3), (3, 6), (12, 6), (6, 3)] {
        prove(&kimi_engine("p", 12, from, 4), &kimi_engine("d", 12, to, 6), &[24, 30]);
    }
}

/// 2: A write corrupted another request's pages (sglang#24527). Whatever is not the request's own stays
/// as it was, up to the first byte after the pool: here the request's blocks are the last of the pool.
#[test]
fn wrong_2_neighbours_stay_as_they_were() {
    let model = Model::new(vec![attention(0, 2, 3), attention(1, 2, 3)]);
    for (memory, blocks) in [(Separate, 3), (BlockOutermost, 3)] {
        let source = Recipe::plain("p", &model, 2).blocks(4).lay_out(memory, &head_major());
        let destination = Recipe::plain("d", &model, 1).blocks(blocks).lay_out(memory, &planes());
        prove(&source, &destination, &[48, 47, 33]);
    }
}

/// 3: A recurrent state is never moved in part: it is held when all tokens are, and else moved whole,
/// whatever part of the prefix is cached (vllm#37285, #45096).
#[test]
fn wrong_3_states_move_whole_or_not_at_all() {
    let engine = |name: &str| Recipe::plain(name, &hybrid(2), 1).lay_out(Separate, &token_major());
    let (source, destination) = (engine("p"), engine("d"));
    let states = 2 * (8 * 2 * 3 + 3 * (16 + 6 + 6)) * 2;
    for cached in [0, 15, 16, 32, 39] {
        let moved = moved_with(&source, &destination, 40, &[cached, cached]);
        assert_eq!(moved, states + 2 * 4 * 2 * 4 * 2 * (40 - cached), "{cached} tokens cached");
    }
    assert_eq!(moved_with(&source, &destination, 40, &[40, 40]), 0);
}

/// 4: Convolution states sliced flat across q|k|v (sglang#30997): three key heads and six value heads
/// make sections of different widths, and widths 3 and 2 do not divide each other.
#[test]
fn wrong_4_convolutions_are_not_sliced_flat() {
    let model = Model::new(vec![Layer::gdn("layers.0", 6, 12, 2, 3, 3)]);
    for (from, to) in [(3, 2), (2, 3), (6, 4), (1, 6)] {
        for order in [token_major(), column_major()] {
            let engine = |name: &str, lanes, order: &[_]| {
                Recipe::plain(name, &model, lanes).lay_out(Separate, order)
            };
            prove(&engine("p", from, &order), &engine("d", to, &token_major()), &[7]);
        }
    }
}

/// 5: The wrong head where there are more ranks than KV heads (sglang#19086, vllm#45330).
#[test]
fn wrong_5_more_ranks_than_heads() {
    for heads in [1, 2, 3, 4] {
        let model = Model::new(vec![attention(0, heads, 2)]);
        for (from, to) in [(8, 2), (2, 8), (8, 1), (6, 4), (8, 8), (5, 3)] {
            let engine = |name: &str, lanes| {
                Recipe::plain(name, &model, lanes).lay_out(Separate, &head_major())
            };
            let tallies = prove(&engine("p", from), &engine("d", to), &[10]);
            let most = heads.min(from);
            assert!(tallies.iter().all(|tally| tally.sources <= most), "{tallies:?}");
        }
    }
}

/// 6: One tensor read at the wrong stride: with different widths the page of a state shrinks and that
/// of a latent does not, so that the longer one sets the stride on one side only.
#[test]
fn wrong_6_the_longer_page_sets_the_stride() {
    let model = Model::new(vec![Layer::kda("layers.0", 8, 4, 3), Layer::latent("layers.1", 8)]);
    let engine = |name: &str, lanes, block| {
        Recipe::plain(name, &model, lanes).block(block).lay_out(LayerOutermost, &token_major())
    };
    let (narrow, wide) = (engine("p", 1, 16), engine("d", 8, 16));
    let page = |engine: &Engine| engine.ranks[0].manifest.groups()[0].pieces[0].view.block;
    assert!(page(&narrow) > 16 * 8 * 2, "the state sets it");
    assert_eq!(page(&wide), 16 * 8 * 2, "the latent sets it");
    prove(&narrow, &wide, &[50]);
    prove(&wide, &narrow, &[50]);
}

/// 7: Mamba2 with one group of B and C, which every rank holds whole (vllm#55208).
#[test]
fn wrong_7_mamba2_with_one_group() {
    for (from, to) in [(1, 2), (2, 1), (2, 4), (4, 2), (8, 3)] {
        for order in [token_major(), column_major()] {
            let engine = |name: &str, lanes, order: &[_]| {
                Recipe::plain(name, &hybrid(1), lanes).lay_out(LayerOutermost, order)
            };
            prove(&engine("p", from, &order), &engine("d", to, &column_major()), &[11]);
        }
    }
}

/// 8: All hits are reported and the answer diverges at once (vllm#52617): attention is held in full,
/// the recurrent state is not, and must still come.
#[test]
fn wrong_8_a_full_hit_still_brings_the_state() {
    let engine = |name: &str| Recipe::plain(name, &hybrid(2), 1).lay_out(Separate, &token_major());
    let (source, destination) = (engine("p"), engine("d"));
    let attention = usize::from(destination.recipe.groups[0].tokens_per_block.is_none());
    let mut cached = [0, 0];
    cached[attention] = 32;
    let states = 2 * (8 * 2 * 3 + 3 * (16 + 6 + 6)) * 2;
    assert_eq!(moved_with(&source, &destination, 32, &cached), states);
}

/// 9: Different numbers of speculative tokens give rows of different lengths: only the live columns
/// move, in both orders and both directions (vllm#49230).
#[test]
fn wrong_9_different_speculative_columns() {
    for (from, to) in [(0, 2), (2, 0), (1, 3), (2, 2)] {
        for order in [token_major(), column_major()] {
            for other in [token_major(), column_major()] {
                let engine = |name: &str, lanes, columns, order: &[_]| {
                    Recipe::plain(name, &hybrid(2), lanes)
                        .speculative(columns)
                        .lay_out(LayerOutermost, order)
                };
                let destination = engine("d", 1, to, &other);
                let scratch = &destination.ranks[0].manifest.groups()[1].scratch;
                assert_eq!(scratch.is_empty(), to == 0);
                prove(&engine("p", 2, from, &order), &destination, &[6]);
            }
        }
    }
}

/// 9: Different state types pass other handshakes: here they are refused, with both of them named.
#[test]
fn wrong_9_different_state_types_are_refused() {
    let mut other = hybrid(2);
    for tensor in other.layers.iter_mut().flat_map(|layer| &mut layer.tensors) {
        for state in tensor.states.iter_mut().filter(|state| state.name.ends_with("ssm")) {
            state.format = f32();
        }
    }
    let source = Recipe::plain("p", &other, 1).lay_out(Separate, &token_major());
    let destination = Recipe::plain("d", &hybrid(2), 1).lay_out(Separate, &token_major());
    let refusal = compile(&source, &[0], &destination, 0).unwrap_err();
    let Incompatible::Format { state, source_format, destination_format, .. } = &refusal else {
        panic!("{refusal}")
    };
    assert!(state.ends_with("/ssm"), "{state}");
    assert_eq!((source_format, destination_format), (&f32(), &bf16()));
    let message = refusal.to_string();
    assert!(message.contains("f32") && message.contains("bf16"), "{message}");
}
