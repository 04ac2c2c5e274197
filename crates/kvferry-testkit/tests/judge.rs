//! The judge itself: it accepts what a plain loop over all bytes does, and nothing that differs from it.

use kvferry_layout::{Manifest, Piece};
use kvferry_testkit::draw::{Side, engine};
use kvferry_testkit::engine::Engine;
use kvferry_testkit::judge::{Leftover, Move, Said, Sources, compatible};
use kvferry_testkit::model::Model;
use kvferry_testkit::random::Dice;
use kvferry_testkit::request::{OwnedRequest, OwnedTable, Shape, draw};

/// The address of an element of an entry by the manifest's facts; `None` where it is not there.
fn address(
    manifest: &Manifest,
    group: usize,
    number: usize,
    table: &OwnedTable,
    entry: u64,
    element: &[u64],
) -> Option<u64> {
    let (group_facts, piece) =
        (&manifest.groups()[group], &manifest.groups()[group].pieces[number]);
    if !piece.phase.holds(entry) {
        return None;
    }
    let slots = manifest.entries_per_block(group, number);
    let local = piece.phase.local(entry);
    let block = table.at(local / slots, group_facts.null_block)?;
    slot_address(manifest, piece, block, local % slots, element)
}

fn slot_address(
    manifest: &Manifest,
    piece: &Piece,
    block: u32,
    slot: u64,
    element: &[u64],
) -> Option<u64> {
    let view = &piece.view;
    let mut address = manifest.regions()[view.region as usize].base + view.offset;
    address += u64::from(block) * view.block;
    address += match view.kernel {
        Some(kernel) => slot / kernel.entries * kernel.stride + slot % kernel.entries * view.entry,
        None => slot * view.entry,
    };
    for ((span, stride), &index) in piece.bounds.0.iter().zip(&view.axes).zip(element) {
        if !(span.start..span.end).contains(&index) {
            return None;
        }
        address += (index - span.start) * stride;
    }
    Some(address)
}

fn elements(piece: &Piece) -> Vec<Vec<u64>> {
    let mut elements = vec![vec![]];
    for span in &piece.bounds.0 {
        let longer = elements.iter().flat_map(|element: &Vec<u64>| {
            (span.start..span.end).map(|index| {
                let mut longer = element.clone();
                longer.push(index);
                longer
            })
        });
        elements = longer.collect();
    }
    elements
}

/// A transfer by the dullest means: byte for byte, from the first source that has it.
fn by_hand(source: &Engine, destination: &Engine, rank: usize, request: &OwnedRequest) -> Said {
    let mut said = Said { copies: vec![vec![]; source.ranks.len()], rest: vec![] };
    let manifest = &destination.ranks[rank].manifest;
    for (group, facts) in manifest.groups().iter().enumerate() {
        let (table, cached, n) =
            (&request.destination[group], request.cached[group], request.tokens);
        let needed = |piece: &Piece| {
            let law = manifest.kind(piece).law;
            // Less than the group keeps where the source keeps less and the model needs no more.
            let sources = source.ranks.iter().flat_map(|rank| rank.manifest.groups());
            let mut holders =
                sources.filter(|group| group.pieces.iter().any(|other| other.state == piece.state));
            let window = match piece.need {
                Some(need) if !holders.all(|kept| kept.window.keeps(&facts.window)) => need,
                _ => facts.window,
            };
            let first = window.first_live(n);
            let first = if first == 0 { 0 } else { law.closed(first) };
            first.max(law.held(cached, n))..law.entries(n)
        };
        for (number, piece) in facts.pieces.iter().enumerate() {
            let bytes = u64::from(manifest.kind(piece).format.bytes);
            for entry in needed(piece) {
                for element in elements(piece) {
                    let to = address(manifest, group, number, table, entry, &element);
                    let Some(to) = to else { continue };
                    let from = source.ranks.iter().enumerate().find_map(|(index, rank)| {
                        let other = &rank.manifest;
                        let groups = other.groups().iter().enumerate();
                        let mut pieces = groups.flat_map(|(group, facts)| {
                            facts
                                .pieces
                                .iter()
                                .enumerate()
                                .map(move |(number, piece)| (group, number, piece))
                        });
                        pieces.find_map(|(group, number, other_piece)| {
                            if other_piece.state != piece.state {
                                return None;
                            }
                            let table = &request.source[group];
                            let from = address(other, group, number, table, entry, &element)?;
                            Some((index, from))
                        })
                    });
                    let (index, from) = from.expect("a compatible source has it");
                    let copy = Move { source: from, destination: to, bytes };
                    said.copies[index].push(copy);
                }
            }
        }
        for (position, &block) in (table.first..).zip(&table.blocks) {
            if Some(block) == facts.null_block {
                continue;
            }
            let mut slots = vec![];
            let mut missing = false;
            for (number, piece) in facts.pieces.iter().enumerate() {
                let law = manifest.kind(piece).law;
                let count = manifest.entries_per_block(group, number);
                for slot in 0..count {
                    let local = position * count + slot;
                    let turn = piece.phase.held.len();
                    let entry =
                        local / turn * piece.phase.modulus + piece.phase.held.start + local % turn;
                    let held = entry < law.held(cached, n);
                    missing |= !held && n > 0;
                    if !held && !needed(piece).contains(&entry) {
                        slots.push((piece, slot));
                    }
                }
            }
            if !missing {
                continue;
            }
            for (piece, slot) in slots {
                let bytes = u64::from(manifest.kind(piece).format.bytes);
                for element in elements(piece) {
                    let address = slot_address(manifest, piece, block, slot, &element).unwrap();
                    said.rest.push(Leftover { address, bytes });
                }
            }
            for scratch in &facts.scratch {
                let base = manifest.regions()[scratch.region as usize].base;
                let mut starts = vec![base + scratch.offset + u64::from(block) * scratch.block];
                for &(count, stride) in &scratch.dims {
                    let more = starts
                        .iter()
                        .flat_map(|start| (0..count).map(move |index| start + index * stride));
                    starts = more.collect();
                }
                let areas = starts.into_iter();
                said.rest.extend(areas.map(|address| Leftover { address, bytes: scratch.run }));
            }
        }
    }
    for list in &mut said.copies {
        *list = joined(list, manifest, source);
    }
    said
}

