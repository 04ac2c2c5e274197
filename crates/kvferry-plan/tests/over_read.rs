//! Reading too much, where that makes fewer copies of it. That the bytes are the right ones is a matter
//! of every random pair (`properties.rs`).

use kvferry_plan::{Plan, Price, Request, Table};
use kvferry_testkit::drive::compile;
use kvferry_testkit::model::{Layer, Model, Sight};
use kvferry_testkit::plain::Memory;
use kvferry_testkit::plain::orders::{head_major, token_major};
use kvferry_testkit::recipe::{Recipe, Step};

const HEADS: u64 = 8;
/// Bytes of a token's keys and values in one head.
const HEAD: u64 = (16 + 4) * 2;

/// A copy costs as much as 4 KiB.
const PRICE: Price = Price { launch: 0.0, copy: 512.0, byte: 0.125 };

/// One layer of attention in blocks of so many tokens on each side.
fn plan(order: &[Step], source: u64, destination: u64) -> Plan {
    let model = Model::new(vec![Layer::attention("layers.0", Sight::Full, HEADS, 16, 4)]);
    let engine = |name: &str, block| {
        Recipe::plain(name, &model, 1).block(block).blocks(4).lay_out(Memory::Separate, order)
    };
    compile(&engine("p", source), &[0], &engine("d", destination), 0).unwrap()
}

/// Copies and bytes of a request that ends in the second block, exact and with what is read too much.
fn copies(plan: &Plan, tokens: u64) -> [(u64, u64); 2] {
    let table = [Table { first: 0, blocks: &[3, 1] }];
    let request = Request { tokens, cached: &[0], source: &table, destination: &table };
    [plan.transfer(&request).unwrap(), plan.over_read(&request, &PRICE).unwrap()].map(|transfer| {
        let summary = transfer.summary(0);
        (summary.copies, summary.bytes)
    })
}

#[test]
fn a_block_that_is_almost_full_is_read_whole() {
    let plan = plan(&head_major(), 64, 64);
    let [exact, over] = copies(&plan, 64 + 60);
    assert_eq!(exact.1, 124 * HEADS * HEAD);
    assert_eq!(over.1, 128 * HEADS * HEAD);
    assert!(over.0 < exact.0, "{over:?} {exact:?}");
    // Nothing ends within a block.
    let [exact, over] = copies(&plan, 128);
    assert_eq!(exact, over);
}

#[test]
fn keys_and_values_of_a_head_that_take_turns_are_one_copy_a_block() {
    let axis = Step::Axis("head".to_owned());
    let order = [Step::Layer, Step::Block, Step::Kernel, axis, Step::Section, Step::Slot];
    let [exact, over] = copies(&plan(&order, 64, 64), 64 + 60);
    assert_eq!(exact.0, 1 + 2 * HEADS);
    assert_eq!(over, (2, 128 * HEADS * HEAD));
}

#[test]
fn a_few_tokens_of_a_long_block_are_not() {
    let plan = plan(&head_major(), 4096, 4096);
    let [exact, over] = copies(&plan, 4096 + 10);
    assert_eq!(exact, over);
}

#[test]
fn what_is_one_copy_anyway_is_not() {
    let plan = plan(&token_major(), 64, 64);
    let [exact, over] = copies(&plan, 64 + 60);
    assert_eq!(exact, over);
}
