//! Which of several ranks that hold the same is read: few, always the same, and all in turn.

use std::collections::BTreeSet;

use kvferry_testkit::draw::{Side, engine};
use kvferry_testkit::drive::{ask, compile};
use kvferry_testkit::engine::Engine;
use kvferry_testkit::judge::compatible;
use kvferry_testkit::model::{Layer, Model, Sight};
use kvferry_testkit::plain::Memory::Separate;
use kvferry_testkit::plain::orders::token_major;
use kvferry_testkit::random::Dice;
use kvferry_testkit::recipe::Recipe;

fn simple(name: &str, layers: &[Layer], lanes: u64) -> Engine {
    Recipe::plain(name, &Model::new(layers.to_vec()), lanes).lay_out(Separate, &token_major())
}

/// The source ranks that each destination rank reads.
fn read(source: &Engine, destination: &Engine) -> Vec<Vec<usize>> {
    let sources: Vec<usize> = (0..source.ranks.len()).collect();
    let ranks = 0..destination.ranks.len();
    ranks
        .map(|rank| {
            let plan = compile(source, &sources, destination, rank).unwrap();
            sources.iter().copied().filter(|&source| plan.reads(source)).collect()
        })
        .collect()
}

/// How often each source rank is read.
fn loads(source: &Engine, destination: &Engine) -> Vec<usize> {
    let read = read(source, destination);
    let count = |rank| read.iter().filter(|sources| sources.contains(&rank)).count();
    (0..source.ranks.len()).map(count).collect()
}

fn is_even(loads: &[usize]) -> bool {
    loads.iter().max().unwrap() - loads.iter().min().unwrap() <= 1
}

/// Latents lie on every rank: each destination reads one rank, and all ranks have equal loads.
#[test]
fn latents_are_read_from_all_ranks_in_turn() {
    let layers = [Layer::latent("layers.0", 4), Layer::latent("layers.1", 4)];
    for (from, to) in [(4, 4), (2, 8), (8, 2), (3, 7), (7, 3), (1, 5), (8, 8)] {
        let (source, destination) = (simple("p", &layers, from), simple("d", &layers, to));
        let read = read(&source, &destination);
        assert!(read.iter().all(|sources| sources.len() == 1), "{from} to {to}: {read:?}");
        assert!(is_even(&loads(&source, &destination)), "{from} to {to}: {read:?}");
    }
}

/// Heads that are replicated because there are fewer of them than ranks.
#[test]
fn replicated_heads_are_read_from_all_ranks_in_turn() {
    let layers = [Layer::attention("layers.0", Sight::Full, 2, 2, 2)];
    for (from, to) in [(8, 2), (8, 4), (8, 8), (4, 8), (2, 8)] {
        let (source, destination) = (simple("p", &layers, from), simple("d", &layers, to));
        let read = read(&source, &destination);
        assert!(read.iter().all(|sources| sources.len() == 1), "{from} to {to}: {read:?}");
        assert!(is_even(&loads(&source, &destination)), "{from} to {to}: {read:?}");
    }
}

/// A destination that needs both heads of ranks 0 and 1 takes the latent from one of them.
#[test]
fn replicas_are_read_where_something_else_is_read_anyway() {
    let layers = [Layer::attention("layers.0", Sight::Full, 8, 2, 2), Layer::latent("draft.0", 5)];
    for (from, to) in [(8, 4), (8, 2), (4, 4), (4, 8), (6, 4)] {
        let (source, destination) = (simple("p", &layers, from), simple("d", &layers, to));
        let only_heads = [layers[0].clone()];
        let heads = read(&simple("p", &only_heads, from), &simple("d", &only_heads, to));
        assert_eq!(read(&source, &destination), heads, "{from} to {to}");
    }
}

/// As few sources as a search over all sets of sources finds, within what greed may cost; on most pairs
/// exactly as few.
#[test]
fn few_sources_are_read() {
    let (mut exact, mut more) = (0u64, 0u64);
    for seed in 0..300 {
        let mut dice = Dice::new(seed);
        let model = Model::draw(&mut dice);
        let source = engine(&model, Side::Source, &mut dice);
        let destination = engine(&model, Side::Destination, &mut dice);
        let count = source.ranks.len();
        let all: Vec<usize> = (0..count).collect();
        let rank = dice.index(destination.ranks.len());
        if count > 6 || compatible(&source, &all, &destination, rank).is_err() {
            continue;
        }
        let sets = (0u32..1 << count).filter(|set| {
            let chosen: Vec<usize> =
                all.iter().copied().filter(|rank| set >> rank & 1 == 1).collect();
            compatible(&source, &chosen, &destination, rank).is_ok()
        });
        let fewest = sets.map(u32::count_ones).min().unwrap() as usize;
        let plan = compile(&source, &all, &destination, rank).unwrap();
        let used = all.iter().filter(|&&rank| plan.reads(rank)).count();
        assert!(used >= fewest, "seed {seed}: fewer sources than can be");
        assert!(used <= 2 * fewest, "seed {seed}: {used} sources, {fewest} are enough");
        if used == fewest {
            exact += 1;
        } else {
            more += 1;
        }
    }
    assert!(exact > 100 && exact > 20 * more, "{exact} exact, {more} with more");
}

/// The same manifests give the same copies, whatever was compiled before.
#[test]
fn plans_are_deterministic() {
    for seed in 0..100 {
        let mut dice = Dice::new(seed);
        let model = Model::draw(&mut dice);
        let source = engine(&model, Side::Source, &mut dice);
        let destination = engine(&model, Side::Destination, &mut dice);
        let all: Vec<usize> = (0..source.ranks.len()).collect();
        if compatible(&source, &all, &destination, 0).is_err() {
            continue;
        }
        let request = kvferry_testkit::request::draw(
            &source,
            &destination,
            30,
            kvferry_testkit::request::Shape::Scattered,
            &mut dice,
        );
        let say = || {
            let plan = compile(&source, &all, &destination, 0).unwrap();
            ask(&plan, all.len(), &request).unwrap()
        };
        assert_eq!(say(), say());
    }
}

/// Replicas differ by their number in the engine, not by the order in which their manifests come.
#[test]
fn the_order_of_manifests_does_not_matter() {
    let layers = [Layer::latent("layers.0", 4)];
    let (source, destination) = (simple("p", &layers, 4), simple("d", &layers, 4));
    let mut used: BTreeSet<usize> = BTreeSet::new();
    for rank in 0..4 {
        let forwards = compile(&source, &[0, 1, 2, 3], &destination, rank).unwrap();
        let backwards = compile(&source, &[3, 2, 1, 0], &destination, rank).unwrap();
        for index in 0..4 {
            assert_eq!(forwards.reads(index), backwards.reads(3 - index), "rank {rank}");
            if forwards.reads(index) {
                used.insert(index);
            }
        }
    }
    assert_eq!(used.len(), 4);
}
