//! Random pairs of engines, laid out by two random recipes: equal contents have equal digests whatever
//! the layouts, every byte that changes is found, and the numbers are those of the definition.

use std::collections::BTreeMap;

use kvferry_digest::model::Byte;
use kvferry_digest::{Digest, DigestError, Held, Key, Part, Program, host};
use kvferry_layout::{Axis, Law, Manifest, Phase, Place, Span, StateBox};
use kvferry_testkit::drive::{Drawn, ask, compile, compile_spread};
use kvferry_testkit::engine::{Holding, Rank};
use kvferry_testkit::large::hundred_layers;
use kvferry_testkit::random::Dice;
use kvferry_testkit::request::{OwnedTable, Shape, draw, places};

/// The memory of a rank: a block for each region, at an address of its own.
struct Memory {
    regions: Vec<(u64, Vec<u8>)>,
    manifest: Manifest,
}

impl Memory {
    fn new(rank: &Rank, dice: &mut Dice) -> Self {
        let mut draft = rank.manifest.clone().into_draft();
        let mut regions = vec![];
        for region in &mut draft.regions {
            let bytes: Vec<u8> = (0..region.bytes).map(|_| dice.any() as u8).collect();
            let stated = region.base;
            region.base = bytes.as_ptr() as u64;
            regions.push((stated, bytes));
        }
        Self { regions, manifest: Manifest::new(draft).unwrap() }
    }

    /// By the addresses of the manifest as it was drawn.
    fn bytes(&mut self, address: u64, bytes: u64) -> &mut [u8] {
        let inside = |(base, region): &&mut (u64, Vec<u8>)| {
            (*base..*base + region.len() as u64).contains(&address)
        };
        let (base, region) = self.regions.iter_mut().find(inside).unwrap();
        &mut region[(address - *base) as usize..][..bytes as usize]
    }

    fn digests(&self, program: &Program) -> Vec<Digest> {
        for (address, bytes) in program.extents() {
            let inside = |(_, region): &(u64, Vec<u8>)| {
                let held = region.as_ptr_range();
                held.start as u64 <= address && address + bytes <= held.end as u64
            };
            assert!(self.regions.iter().any(inside), "{bytes} bytes at {address:#x}");
        }
        // SAFETY: every extent lies in a region, as was just checked.
        unsafe { host::digest(program, &|| false) }.unwrap()
    }
}

fn tables(owned: &[OwnedTable]) -> Vec<(u64, &[u32])> {
    owned.iter().map(|table| (table.first, &table.blocks[..])).collect()
}

/// The byte of a request at a place, free of any parallelism.
fn value(state: &str, entry: u64, element: u64, byte: u64) -> u8 {
    let name = state.bytes().fold(7_u64, |sum, byte| sum.wrapping_mul(31) + u64::from(byte));
    (Dice::new(name ^ entry << 40 ^ element << 8 ^ byte).any() >> 20) as u8
}

/// Indices in the whole state of an element of a holding.
fn index(holding: &Holding, mut element: u64) -> Vec<u64> {
    let mut index: Vec<u64> = (holding.bounds.iter().rev())
        .map(|range| {
            let count = range.end - range.start;
            let at = range.start + element % count;
            element /= count;
            at
        })
        .collect();
    index.reverse();
    index
}

#[derive(Default)]
struct Seen {
    ranks: u64,
    pieces: u64,
    bytes: u64,
    several_sources: u64,
}

