//! Bad requests: each is an error that names the place, never a copy.

use kvferry_plan::{Plan, RequestError, Side};
use kvferry_testkit::draw::{self, engine};
use kvferry_testkit::drive::{Drawn, ask, compile};
use kvferry_testkit::engine::Engine;
use kvferry_testkit::judge::{Said, Sources, compatible};
use kvferry_testkit::model::{Layer, Model, Sight};
use kvferry_testkit::plain::Memory;
use kvferry_testkit::plain::orders::token_major;
use kvferry_testkit::random::Dice;
use kvferry_testkit::recipe::Recipe;
use kvferry_testkit::request::{OwnedRequest, OwnedTable, Shape};

/// Blocks of 4 tokens on the source and of 8 on the destination, a state group beside attention. Block
/// 0 is dead on both sides. Where the memory is overlaid, both groups are one pool.
fn pair(memory: Memory) -> (Engine, Engine) {
    let model = Model::new(vec![
        Layer::attention("layers.0", Sight::Full, 2, 2, 2),
        Layer::kda("layers.1", 2, 1, 3),
    ]);
    let engine = |name: &str, block| {
        let mut recipe = Recipe::plain(name, &model, 1).block(block).blocks(10);
        for group in &mut recipe.groups {
            group.null_block = Some(0);
        }
        recipe.lay_out(memory, &token_major())
    };
    (engine("p", 4), engine("d", 8))
}

fn plan(memory: Memory) -> Plan {
    let (source, destination) = pair(memory);
    assert_eq!(destination.recipe.groups[0].tokens_per_block, Some(8), "group 0 is attention");
    compile(&source, &[0], &destination, 0).unwrap()
}

fn table(first: u64, blocks: &[u32]) -> OwnedTable {
    OwnedTable { first, blocks: blocks.to_vec() }
}

/// 18 tokens: five blocks of the source, three of the destination, and a slot on each side.
fn good() -> OwnedRequest {
    OwnedRequest {
        tokens: 18,
        cached: vec![0, 0],
        source: vec![table(0, &[3, 4, 5, 6, 7]), table(0, &[8])],
        destination: vec![table(0, &[5, 3, 1]), table(0, &[7])],
    }
}

fn refused(change: impl Fn(&mut OwnedRequest)) -> RequestError {
    let mut errors = vec![];
    for memory in [Memory::Separate, Memory::LayerOutermost] {
        let mut request = good();
        change(&mut request);
        let said = ask(&plan(memory), 1, &request);
        errors.push(said.expect_err("a bad request is an error"));
    }
    assert_eq!(errors[0], errors[1]);
    errors.remove(0)
}

#[test]
fn the_request_that_is_broken_below_is_good() {
    for memory in [Memory::Separate, Memory::LayerOutermost] {
        let said = ask(&plan(memory), 1, &good()).unwrap();
        assert!(!said.copies[0].is_empty());
    }
}

#[test]
fn a_table_for_every_group() {
    for (side, expected) in [(Side::Source, 2), (Side::Destination, 2)] {
        for found in [0, 1, 3] {
            let error = refused(|request| {
                let tables = match side {
                    Side::Source => &mut request.source,
                    Side::Destination => &mut request.destination,
                };
                tables.resize(found, OwnedTable::default());
            });
            assert_eq!(error, RequestError::TableCount { side, expected, found });
        }
    }
}

#[test]
fn a_cached_length_for_every_group() {
    for found in [0, 1, 3] {
        let error = refused(|request| request.cached.resize(found, 0));
        assert_eq!(error, RequestError::CachedCount { expected: 2, found });
    }
}

#[test]
fn no_more_cached_than_there_is() {
    for cached in [19, u64::MAX] {
        let error = refused(|request| request.cached[1] = cached);
        assert_eq!(error, RequestError::CachedBeyondEnd { group: 1, cached, tokens: 18 });
    }
}

#[test]
fn block_ids_that_exist() {
    for id in [10, u32::MAX] {
        let error = refused(|request| request.source[0].blocks[2] = id);
        let (side, blocks) = (Side::Source, 10);
        let expected = RequestError::NoSuchBlock { side, group: 0, position: 2, id, blocks };
        assert_eq!(error, expected);
        let error = refused(|request| request.destination[1].blocks[0] = id);
        let side = Side::Destination;
        let expected = RequestError::NoSuchBlock { side, group: 1, position: 0, id, blocks };
        assert_eq!(error, expected);
    }
}

