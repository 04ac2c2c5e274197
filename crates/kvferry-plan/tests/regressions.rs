//! Named cases: every section of the documents that this project implements, and every wrong answer
//! that users of other systems have met, with the geometry in which it was met. Sizes are real where a
//! brute-force judge can walk them; elsewhere ratios are.

use kvferry_layout::Window;
use kvferry_plan::Incompatible;
use kvferry_testkit::drive::{compile, prove};
use kvferry_testkit::engine::{Arm, Engine, Recipe, Slab, Step};
use kvferry_testkit::judge::Tally;
use kvferry_testkit::kinds::{bf16, f32};
use kvferry_testkit::model::{Layer, Model, Sight, State, Tensor};
use kvferry_testkit::plain::Memory::{BlockOutermost, LayerOutermost, Separate};
use kvferry_testkit::plain::orders::{
    column_major, head_major, interleaved_by_block, planes, token_major,
};

fn attention(index: usize, heads: u64, dim: u64) -> Layer {
    Layer::attention(&format!("layers.{index}"), Sight::Full, heads, dim, dim)
}

fn mamba2(index: usize, heads: u64, groups: u64) -> Layer {
    Layer::mamba2(&format!("layers.{index}"), heads, 2, groups, 3, 3)
}

/// Attention and Mamba2 in turns, as in a Nemotron-H: 4 KV heads, 8 state heads.
fn hybrid(groups: u64) -> Model {
    Model::new(vec![
        mamba2(0, 8, groups),
        attention(1, 4, 4),
        mamba2(2, 8, groups),
        attention(3, 4, 4),
    ])
}

fn bytes(tallies: &[Tally]) -> u64 {
    tallies.iter().map(|tally| tally.bytes).sum()
}

// A. Hybrid attention and SSM models over one pool.

/// Layer i of every group shares one tensor: one region is seen as attention blocks by one group and
/// as convolution and state by another.
#[test]
fn a_groups_share_one_pool() {
    for (memory, other) in [
        (LayerOutermost, LayerOutermost),
        (LayerOutermost, BlockOutermost),
        (BlockOutermost, Separate),
    ] {
        let engine = |name: &str, memory| {
            Recipe::plain(name, &hybrid(2), 1)
                .grouped(&[&[1, 3], &[0, 2]])
                .lay_out(memory, &token_major())
        };
        let (source, destination) = (engine("p", memory), engine("d", other));
        if memory == LayerOutermost {
            assert_eq!(source.ranks[0].manifest.regions().len(), 2, "each shared tensor once");
            assert_eq!(source.ranks[0].manifest.pool(0), source.ranks[0].manifest.pool(1));
        }
        prove(&source, &destination, &[40, 1, 0, 16, 17]);
    }
}

/// Pages of states are padded to the attention page: only the real state moves.
#[test]
fn a_padding_of_state_pages_does_not_move() {
    let model = hybrid(2);
    let engine = |name: &str| {
        Recipe::plain(name, &model, 1)
            .grouped(&[&[1, 3], &[0, 2]])
            .block(32)
            .lay_out(LayerOutermost, &token_major())
    };
    let tallies = prove(&engine("p"), &engine("d"), &[33]);
    // Two layers of 4 heads of K and V of 4 numbers for 33 tokens; two layers of 8 heads of 2 x 3
    // numbers and of 3 columns of 16 + 6 + 6 channels. All numbers have two bytes.
    let attention = 2 * 4 * 2 * 4 * 2 * 33;
    let states = 2 * (8 * 2 * 3 + 3 * (16 + 6 + 6)) * 2;
    assert_eq!(bytes(&tallies), attention + states);
}

/// The attention kernel's block is smaller than the manager's: attention counts kernel blocks, states
/// count manager blocks, each side with its own ratio.
#[test]
fn a_kernel_blocks_on_one_side_or_both() {
    for (kernels, others) in [(1, 4), (4, 1), (2, 4), (4, 2), (8, 8)] {
        let engine = |name: &str, kernels| {
            Recipe::plain(name, &hybrid(2), 1)
                .grouped(&[&[1, 3], &[0, 2]])
                .kernels(kernels)
                .lay_out(LayerOutermost, &head_major())
        };
        prove(&engine("p", kernels), &engine("d", others), &[40, 5, 16]);
    }
}