fn judge(seed: u64, seen: &mut Seen) {
    let drawn = Drawn::new(seed);
    let dice = &mut Dice::new(!seed);
    let shape = if dice.chance(40) { Shape::Ascending } else { Shape::Scattered };
    let request = draw(&drawn.source, &drawn.destination, 60, shape, dice);
    let key = Key([dice.any(), dice.any()]);
    let mut sources: Vec<Memory> = vec![];
    for rank in &drawn.source.ranks {
        let mut memory = Memory::new(rank, dice);
        for (group, facts) in drawn.source.recipe.groups.iter().enumerate() {
            for holding in &rank.holdings[group] {
                let live = facts.reach().live(holding.law, request.tokens);
                for (entry, position, slot) in places(holding, &live) {
                    let table = &request.source[group];
                    let Some(block) = table.at(position, facts.null_block) else { continue };
                    for element in 0..holding.volume() {
                        let address = holding.address(block, slot, element);
                        let bytes = memory.bytes(address, holding.element);
                        for (byte, at) in bytes.iter_mut().zip(0..) {
                            *byte = value(&holding.state, entry, holding.whole(element), at);
                        }
                    }
                }
            }
        }
        sources.push(memory);
    }
    for (number, rank) in drawn.destination.ranks.iter().enumerate() {
        let compile = if seed.is_multiple_of(2) { compile } else { compile_spread };
        let Ok(plan) = compile(&drawn.source, &drawn.sources, &drawn.destination, number) else {
            continue;
        };
        seen.ranks += 1;
        let said = ask(&plan, drawn.sources.len(), &request).unwrap();
        let mut memory = Memory::new(rank, dice);
        let mut read: Vec<(usize, u64)> = vec![];
        for (copies, &source) in said.copies.iter().zip(&drawn.sources) {
            for copy in copies {
                let bytes = sources[source].bytes(copy.source, copy.bytes).to_vec();
                memory.bytes(copy.destination, copy.bytes).copy_from_slice(&bytes);
                read.extend((copy.source..copy.source + copy.bytes).map(|at| (source, at)));
            }
        }
        let mut pieces: Vec<((usize, usize), Span)> = vec![];
        let mut numbers = BTreeMap::new();
        let mut defined: Vec<Digest> = vec![];
        let mut needed_bytes: Vec<(usize, u64)> = vec![];
        for (group, facts) in drawn.destination.recipe.groups.iter().enumerate() {
            for (piece, holding) in rank.holdings[group].iter().enumerate() {
                let copied = facts.copied(holding, &drawn.source);
                let needed = copied.needed(holding.law, request.cached[group], request.tokens);
                if needed.is_empty() {
                    continue;
                }
                numbers.insert((group, piece), pieces.len());
                let mut sum = Digest::default();
                for (entry, position, slot) in places(holding, &needed) {
                    let table = &request.destination[group];
                    let block = table.at(position, facts.null_block).unwrap();
                    for element in 0..holding.volume() {
                        let address = holding.address(block, slot, element);
                        let index = index(holding, element);
                        for at in 0..holding.element {
                            let value = memory.bytes(address + at, 1)[0];
                            let (state, width) = (&holding.state, holding.element);
                            let byte = Byte { state, entry, index: &index, width, at, value };
                            sum += byte.digest(&key);
                            needed_bytes.push((pieces.len(), address + at));
                        }
                    }
                }
                pieces.push(((group, piece), needed.into()));
                defined.push(sum);
            }
        }
        let (from, to) = (tables(&request.source), tables(&request.destination));
        let tokens = request.tokens;
        let own = |memory: &Memory| {
            let held = Held { manifest: &memory.manifest, tokens, tables: &to };
            memory.digests(&Program::of_pieces(held, &key, &pieces).unwrap())
        };
        let asked = |sources: &[Memory]| {
            let mut sums = vec![Digest::default(); pieces.len()];
            for (index, &source) in drawn.sources.iter().enumerate() {
                let parts = plan.parts().iter().filter(|part| part.source == index);
                let parts = parts.filter_map(|part| Some((*numbers.get(&part.to)?, part)));
                let (of, parts): (Vec<usize>, Vec<Part>) = parts
                    .map(|(number, part)| {
                        let piece = &rank.manifest.groups()[part.to.0].pieces[part.to.1];
                        let (state, bounds) = (piece.state.clone(), part.bounds.clone());
                        let (phase, entries) = (part.phase, pieces[number].1);
                        (number, Part { state, bounds, phase, entries })
                    })
                    .unzip();
                let manifest = &sources[source].manifest;
                let held = Held { manifest, tokens, tables: &from };
                let program = Program::new(held, &key, &parts).unwrap();
                for (number, digest) in of.into_iter().zip(sources[source].digests(&program)) {
                    sums[number] += digest;
                }
            }
            sums
        };
        let here = own(&memory);
        assert_eq!(here, defined, "seed {seed}: not what is defined");
        let there = asked(&sources);
        assert_eq!(here, there, "seed {seed}, rank {number}: equal contents differ\n{drawn}");
        seen.pieces += pieces.len() as u64;
        seen.bytes += needed_bytes.len() as u64;
        seen.several_sources += u64::from(said.copies.iter().filter(|c| !c.is_empty()).count() > 1);
        // Any single change is found, on either side, and in no other piece.
        for _ in 0..3.min(needed_bytes.len()) {
            let (piece, address) = needed_bytes[dice.index(needed_bytes.len())];
            let flip = 1 << dice.within(0, 7);
            memory.bytes(address, 1)[0] ^= flip;
            let changed = own(&memory);
            for (other, (now, before)) in changed.iter().zip(&here).enumerate() {
                assert_eq!(now == before, other != piece, "seed {seed}: piece {other} of {piece}");
            }
            memory.bytes(address, 1)[0] ^= flip;
        }
        if !read.is_empty() {
            let (source, address) = read[dice.index(read.len())];
            sources[source].bytes(address, 1)[0] ^= 0x10;
            let changed = asked(&sources);
            let differing = changed.iter().zip(&there).filter(|(now, before)| now != before);
            // More than one where two pieces hold the same part.
            assert_ne!(differing.count(), 0, "seed {seed}: a change at the source");
            sources[source].bytes(address, 1)[0] ^= 0x10;
        }
    }
}

