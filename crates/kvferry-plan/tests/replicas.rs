//! Which of several ranks that hold the same are read: where there is little to read, few of them, always
//! the same, and all in turn; else all, each as much as the others.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_layout::arithmetic::gcd;
use kvferry_layout::{Piece, StateBox};
use kvferry_plan::Part;
use kvferry_testkit::draw::{Side, engine};
use kvferry_testkit::drive::{Compile, ask, compile, compile_spread};
use kvferry_testkit::engine::{Engine, Rank};
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

/// Bytes of an entry, for states that grow with the tokens and for snapshots: those that every source
/// rank gives to all destination ranks together.
fn given(source: &Engine, destination: &Engine) -> [Vec<f64>; 2] {
    let all: Vec<usize> = (0..source.ranks.len()).collect();
    let mut given = [vec![0.0; all.len()], vec![0.0; all.len()]];
    for (rank, Rank { manifest, .. }) in destination.ranks.iter().enumerate() {
        let plan = compile_spread(source, &all, destination, rank).unwrap();
        for part in plan.parts() {
            let kind = manifest.kind(&manifest.groups()[part.to.0].pieces[part.to.1]);
            let turns = part.phase.held.len() as f64 / part.phase.modulus as f64;
            let bytes = part.bounds.volume() * u64::from(kind.format.bytes);
            given[usize::from(kind.law.entries == 0)][part.source] += turns * bytes as f64;
        }
    }
    given
}

/// The least that the busiest source must give, by trying all sets of sources: what only they hold, they
/// must give. Element by element, with nothing in common with how plans are made.
fn least(source: &Engine, destination: &Engine) -> [f64; 2] {
    let mut demands = [BTreeMap::<u32, f64>::new(), BTreeMap::new()];
    let pieces = |rank: &Rank| {
        let groups = rank.manifest.groups().to_vec();
        groups.into_iter().flat_map(|group| group.pieces).collect::<Vec<_>>()
    };
    let held: Vec<Vec<Piece>> = source.ranks.iter().map(pieces).collect();
    for rank in &destination.ranks {
        for piece in pieces(rank) {
            let kind = rank.manifest.kind(&piece);
            let demands = &mut demands[usize::from(kind.law.entries == 0)];
            for index in 0..piece.bounds.volume() {
                let mut rest = index;
                let element = piece.bounds.0.iter().map(|span| {
                    let at = span.start + rest % span.len();
                    rest /= span.len();
                    at..at + 1
                });
                let element = StateBox::new(element);
                let holds = |pieces: &[Piece]| {
                    let mut same = pieces.iter().filter(|other| other.state == piece.state);
                    same.any(|other| other.bounds.intersect(&element).is_some())
                };
                let set = (0..held.len()).filter(|&rank| holds(&held[rank]));
                let set = set.fold(0u32, |set, rank| set | 1 << rank);
                *demands.entry(set).or_default() += f64::from(kind.format.bytes);
            }
        }
    }
    demands.map(|demands| {
        let must = |set: u32| {
            let within = demands.iter().filter(|(holders, _)| *holders & !set == 0);
            within.map(|(_, bytes)| bytes).sum::<f64>() / f64::from(set.count_ones())
        };
        (1u32..1 << held.len()).map(must).fold(0.0, f64::max)
    })
}

/// Splits as engines make them: into equal shares, or the same share on equally many ranks.
#[test]
fn the_busiest_source_gives_little_more_than_it_must() {
    let mut dice = Dice::new(12);
    let (mut chosen, mut even) = (0, 0);
    for case in 0..300 {
        let mut some = |numbers: &[u64]| numbers[dice.index(numbers.len())];
        let layers: Vec<Layer> = (0..some(&[1, 2, 3, 5, 7, 12]))
            .map(|number| {
                let name = format!("layers.{number}");
                match some(&[0, 1, 2]) {
                    0 => Layer::latent(&name, some(&[1, 5, 9])),
                    1 => Layer::mamba2(&name, 8, 2, some(&[1, 2, 8]), 2, 2),
                    _ => Layer::attention(&name, Sight::Full, some(&[1, 2, 4, 8]), 2, 3),
                }
            })
            .collect();
        let (from, to) = (some(&[1, 2, 4, 8]), some(&[1, 2, 4, 8]));
        let (source, destination) = (simple("p", &layers, from), simple("d", &layers, to));
        let (given, least) = (given(&source, &destination), least(&source, &destination));
        let busiest = given.map(|given| given.into_iter().fold(0.0, f64::max));
        let context =
            format!("case {case}, {from} to {to}: {busiest:?}, least {least:?}, {layers:?}");
        assert!(busiest[0] >= 0.999 * least[0] && busiest[1] >= 0.999 * least[1], "{context}");
        // Layers are split into sixteen turns at the finest, and snapshots not at all.
        assert!(busiest[0] <= 1.25 * least[0] && busiest[1] <= 1.4 * least[1], "{context}");
        let close = |class: usize| busiest[class] <= 1.1 * least[class];
        even += u64::from(close(0) && close(1));
        chosen += u64::from(from > 1);
    }
    assert!(chosen > 150 && even > 280, "{chosen} with a choice, {even} of all within a tenth");
}

