//! What is read part by part while the source computes is what is read at once in the end: for random
//! pairs of engines, against a judge who looks at every byte.

use std::collections::BTreeMap;

use kvferry_plan::{Growth, Plan, Request, Table};
use kvferry_testkit::drive::{Drawn, ask, compile, compile_spread};
use kvferry_testkit::judge::{Sources, compatible};
use kvferry_testkit::random::Dice;
use kvferry_testkit::request::{OwnedRequest, OwnedTable, Shape, draw};

const SEEDS: u64 = 300;

#[derive(Default)]
struct Seen {
    parts: u64,
    /// Pairs of which something grows, and of which something waits.
    growing: u64,
    waiting: u64,
    bytes_early: u64,
}

#[test]
fn what_is_read_part_by_part_is_what_is_read_at_once() {
    let mut seen = Seen::default();
    for seed in 0..SEEDS {
        let pair = Drawn::new(seed);
        let mut dice = Dice::new(seed ^ 0x6772_6f77);
        let compile = if seed % 2 == 0 { compile } else { compile_spread };
        for rank in 0..pair.destination.ranks.len() {
            if compatible(&pair.source, &pair.sources, &pair.destination, rank).is_err() {
                continue;
            }
            let plan = compile(&pair.source, &pair.sources, &pair.destination, rank).unwrap();
            let growth = plan.growth();
            seen.growing += u64::from(growth.groups.contains(&true));
            seen.waiting += u64::from(growth.groups.contains(&false));
            let shape = if dice.chance(50) { Shape::Ascending } else { Shape::Scattered };
            let request = draw(&pair.source, &pair.destination, 60, shape, &mut dice);
            follow(&pair, rank, &plan, &growth, &request, &mut dice, &mut seen).unwrap_or_else(
                |problem| panic!("seed {seed}, rank {rank}: {problem}\n{request:?}"),
            );
        }
    }
    let Seen { parts, growing, waiting, bytes_early } = seen;
    println!(
        "{parts} parts; {growing} ranks with groups that grow, {waiting} with others; {bytes_early} bytes early"
    );
    assert!(parts > 500 && growing > 250 && waiting > 100 && bytes_early > 50_000);
}

/// Reads a request in parts that end at random tokens.
fn follow(
    pair: &Drawn,
    rank: usize,
    plan: &Plan,
    growth: &Growth,
    request: &OwnedRequest,
    dice: &mut Dice,
    seen: &mut Seen,
) -> Result<(), String> {
    let mut held = 0;
    let mut frontier = 0;
    let mut arrived = BTreeMap::new();
    loop {
        frontier = (frontier + dice.within(1, 20)).min(request.tokens);
        let last = frontier == request.tokens;
        let tokens = if last { frontier } else { frontier - frontier % growth.step };
        if tokens <= held && !last {
            continue;
        }
        let cached = growth.groups.iter().zip(&request.cached).map(|(grows, cached)| match grows {
            true => (*cached).max(held).min(tokens),
            false if last => *cached,
            false => tokens,
        });
        let cached: Vec<u64> = cached.collect();
        // Nothing is known of what waits.
        let source =
            (0..request.source.len()).map(|group| match last || grows_at_source(pair, group) {
                true => request.source[group].clone(),
                false => OwnedTable::default(),
            });
        let part = OwnedRequest {
            tokens,
            cached,
            source: source.collect(),
            destination: request.destination.clone(),
        };
        let said = ask(plan, pair.sources.len(), &part).map_err(|error| error.to_string())?;
        // Nothing else is there yet: what is not complete must not be read.
        let filled = Sources::fill(&pair.source, &part);
        filled.judge(&pair.sources, &pair.destination, rank, &said)?;
        for (source, copies) in said.copies.iter().enumerate() {
            for copy in copies {
                for byte in 0..copy.bytes {
                    let from = (source, copy.source + byte);
                    if arrived.insert(copy.destination + byte, from).is_some() {
                        return Err(format!("{copy:?} writes what was read before"));
                    }
                    seen.bytes_early += u64::from(!last);
                }
            }
        }
        seen.parts += 1;
        if last {
            break;
        }
        held = tokens;
    }
    let whole = ask(plan, pair.sources.len(), request).map_err(|error| error.to_string())?;
    let mut at_once = BTreeMap::new();
    for (source, copies) in whole.copies.iter().enumerate() {
        for copy in copies {
            let bytes = 0..copy.bytes;
            at_once.extend(bytes.map(|b| (copy.destination + b, (source, copy.source + b))));
        }
    }
    match arrived == at_once {
        true => Ok(()),
        false => Err("the parts are not the whole".to_owned()),
    }
}

/// Whether a source lets a group's table be known before the end.
fn grows_at_source(pair: &Drawn, group: usize) -> bool {
    let facts = &pair.source.ranks[0].manifest.groups()[group];
    facts.window.tokens.is_none() && facts.tokens_per_block.is_some()
}

/// Windows move on and snapshots are rewritten, so they wait; where nothing grows no step is ever reached.
#[test]
fn what_cannot_grow_has_no_step() {
    let mut none = 0;
    for seed in 0..200 {
        let pair = Drawn::new(seed);
        let Ok(plan) = compile(&pair.source, &pair.sources, &pair.destination, 0) else { continue };
        let growth = plan.growth();
        for (group, grows) in growth.groups.iter().enumerate() {
            let facts = &pair.destination.ranks[0].manifest.groups()[group];
            let can = facts.window.tokens.is_none() && facts.tokens_per_block.is_some();
            assert!(!grows || can, "seed {seed}: group {group}");
        }
        assert_eq!(growth.step == u64::MAX, !growth.groups.contains(&true), "seed {seed}");
        none += u64::from(growth.step == u64::MAX);
        // A request of nothing is nothing.
        let tables = vec![Table::default(); 9];
        let request = Request {
            tokens: 0,
            cached: &vec![0; growth.groups.len()],
            source: &tables[..pair.source.recipe.groups.len()],
            destination: &tables[..growth.groups.len()],
        };
        assert!(plan.transfer(&request).is_ok());
    }
    assert!(none > 0);
}