#[test]
fn equal_contents_have_equal_digests_and_any_change_is_found() {
    let mut seen = Seen::default();
    for seed in 0..500 {
        judge(seed, &mut seen);
    }
    println!("{} ranks, {} pieces, {} bytes", seen.ranks, seen.pieces, seen.bytes);
    assert!(seen.ranks > 300 && seen.pieces > 1000 && seen.several_sources > 50);
}

/// One piece over one region that is these bytes.
fn one_piece(bytes: &[u8], width: u32, lengths: &[u64], strides: &[u64]) -> Manifest {
    let mut draft = hundred_layers(2);
    draft.groups.truncate(1);
    draft.regions.truncate(1);
    draft.groups[0].pieces.truncate(1);
    draft.regions[0].base = bytes.as_ptr() as u64;
    draft.regions[0].bytes = bytes.len() as u64;
    draft.regions[0].place = Place::Host;
    draft.kinds[0].format.bytes = width;
    draft.kinds[0].law = Law::SNAPSHOT;
    let axes = lengths.iter().enumerate();
    draft.kinds[0].axes = axes.map(|(n, &length)| Axis::new(format!("x{n}"), length)).collect();
    let piece = &mut draft.groups[0].pieces[0];
    piece.kind = 0;
    piece.bounds = StateBox::whole(&draft.kinds[0].axes);
    (piece.view.block, piece.view.axes) = (bytes.len() as u64 / 2, strides.to_vec());
    Manifest::new(draft).unwrap()
}

/// Real sizes: long rows, joined rows, and runs of several chunks are what the definition says.
#[test]
fn long_runs_are_what_is_defined() {
    let dice = &mut Dice::new(1);
    let bytes: Vec<u8> = (0..40_000).map(|_| dice.any() as u8).collect();
    for (width, lengths, strides) in [
        (2_u32, &[3_u64, 128][..], &[256_u64, 2][..]),
        (2, &[3, 128], &[2, 6]),
        (4, &[5, 7, 64], &[64 * 4, 5 * 64 * 4, 4]),
        (1, &[2, 3000], &[3000, 1]),
        (1, &[2, 3001], &[3001, 1]),
        (13, &[9], &[13]),
        (13, &[9], &[20]),
        (656, &[], &[]),
        (2, &[9000], &[2]),
        (3, &[5, 11], &[33, 3]),
        (8, &[300], &[8]),
    ] {
        let manifest = one_piece(&bytes, width, lengths, strides);
        let tables = [(0, &[1][..])];
        let held = Held { manifest: &manifest, tokens: 5, tables: &tables };
        let key = Key([dice.any(), dice.any()]);
        let (state, whole) = {
            let piece = &manifest.groups()[0].pieces[0];
            (piece.state.clone(), piece.bounds.clone())
        };
        // The whole of it, and a part that starts and ends anywhere.
        let cut = whole.0.iter().map(|span| {
            let start = dice.within(0, span.end - 1);
            start..dice.within(start + 1, span.end)
        });
        let cut = StateBox::new(cut.collect::<Vec<_>>());
        for bounds in [whole, cut] {
            let mut indices = vec![vec![]];
            for span in &bounds.0 {
                let longer = |index: Vec<u64>| {
                    (span.start..span.end).map(move |at| [&index[..], &[at]].concat())
                };
                indices = indices.into_iter().flat_map(longer).collect();
            }
            let mut defined = Digest::default();
            for index in indices {
                let offset: u64 = index.iter().zip(strides).map(|(i, stride)| i * stride).sum();
                for at in 0..u64::from(width) {
                    let value = bytes[(20_000 + offset + at) as usize];
                    let width = width.into();
                    let byte = Byte { state: &state, entry: 0, index: &index, width, at, value };
                    defined += byte.digest(&key);
                }
            }
            let (phase, entries) = (Phase::ALL, (0..1).into());
            let part = Part { state: state.clone(), bounds, phase, entries };
            let program = Program::new(held, &key, std::slice::from_ref(&part)).unwrap();
            // SAFETY: the region is `bytes`, and the manifest was checked against it.
            let found = unsafe { host::digest(&program, &|| false) }.unwrap();
            assert_eq!(found, [defined], "{width} bytes, {lengths:?} by {strides:?}: {part:?}");
        }
    }
}

