//! Borders of regions, and the deepest loops.

use kvferry_testkit::drive::prove;
use kvferry_testkit::kinds::bf16;
use kvferry_testkit::model::{Layer, Model, Sight, State, Tensor};
use kvferry_testkit::plain::Memory::Separate;
use kvferry_testkit::plain::orders::token_major;
use kvferry_testkit::recipe::{Arm, Recipe, Slab, Step};

use crate::models::attention;

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