#[test]
fn tables_that_hold_what_is_needed() {
    let names = |error: &RequestError, words: &[&str]| {
        let message = error.to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    };
    // Too short, and clipped too far, on both sides.
    let error = refused(|request| request.source[0].blocks.truncate(4));
    names(&error, &["source group 0", "position 4"]);
    let error = refused(|request| request.destination[0].blocks.truncate(2));
    names(&error, &["destination group 0", "position 2"]);
    let error = refused(|request| request.source[0] = table(1, &[4, 5, 6, 7]));
    names(&error, &["source group 0", "position 0"]);
    let error = refused(|request| request.destination[0] = table(1, &[3, 1]));
    names(&error, &["destination group 0", "position 0"]);
    let error = refused(|request| request.destination[0] = table(u64::MAX, &[3, 1]));
    names(&error, &["destination group 0", "position 0"]);
    let error = refused(|request| request.source[0].blocks.clear());
    names(&error, &["source group 0", "position 0"]);
    // Dead entries.
    let error = refused(|request| request.source[0].blocks[3] = 0);
    names(&error, &["source group 0", "position 3"]);
    let error = refused(|request| request.destination[0].blocks[1] = 0);
    names(&error, &["destination group 0", "position 1"]);
    let error = refused(|request| request.destination[1].blocks[0] = 0);
    names(&error, &["destination group 1"]);
}

#[test]
fn one_slot_for_a_state() {
    for blocks in [&[][..], &[7, 8]] {
        for side in ["source", "destination"] {
            let error = refused(|request| match side {
                "source" => request.source[1].blocks = blocks.to_vec(),
                _ => request.destination[1].blocks = blocks.to_vec(),
            });
            let message = error.to_string();
            assert!(message.contains(&format!("{side} group 1")), "{message}");
        }
    }
}

#[test]
fn no_destination_block_twice() {
    let error = refused(|request| request.destination[0].blocks[2] = 5);
    assert!(error.to_string().contains('5'), "{error}");
}

/// A block id may serve two groups only where their blocks share no byte.
#[test]
fn no_destination_block_in_two_groups_of_a_pool() {
    let mut request = good();
    request.destination[1].blocks[0] = 3;
    ask(&plan(Memory::Separate), 1, &request).unwrap();
    let error = ask(&plan(Memory::LayerOutermost), 1, &request).unwrap_err();
    assert!(error.to_string().contains('3'), "{error}");
}

/// What is not needed is not asked for: dead or missing entries where tokens are held, the slot of a
/// state that is held, everything where there is no token.
#[test]
fn what_is_not_needed_may_be_missing() {
    let plan = plan(Memory::Separate);
    let mut request = good();
    request.cached = vec![16, 18];
    request.source = vec![table(4, &[7]), OwnedTable::default()];
    request.destination = vec![table(0, &[0, 0, 1]), OwnedTable::default()];
    let said = ask(&plan, 1, &request).unwrap();
    assert_eq!(said.copies[0].iter().map(|copy| copy.bytes).sum::<u64>(), 2 * 2 * 2 * 2 * 2);

    let nothing = OwnedRequest {
        tokens: 0,
        cached: vec![0, 0],
        source: vec![OwnedTable::default(); 2],
        destination: vec![OwnedTable::default(); 2],
    };
    assert_eq!(ask(&plan, 1, &nothing).unwrap(), Said { copies: vec![vec![]], rest: vec![] });
    let with_tables = OwnedRequest { tokens: 0, ..good() };
    let said = ask(&plan, 1, &with_tables).unwrap();
    assert_eq!(said, Said { copies: vec![vec![]], rest: vec![] });
}

/// Numbers at the end of their range are errors, not panics.
#[test]
fn huge_numbers_are_errors() {
    for tokens in [1 << 40, u64::MAX - 1, u64::MAX] {
        refused(|request| request.tokens = tokens);
        refused(|request| {
            request.tokens = tokens;
            request.cached = vec![tokens - 1, tokens];
        });
        refused(|request| {
            request.tokens = tokens;
            for table in request.source.iter_mut().chain(&mut request.destination) {
                table.first = u64::MAX;
            }
        });
    }
}