/// The shapes of the pull request at their real size: blocks of 400 tokens, convolution [3, 3328],
/// state [48, 64, 128], attention [400, 4, 128]; the block was inflated until the pages matched.
#[test]
fn a_blocks_of_400_tokens_at_real_size() {
    let model = Model::new(vec![
        Layer::mamba2("layers.0", 48, 64, 1, 128, 3),
        Layer::attention("layers.1", Sight::Full, 4, 128, 128),
    ]);
    let engine = |name: &str, blocks| {
        Recipe::plain(name, &model, 1)
            .grouped(&[&[1], &[0]])
            .block(400)
            .blocks(blocks)
            .lay_out(LayerOutermost, &column_major())
    };
    let (source, destination) = (engine("p", 5), engine("d", 4));
    let page = source.ranks[0].manifest.groups()[0].pieces[0].view.block;
    assert_eq!(page, 400 * 4 * 128 * 2 * 2);
    let view = &source.ranks[0].manifest.groups()[1].pieces[0].view;
    assert_eq!((view.block, view.axes[1]), (page, 3328 * 2), "rows of 3328 channels in one page");
    let tallies = prove(&source, &destination, &[401]);
    assert_eq!(bytes(&tallies), 401 * 4 * 128 * 4 + (48 * 64 * 128 + 3 * 3328) * 2);
}

/// Prefill stops one token early for recurrent states: a one-token prompt has nothing to move.
#[test]
fn a_prompt_of_one_token_moves_nothing() {
    let engine = |name: &str| Recipe::plain(name, &hybrid(1), 1).lay_out(Separate, &token_major());
    let tallies = prove(&engine("p"), &engine("d"), &[0]);
    assert_eq!(tallies, [Tally::default()]);
}

// B. Different tensor parallelism for SSM models.

/// Every width against every other, in both directions.
#[test]
fn b_any_width_to_any_width() {
    for (from, to) in [(1, 2), (2, 1), (4, 2), (2, 4), (8, 1), (1, 8), (4, 4)] {
        let engine = |name: &str, lanes| {
            Recipe::plain(name, &hybrid(8), lanes)
                .grouped(&[&[1, 3], &[0, 2]])
                .lay_out(LayerOutermost, &token_major())
        };
        prove(&engine("p", from), &engine("d", to), &[21]);
    }
}

/// The sections x|B|C have different widths and are split each by itself, in both orders of
/// (dim, width): vllm#37638, sglang#23746.
#[test]
fn b_sections_of_convolutions_in_both_orders() {
    for order in [token_major(), column_major()] {
        for other in [token_major(), column_major()] {
            for (from, to) in [(2, 1), (1, 2), (4, 2)] {
                let engine = |name: &str, lanes, order: &[_]| {
                    Recipe::plain(name, &hybrid(4), lanes).lay_out(Separate, order)
                };
                prove(&engine("p", from, &order), &engine("d", to, &other), &[9]);
            }
        }
    }
}

/// The two sides have 261 and 131 kernel blocks in a block: each side's own ratio counts.
#[test]
fn b_261_and_131_kernel_blocks_in_a_block() {
    let model = Model::new(vec![mamba2(0, 4, 1), attention(1, 2, 1)]);
    let engine = |name: &str, lanes, ratio| {
        Recipe::plain(name, &model, lanes)
            .block(2 * ratio)
            .kernels(ratio)
            .blocks(6)
            .lay_out(LayerOutermost, &head_major())
    };
    prove(&engine("p", 1, 261), &engine("d", 2, 131), &[600, 522]);
    prove(&engine("p", 2, 131), &engine("d", 1, 261), &[600, 262]);
}