/// Sources that each rank of an engine reads that knows how many ranks it has, and the bytes that each source gives.
fn shared(layers: &[Layer], from: u64, to: u64) -> (usize, Vec<f64>) {
    let (source, destination) = (simple("p", layers, from), simple("d", layers, to));
    let all: Vec<usize> = (0..source.ranks.len()).collect();
    let pairs = (0..destination.ranks.len()).map(|rank| {
        let plan = compile_spread(&source, &all, &destination, rank).unwrap();
        all.iter().filter(|&&source| plan.reads(source)).count()
    });
    let [growing, _] = given(&source, &destination);
    (pairs.sum(), growing)
}

/// Latents lie on every rank, and nothing tells the ranks that read them how many they are but that they know it: they
/// share the sources evenly, in as few pairs as that takes.
#[test]
fn what_all_ranks_read_is_shared_among_them() {
    let layers: Vec<Layer> =
        (0..48).map(|number| Layer::latent(&format!("layers.{number}"), 4)).collect();
    for from in [1, 2, 3, 5, 8u64] {
        for to in [1, 2, 3, 6, 8u64] {
            let (pairs, given) = shared(&layers, from, to);
            let fewest = from + to - gcd(from, to);
            assert_eq!(pairs as u64, fewest, "{from} to {to}");
            let mean = given.iter().sum::<f64>() / from as f64;
            let most = given.iter().copied().fold(0.0, f64::max);
            assert!(most <= 1.1 * mean, "{from} to {to}: {given:?}");
        }
    }
}

/// Fewer heads than ranks on both sides: those that have the same head share the sources that have it.
#[test]
fn who_has_the_same_head_shares_its_sources() {
    let layers = [Layer::attention("layers.0", Sight::Full, 2, 2, 2)];
    for (from, to, fewest) in [(8, 8, 8), (8, 4, 8), (4, 8, 8), (8, 2, 8), (12, 8, 16)] {
        let (pairs, given) = shared(&layers, from, to);
        assert_eq!(pairs, fewest, "{from} to {to}");
        let mean = given.iter().sum::<f64>() / from as f64;
        assert!(given.iter().all(|bytes| *bytes <= 1.1 * mean), "{from} to {to}: {given:?}");
    }
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

/// The same for what is spread.
#[test]
fn the_order_of_manifests_does_not_matter_where_reads_are_spread() {
    let mut spread = 0;
    for seed in 0..300 {
        let mut dice = Dice::new(seed);
        let model = Model::draw(&mut dice);
        let source = engine(&model, Side::Source, &mut dice);
        let destination = engine(&model, Side::Destination, &mut dice);
        let forwards: Vec<usize> = (0..source.ranks.len()).collect();
        let mut shuffled = forwards.clone();
        dice.shuffle(&mut shuffled);
        if compatible(&source, &forwards, &destination, 0).is_err() {
            continue;
        }
        let parts = |order: &[usize], compile: Compile| {
            let plan = compile(&source, order, &destination, 0).unwrap();
            let part =
                |part: &Part| format!("{:?}", Part { source: order[part.source], ..part.clone() });
            let mut parts: Vec<String> = plan.parts().iter().map(part).collect();
            parts.sort_unstable();
            parts
        };
        let one = parts(&forwards, compile_spread);
        assert_eq!(one, parts(&shuffled, compile_spread), "seed {seed}");
        spread += u64::from(one != parts(&forwards, compile));
    }
    assert!(spread > 50, "{spread}");
}
