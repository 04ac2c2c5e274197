//! Hybrids under pipeline parallelism.

use kvferry_testkit::drive::prove;
use kvferry_testkit::model::Model;
use kvferry_testkit::plain::Memory::{BlockOutermost, LayerOutermost, Separate};
use kvferry_testkit::plain::orders::{
    column_major, head_major, interleaved_by_block, planes, token_major,
};
use kvferry_testkit::recipe::Recipe;

use crate::models::{attention, hybrid};

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