/// The list with copies that touch made one, unless they lie in different regions.
fn joined(list: &[Move], destination: &Manifest, source: &Engine) -> Vec<Move> {
    let starts = |address: u64, manifest: &Manifest| {
        manifest.regions().iter().any(|region| region.base == address)
    };
    let mut joined: Vec<Move> = vec![];
    for copy in list {
        let border = starts(copy.destination, destination)
            || source.ranks.iter().any(|rank| starts(copy.source, &rank.manifest));
        match joined.last_mut() {
            Some(last)
                if !border
                    && last.source + last.bytes == copy.source
                    && last.destination + last.bytes == copy.destination =>
            {
                last.bytes += copy.bytes;
            }
            _ => joined.push(*copy),
        }
    }
    joined
}

/// Pairs that fit, with a request and what a plain loop does for it.
fn pairs(
    seeds: u64,
    mut check: impl FnMut(&Engine, &Engine, usize, &OwnedRequest, &Said, &mut Dice),
) {
    let mut fitting = 0;
    for seed in 0..seeds {
        let mut dice = Dice::new(seed);
        let model = Model::draw(&mut dice);
        let source = engine(&model, Side::Source, &mut dice);
        let destination = engine(&model, Side::Destination, &mut dice);
        let sources: Vec<usize> = (0..source.ranks.len()).collect();
        let rank = dice.index(destination.ranks.len());
        if compatible(&source, &sources, &destination, rank).is_err() {
            continue;
        }
        let request = draw(&source, &destination, 60, Shape::Scattered, &mut dice);
        let said = by_hand(&source, &destination, rank, &request);
        fitting += 1;
        check(&source, &destination, rank, &request, &said, &mut dice);
    }
    assert!(fitting * 2 > seeds, "only {fitting} of {seeds} pairs fit");
}

#[test]
fn a_plain_loop_over_all_bytes_is_right() {
    let mut moved = 0;
    pairs(300, |source, destination, rank, request, said, _| {
        let sources: Vec<usize> = (0..source.ranks.len()).collect();
        let filled = Sources::fill(source, request);
        match filled.judge(&sources, destination, rank, said) {
            Ok(tally) => moved += tally.bytes,
            Err(problem) => panic!("{problem}\n{request:?}"),
        }
    });
    assert!(moved > 10_000);
}

#[test]
fn whatever_differs_from_it_is_wrong() {
    let mut tried = [0; 7];
    pairs(300, |source, destination, rank, request, said, dice| {
        let sources: Vec<usize> = (0..source.ranks.len()).collect();
        let filled = Sources::fill(source, request);
        let lists: Vec<usize> =
            (0..sources.len()).filter(|&list| !said.copies[list].is_empty()).collect();
        for (way, tried) in tried.iter_mut().enumerate() {
            let mut wrong = said.clone();
            if way < 5 {
                if lists.is_empty() {
                    continue;
                }
                let list = dice.pick(&lists);
                let copies = &mut wrong.copies[list];
                let at = dice.index(copies.len());
                match way {
                    0 => drop(copies.remove(at)),
                    1 => copies[at].source += 1,
                    2 => copies[at].destination += 1,
                    3 => copies[at].bytes += 1,
                    _ => copies.push(copies[at]),
                }
            } else {
                if wrong.rest.is_empty() {
                    continue;
                }
                let at = dice.index(wrong.rest.len());
                match way {
                    5 => drop(wrong.rest.swap_remove(at)),
                    _ => wrong.rest[at].bytes += 1,
                }
            }
            *tried += 1;
            let verdict = filled.judge(&sources, destination, rank, &wrong);
            assert!(verdict.is_err(), "way {way} passed");
        }
    });
    assert!(tried.iter().all(|&times| times > 20), "{tried:?}");
}