/// Random requests broken in random places: an error where something that is needed is missing or
/// impossible, and the right bytes where it is not.
#[test]
fn broken_requests_are_errors_or_still_right() {
    let (mut refused, mut right) = (0, 0);
    for seed in 0..400 {
        let drawn = Drawn::new(seed);
        let (source, sources, destination) = (&drawn.source, &drawn.sources, &drawn.destination);
        let mut dice = Dice::new(seed);
        let rank = dice.index(destination.ranks.len());
        if compatible(source, sources, destination, rank).is_err() {
            continue;
        }
        let plan = compile(source, sources, destination, rank).unwrap();
        let good =
            kvferry_testkit::request::draw(source, destination, 40, Shape::Scattered, &mut dice);
        for _ in 0..20 {
            let mut request = good.clone();
            for _ in 0..dice.within(1, 3) {
                break_somewhere(&mut request, &mut dice);
            }
            let said = ask(&plan, sources.len(), &request);
            if request.tokens > 100 {
                // Too long to walk; it must not panic, and is good where no token is needed.
                refused += u64::from(said.is_err());
                continue;
            }
            match (said, request.check(source, sources, destination, rank)) {
                (Err(_), Err(_)) => refused += 1,
                (Ok(said), Ok(())) => {
                    // A source that names a block twice lies: its bytes are not to be judged. A table
                    // that starts far behind the end is too far to walk.
                    let near = request.destination.iter().all(|table| table.first < 100);
                    if near && request.source_is_honest(source) {
                        let filled = Sources::fill(source, &request);
                        let verdict = filled.judge(sources, destination, rank, &said);
                        verdict.unwrap_or_else(|problem| panic!("seed {seed}: {problem}"));
                        right += 1;
                    }
                }
                (Ok(_), Err(problem)) => panic!("seed {seed}: {problem}\n{request:?}"),
                (Err(error), Ok(())) => panic!("seed {seed}: a good request: {error}\n{request:?}"),
            }
        }
    }
    assert!(refused > 1000 && right > 500, "{refused} refused, {right} right");
}

fn break_somewhere(request: &mut OwnedRequest, dice: &mut Dice) {
    let odd = dice.pick(&[0, 1, 7, 1 << 33, u64::MAX]);
    match dice.within(0, 5) {
        0 => request.tokens = odd,
        1 if !request.cached.is_empty() => {
            let at = dice.index(request.cached.len());
            request.cached[at] = odd;
        }
        way => {
            let tables =
                if dice.chance(50) { &mut request.source } else { &mut request.destination };
            if tables.is_empty() {
                return;
            }
            let at = dice.index(tables.len());
            let table = &mut tables[at];
            match way {
                2 => table.first = odd,
                3 => table.blocks.truncate(table.blocks.len().saturating_sub(1)),
                4 => drop(tables.pop()),
                _ if table.blocks.is_empty() => table.blocks.push(odd as u32),
                _ => {
                    let at = dice.index(table.blocks.len());
                    table.blocks[at] = odd as u32;
                }
            }
        }
    }
}

/// A destination rank that holds nothing asks for nothing.
#[test]
fn a_rank_without_pieces_moves_nothing() {
    let model = Model::new(vec![Layer::latent("layers.0", 3)]);
    let destination = Recipe::plain("d", &model, 1)
        .stages(&[&[0], &[]])
        .lay_out(Memory::Separate, &token_major());
    let source = engine(&model, draw::Side::Source, &mut Dice::new(3));
    let sources: Vec<usize> = (0..source.ranks.len()).collect();
    let plan = compile(&source, &sources, &destination, 1).unwrap();
    let request = OwnedRequest {
        tokens: 20,
        cached: vec![0],
        source: vec![OwnedTable::default(); source.recipe.groups.len()],
        destination: vec![table(0, &[1, 2])],
    };
    let said = ask(&plan, sources.len(), &request).unwrap();
    assert!(said.rest.is_empty() && said.copies.iter().all(Vec::is_empty));
}
