//! What is read layer by layer is what is read at once, and a layer brings no byte of another: for random
//! pairs of engines, against plans for engines that have no other layers. What is read at once is judged
//! elsewhere.

use std::collections::BTreeMap;

use kvferry_layout::Manifest;
use kvferry_plan::{LayerPlan, Plan, Request, Spread, Table};
use kvferry_testkit::drive::Drawn;
use kvferry_testkit::judge::compatible;
use kvferry_testkit::random::Dice;
use kvferry_testkit::request::{OwnedRequest, OwnedTable, Shape, draw};

const SEEDS: u64 = 300;

#[derive(Default)]
struct Seen {
    /// Ranks with several layers that grow, and with something that does not.
    several: u64,
    waiting: u64,
    /// Requests of which some layers are read before the others.
    subsets: u64,
    bytes: u64,
}

#[test]
fn what_is_read_layer_by_layer_is_what_is_read_at_once() {
    let mut seen = Seen::default();
    for seed in 0..SEEDS {
        let pair = Drawn::new(seed);
        let mut dice = Dice::new(seed ^ 0x6c61_7965);
        for rank in 0..pair.destination.ranks.len() {
            if compatible(&pair.source, &pair.sources, &pair.destination, rank).is_err() {
                continue;
            }
            let shape = if dice.chance(50) { Shape::Ascending } else { Shape::Scattered };
            let request = draw(&pair.source, &pair.destination, 60, shape, &mut dice);
            by_layer(&pair, rank, &request, &mut dice, &mut seen).unwrap_or_else(|problem| {
                panic!("seed {seed}, rank {rank}: {problem}\n{request:?}");
            });
        }
    }
    let Seen { several, waiting, subsets, bytes } = seen;
    println!(
        "{several} ranks with several layers, {waiting} where others wait; {subsets} subsets, {bytes} bytes"
    );
    assert!(several > 150 && waiting > 50 && subsets > 100 && bytes > 50_000);
}

fn by_layer(
    pair: &Drawn,
    rank: usize,
    request: &OwnedRequest,
    dice: &mut Dice,
    seen: &mut Seen,
) -> Result<(), String> {
    let own = &pair.destination.ranks[rank].manifest;
    let sources: Vec<&Manifest> =
        pair.sources.iter().map(|&rank| &pair.source.ranks[rank].manifest).collect();
    let whole = Plan::compile(own, &sources).map_err(|error| error.to_string())?;
    let plan = LayerPlan::compile(own, &sources, Spread::default());
    let plan = plan.map_err(|error| error.to_string())?;
    let growth = whole.growth();
    let layers = plan.layers().len();
    seen.several += u64::from(layers > 1);
    seen.waiting += u64::from(growth.groups.contains(&false));

    // As a follower asks: what does not grow is not read.
    let tokens = request.tokens - request.tokens % growth.step.min(request.tokens.max(1));
    let cached = growth.groups.iter().zip(&request.cached);
    let cached = cached.map(|(grows, cached)| if *grows { (*cached).min(tokens) } else { tokens });
    let part = OwnedRequest { tokens, cached: cached.collect(), ..request.clone() };

    let mut left: Vec<usize> = (0..layers).collect();
    let mut arrived = BTreeMap::new();
    while !left.is_empty() {
        let mut chosen = vec![];
        for _ in 0..dice.within(1, left.len() as u64) {
            chosen.push(left.swap_remove(dice.within(0, left.len() as u64 - 1) as usize));
        }
        seen.subsets += u64::from(!left.is_empty());
        let read = bytes(&plan.of(|layer| chosen.contains(&layer)), sources.len(), &part)?;
        // An engine that has nothing but these layers reads the same.
        let of_these = |state: &str| {
            let mut names = chosen.iter().map(|layer| &plan.layers()[*layer].name);
            names.any(|name| state.rsplit_once('/').is_some_and(|(layer, _)| layer == name))
        };
        let mut draft = own.clone().into_draft();
        for (group, grows) in draft.groups.iter_mut().zip(&growth.groups) {
            group.pieces.retain(|piece| *grows && of_these(&piece.state));
        }
        let alone = Manifest::new(draft).map_err(|error| error.to_string())?;
        let alone = Plan::compile(&alone, &sources).map_err(|error| error.to_string())?;
        let expected = bytes(&alone, sources.len(), &part)?;
        if !read.keys().eq(expected.keys()) {
            return Err(format!("layers {chosen:?} bring other bytes than theirs"));
        }
        // Nothing is read from ranks whose word for it is not waited for.
        for (source, from) in read.values() {
            let mut reads = chosen.iter().flat_map(|layer| &plan.layers()[*layer].reads);
            if !reads.any(|(rank, state)| rank == source && of_these(state)) {
                return Err(format!("layers {chosen:?} read byte {from:#x} of rank {source}"));
            }
        }
        for (to, (source, from)) in read {
            if arrived.insert(to, (source, from)).is_some() {
                return Err("two layers write the same byte".to_owned());
            }
            seen.bytes += 1;
        }
    }
    if arrived != bytes(&whole, sources.len(), &part)? {
        return Err("the layers are not the whole".to_owned());
    }
    Ok(())
}

/// Where every byte comes from, by where it goes.
fn bytes(
    plan: &Plan,
    sources: usize,
    request: &OwnedRequest,
) -> Result<BTreeMap<u64, (usize, u64)>, String> {
    let (source, destination) = (tables(&request.source), tables(&request.destination));
    let request = Request {
        tokens: request.tokens,
        cached: &request.cached,
        source: &source,
        destination: &destination,
    };
    let transfer = plan.transfer(&request).map_err(|error| error.to_string())?;
    let mut bytes = BTreeMap::new();
    for rank in 0..sources {
        for copy in transfer.loops(rank).unwrap().copies() {
            for at in 0..copy.bytes {
                let from = (rank, copy.source + at);
                if bytes.insert(copy.destination + at, from).is_some() {
                    return Err(format!("{copy:?} writes what another copy writes"));
                }
            }
        }
    }
    Ok(bytes)
}

fn tables(tables: &[OwnedTable]) -> Vec<Table<'_>> {
    tables.iter().map(|table| Table { first: table.first, blocks: &table.blocks }).collect()
}
