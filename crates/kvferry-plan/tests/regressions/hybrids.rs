//! Hybrid attention and SSM models over one pool, and different tensor parallelism for them.

use kvferry_testkit::drive::prove;
use kvferry_testkit::judge::Tally;
use kvferry_testkit::model::{Layer, Model, Sight};
use kvferry_testkit::plain::Memory::{BlockOutermost, LayerOutermost, Separate};
use kvferry_testkit::plain::orders::{column_major, head_major, token_major};
use kvferry_testkit::recipe::Recipe;

use crate::models::{attention, bytes, hybrid, mamba2};

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