/// States are split even where KV heads are replicated because there are fewer heads than ranks.
#[test]
fn b_states_are_split_where_heads_are_replicated() {
    let model = Model::new(vec![mamba2(0, 8, 8), attention(1, 2, 4)]);
    for (from, to) in [(8, 2), (2, 8), (8, 4), (4, 8), (8, 8)] {
        let engine =
            |name: &str, lanes| Recipe::plain(name, &model, lanes).lay_out(Separate, &head_major());
        prove(&engine("p", from), &engine("d", to), &[19]);
    }
}

/// One prefill engine serves decode engines of several widths at the same time.
#[test]
fn b_decode_engines_of_several_widths() {
    let source = Recipe::plain("p", &hybrid(2), 2).lay_out(LayerOutermost, &token_major());
    for lanes in [1, 2, 3, 4, 8] {
        let destination = Recipe::plain("d", &hybrid(2), lanes).lay_out(Separate, &column_major());
        prove(&source, &destination, &[23]);
    }
}

/// Where both sides are alike, blocks that follow each other move as one: one copy for each layer, or
/// one for the whole request where the block is outermost.
#[test]
fn b_equal_sides_move_in_long_runs() {
    let model = Model::new((0..4).map(|layer| attention(layer, 4, 4)).collect());
    for (memory, copies) in [(Separate, 4), (BlockOutermost, 1)] {
        let engine = |name: &str| Recipe::plain(name, &model, 2).lay_out(memory, &token_major());
        let tallies = prove(&engine("p"), &engine("d"), &[64]);
        assert!(tallies.iter().all(|tally| tally.copies == copies), "{memory:?}: {tallies:?}");
    }
}

// C. Full attention and MLA in one group.

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

/// 20 KDA and 7 MLA layers: every fourth is MLA. As the allocator groups them: three groups of KDA
/// layers and one of MLA layers, seven shared tensors.
fn kimi(heads: u64) -> Model {
    let layers = (0..27).map(|index| {
        let name = format!("layers.{index}");
        if is_mla(index) { Layer::latent(&name, 5) } else { Layer::kda(&name, heads, 1, 3) }
    });
    Model::new(layers.collect())
}

fn is_mla(index: usize) -> bool {
    index % 4 == 3 || index == 26
}

