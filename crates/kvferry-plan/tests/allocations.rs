//! What plans cost: nothing is allocated per copy, and nothing grows with the number of blocks.

use kvferry_layout::Manifest;
use kvferry_plan::{Plan, Request, Table};
use kvferry_testkit::drive::Drawn;
use kvferry_testkit::heap::{Counting, measure};
use kvferry_testkit::large::hundred_layers;
use kvferry_testkit::model::{Layer, Model, Sight};
use kvferry_testkit::plain::Memory::Separate;
use kvferry_testkit::plain::orders::{head_major, token_major};
use kvferry_testkit::random::Dice;
use kvferry_testkit::recipe::Recipe;
use kvferry_testkit::request::{Shape, draw};

#[global_allocator]
static HEAP: Counting = Counting;

/// The loops of random pairs: a few allocations, by the number of pieces and not of copies.
#[test]
fn loops_do_not_allocate_for_every_copy() {
    let mut yielded = 0;
    for seed in 0..400 {
        let drawn = Drawn::new(seed);
        let (source, destination) = (&drawn.source, &drawn.destination);
        let sources: Vec<&Manifest> =
            drawn.sources.iter().map(|&rank| &source.ranks[rank].manifest).collect();
        let Ok(plan) = Plan::compile(&destination.ranks[0].manifest, &sources) else { continue };
        let owned = draw(source, destination, 40, Shape::Scattered, &mut Dice::new(seed));
        let source_tables: Vec<Table<'_>> = owned
            .source
            .iter()
            .map(|table| Table { first: table.first, blocks: &table.blocks })
            .collect();
        let destination_tables: Vec<Table<'_>> = owned
            .destination
            .iter()
            .map(|table| Table { first: table.first, blocks: &table.blocks })
            .collect();
        let request = Request {
            tokens: owned.tokens,
            cached: &owned.cached,
            source: &source_tables,
            destination: &destination_tables,
        };
        let transfer = plan.transfer(&request).unwrap();
        // A few for each nest of each shape, and what tables grow by, but none for every copy.
        let groups = destination.ranks[0].manifest.groups();
        let pieces = groups.iter().map(|group| group.pieces.len() as u64).sum::<u64>();
        for source in 0..sources.len() {
            let (loops, heap) = measure(|| transfer.loops(source).unwrap());
            let limit = 20 + 4 * pieces * loops.tables() as u64;
            assert!(heap.calls <= limit, "seed {seed}: {heap:?} for {} copies", loops.runs());
            let (walked, heap) = measure(|| loops.copies().count() as u64);
            assert_eq!(walked, loops.runs());
            assert_eq!(heap.calls, 0, "seed {seed}: {heap:?} for {walked} copies");
            yielded += walked;
        }
    }
    assert!(yielded > 10_000, "{yielded}");
}

/// A hundred layers at real sizes: a few hundred kilobytes, for a thousand blocks and for a million.
#[test]
fn a_plan_does_not_grow_with_blocks() {
    let cost = |blocks| {
        let manifest = Manifest::new(hundred_layers(blocks)).unwrap();
        let (plan, heap) = measure(|| Plan::compile(&manifest, &[&manifest]).unwrap());
        drop(plan);
        heap
    };
    let (few, many) = (cost(1_000), cost(1_000_000));
    assert_eq!(few, many);
    assert!(many.kept < 400_000, "{many:?}");
}

/// The cost of a transfer is in its blocks, not in its copies: heads outside of tokens on one side make
/// 64 times as many copies of the same request.
#[test]
fn a_transfer_does_not_grow_with_copies() {
    let model = Model::new(vec![Layer::attention("layers.0", Sight::Full, 64, 2, 2)]);
    let engine =
        |order: &[_]| Recipe::plain("e", &model, 1).blocks(8).block(16).lay_out(Separate, order);
    let destination = engine(&token_major());
    let cost = |source: &kvferry_testkit::engine::Engine| {
        let manifest = &source.ranks[0].manifest;
        let plan = Plan::compile(&destination.ranks[0].manifest, &[manifest]).unwrap();
        let tables = [Table { first: 0, blocks: &[3, 1, 5, 0, 7, 2, 4, 6] }];
        let request = Request { tokens: 128, cached: &[0], source: &tables, destination: &tables };
        let (loops, heap) = measure(|| plan.transfer(&request).unwrap().loops(0).unwrap());
        (loops.runs(), heap)
    };
    let (alike, few) = cost(&engine(&token_major()));
    let (unlike, many) = cost(&engine(&head_major()));
    assert_eq!((alike, unlike), (8, 8 * 16 * 64));
    assert!(many.peak <= few.peak + 1024, "{few:?} for {alike} copies, {many:?} for {unlike}");
}