/// What a rank does not have, and what makes no sense, is refused with a reason.
#[test]
fn what_cannot_be_looked_at_is_refused() {
    let mut draft = hundred_layers(10);
    draft.groups.swap(0, 3);
    draft.groups.truncate(1);
    let manifest = Manifest::new(draft).unwrap();
    let piece = &manifest.groups()[0].pieces[0];
    let good = Part {
        state: piece.state.clone(),
        bounds: piece.bounds.clone(),
        phase: Phase::ALL,
        entries: (0..2000).into(),
    };
    let try_with = |change: &dyn Fn(&mut Part), tables: &[(u64, &[u32])]| {
        let held = Held { manifest: &manifest, tokens: 2000, tables };
        let mut part = good.clone();
        change(&mut part);
        Program::new(held, &Key([1, 2]), &[part]).err()
    };
    let (table, state) = ([(0, &[3, 4][..])], good.state.clone());
    assert_eq!(try_with(&|_| (), &table), None);
    let (entry, tokens, entries) = (2000, 2000, 2000);
    let beyond = DigestError::Beyond { state: state.clone(), entry, tokens, entries };
    assert_eq!(try_with(&|part| part.entries.end = 2001, &table), Some(beyond));
    let huge = try_with(&|part| part.entries.end = u64::MAX, &table);
    assert!(matches!(huge, Some(DigestError::Beyond { .. })));
    let short = DigestError::NoBlock { state: state.clone(), group: 0, position: 1 };
    assert_eq!(try_with(&|_| (), &[(0, &[3])]), Some(short.clone()));
    assert_eq!(try_with(&|_| (), &[(0, &[3, 0])]), Some(short.clone()), "a dead entry");
    assert_eq!(try_with(&|_| (), &[(0, &[3, 10])]), Some(short), "a block that is not there");
    assert_eq!(try_with(&|_| (), &[]), Some(DigestError::TableCount { groups: 1, tables: 0 }));
    let not_held = try_with(&|part| part.bounds.0[0].end = 9, &table);
    let bounds = StateBox::new([8..9, 0..128]);
    assert_eq!(not_held, Some(DigestError::NotHeld { state: state.clone(), bounds }));
    let unknown = try_with(&|part| part.state = "layers.900/k".to_owned(), &table);
    assert!(matches!(unknown, Some(DigestError::NotHeld { .. })));
    for senseless in [
        try_with(&|part| part.bounds.0[0] = (3..3).into(), &table),
        try_with(&|part| part.bounds = StateBox::new(std::iter::once(0..1)), &table),
        try_with(&|part| part.phase = Phase { modulus: 0, held: (0..1).into() }, &table),
        try_with(&|part| part.phase = Phase { modulus: 2, held: (1..1).into() }, &table),
    ] {
        assert_eq!(senseless, Some(DigestError::Malformed { state: state.clone() }));
    }
}

#[test]
fn looking_stops_when_it_is_told_to() {
    let bytes = vec![7_u8; 32 << 20];
    let manifest = one_piece(&bytes, 2, &[4 << 20], &[2]);
    let tables = [(0, &[1][..])];
    let held = Held { manifest: &manifest, tokens: 1, tables: &tables };
    let program = Program::of_pieces(held, &Key([1, 2]), &[((0, 0), Span::from(0..1))]).unwrap();
    assert_eq!(program.bytes(), 8 << 20);
    // SAFETY: the region is `bytes`, and the manifest was checked against it.
    unsafe {
        assert!(host::digest(&program, &|| false).is_some());
        assert!(host::digest(&program, &|| true).is_none());
    }
}