fn kimi_engine(name: &str, heads: u64, lanes: u64, block: u64) -> Engine {
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

// E. Hybrids under pipeline parallelism.

/// P has two stages of one rank, D one stage of two ranks, and the other way round.
#[test]
fn e_pp2_tp1_to_pp1_tp2() {
    let model = hybrid(2);
    for memory in [Separate, LayerOutermost, BlockOutermost] {
        let deep = Recipe::plain("deep", &model, 1)
            .grouped(&[&[1, 3], &[0, 2]])
            .stages(&[&[0, 1], &[2, 3]])
            .lay_out(memory, &token_major());
        let wide = Recipe::plain("wide", &model, 2)
            .grouped(&[&[1, 3], &[0, 2]])
            .lay_out(memory, &token_major());
        let tallies = prove(&deep, &wide, &[25]);
        assert!(tallies.iter().all(|tally| tally.sources == 2), "both stages are read");
        prove(&wide, &deep, &[25]);
    }
}

/// Any assignment of layers to stages: stages without a group's layers, and stages without a layer.
#[test]
fn e_any_assignment_of_layers_to_stages() {
    let model = hybrid(2);
    let engine = |name: &str, lanes, stages: &[&[usize]]| {
        Recipe::plain(name, &model, lanes).stages(stages).lay_out(LayerOutermost, &column_major())
    };
    let source = engine("p", 2, &[&[0, 2], &[1], &[3]]);
    prove(&source, &engine("d", 1, &[&[3, 0], &[], &[1, 2]]), &[18]);
    prove(&engine("p", 1, &[&[3, 0], &[], &[1, 2]]), &source, &[18]);
}

/// K and V of a block interleave on one side and lie in planes, or side by side, on the other.
#[test]
fn e_interleaved_k_and_v() {
    let model = Model::new(vec![attention(0, 4, 2), attention(1, 4, 2)]);
    let orders = [planes(), interleaved_by_block(), token_major(), head_major()];
    for order in &orders {
        for other in &orders {
            let source =
                Recipe::plain("p", &model, 1).stages(&[&[0], &[1]]).lay_out(Separate, order);
            let destination = Recipe::plain("d", &model, 2).block(12).lay_out(Separate, other);
            prove(&source, &destination, &[29]);
        }
    }
}

// Wrong answers that users have met.

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

// Pairs that others refuse.

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

/// The bytes that all destination ranks move for a request of `tokens` tokens of which the groups hold
/// `cached`, judged as always.
fn moved_with(source: &Engine, destination: &Engine, tokens: u64, cached: &[u64]) -> u64 {
    bytes(&kvferry_testkit::drive::prove_cached(source, destination, tokens, cached))
}

/// Regions that follow each other without a gap are registered each by itself: neither a copy nor a
/// rest crosses the border, though the bytes touch on both sides.
#[test]
fn nothing_crosses_the_border_of_a_region() {
    let model = Model::new(vec![attention(0, 1, 2), attention(1, 1, 2)]);
    let engine = |name: &str, adjacent| {
        let mut recipe = Recipe::plain(name, &model, 1).blocks(2);
        recipe.adjacent_regions = adjacent;
        recipe.lay_out(Separate, &token_major())
    };
    let destination = engine("d", true);
    let regions = destination.ranks[0].manifest.regions();
    assert_eq!(regions[0].base + regions[0].bytes, regions[1].base);
    // All of both regions: two copies that touch; then a rest at the end of the first region, with
    // a block of the second one behind it.
    assert_eq!(prove(&engine("p", true), &destination, &[32])[0].copies, 2);
    prove(&engine("p", true), &destination, &[31, 17, 16, 1]);
    prove(&engine("p", false), &destination, &[31, 17, 16, 1]);
}

/// States of as many axes as there may be, in an order that fuses none of them, in layers that repeat at
/// several distances, over tokens and blocks that follow each other: the deepest loops that there are.
#[test]
fn the_deepest_loops() {
    let names = ["a", "b", "c", "d", "e", "f"];
    let layers = (0..16).map(|index| {
        let axes = names.map(|name| (name, 2));
        let state = State::new(format!("layers.{index}/odd"), &bf16(), &axes);
        let tensors = vec![Tensor::tokens(Sight::Full, vec![state])];
        Layer { name: format!("layers.{index}"), tensors }
    });
    let model = Model::new(layers.collect());
    let engine = |name: &str, order: Vec<Step>| {
        let mut recipe = Recipe::plain(name, &model, 1).block(3).blocks(4);
        let slab = |lead, layers: [usize; 2]| Slab {
            region: 0,
            lead,
            arms: vec![Arm {
                group: 0,
                tensors: layers.map(|layer| (layer, 0)).to_vec(),
                order: order.clone(),
                pads: vec![],
                lead: 0,
                scratch: 0,
            }],
        };
        // Layers in pairs, pairs of pairs, and pairs of those.
        let leads = [0, 10, 50, 10, 300, 10, 50, 10];
        recipe.slabs =
            (0..).zip(leads).map(|(at, lead)| slab(lead, [2 * at, 2 * at + 1])).collect();
        recipe.build()
    };
    let axes = || names.map(|name| Step::Axis(name.to_owned())).into_iter();
    let outside = [Step::Block, Step::Layer];
    let forwards = outside.clone().into_iter().chain([Step::Slot]).chain(axes()).collect();
    let backwards = outside.into_iter().chain(axes().rev()).chain([Step::Slot]).collect();
    let (source, destination) = (engine("p", forwards), engine("d", backwards));
    let tallies = prove(&source, &destination, &[9, 4, 12]);
    // Every element by itself, but for the few that touch where one layer ends and the next begins.
    assert!((9 * 16 * 63..=9 * 16 * 64).contains(&tallies[0].copies), "{tallies:?}");
}
