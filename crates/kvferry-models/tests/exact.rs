//! Pairs of engines that share tokens, or keep compressed and quantised caches, by brute force: of every
//! state, the first and the last number of every entry that a decode rank needs comes from a rank that holds
//! it, and from the right place there. Addresses are computed from the views, number by number.

use kvferry_layout::{Manifest, Piece};
use kvferry_models::rules::vllm;
use kvferry_models::{Topology, presets};
use kvferry_plan::{ByteCopy, Plan, Request, Table};

/// The model, the two sides, and tokens. Ranks that take turns (`dcp`), those that share a prefill
/// (`pcp`), on one side or both, with any length of a turn; latents, heads, and states beside them.
const PAIRS: [(&str, &str, &str, u64); 22] = [
    ("deepseek-v3", "pcp=2", "tp=2", 130),
    ("deepseek-v3", "tp=2,pcp=2", "tp=4", 130),
    ("deepseek-v3", "pcp=4,dcp=4", "tp=2", 300),
    ("deepseek-v3", "tp=2,pcp=2,dcp=4,interleave=16", "tp=1", 300),
    ("deepseek-v3", "tp=2", "tp=4,dcp=4,interleave=8", 300),
    ("deepseek-v3", "tp=4,dcp=2", "tp=8,dcp=8,interleave=64", 700),
    ("deepseek-v3", "tp=4", "tp=2,pcp=2", 100),
    ("deepseek-v3.2", "tp=4,dcp=4", "tp=2", 300),
    ("deepseek-v3.2", "tp=2,kv=fp8_ds_mla", "tp=4,dcp=2,interleave=4,kv=fp8_ds_mla", 300),
    ("kimi-linear", "tp=4,dcp=4,interleave=32", "tp=2", 900),
    ("kimi-linear", "tp=2", "tp=4,dcp=2", 900),
    ("kimi-linear", "pcp=2,dcp=2", "tp=4", 900),
    ("llama-3.1-8b", "tp=16,dcp=2", "tp=4", 70),
    ("llama-3.1-8b", "tp=4", "tp=32,dcp=4,interleave=16", 150),
    ("llama-3.1-8b", "tp=16,dcp=2,interleave=4,block=32", "tp=16,dcp=2,interleave=16", 150),
    ("llama-3.1-8b", "tp=4,kv=nvfp4", "tp=2,kv=nvfp4,block=64", 150),
    ("llama-3.1-8b", "tp=4,kv=int4_per_token_head", "tp=16,kv=int4_per_token_head", 70),
    ("nemotron-h-8b", "tp=2", "tp=8,kernel=16", 100),
    ("deepseek-v4-flash", "tp=2", "tp=4,layout=BLNHC", 600),
    ("deepseek-v4.1", "tp=2", "tp=4,spec=6", 300),
    ("deepseek-v4.1", "tp=2,kv=fp8_ds_mla", "tp=4,kv=fp8_ds_mla", 300),
    ("deepseek-v3", "tp=2,pcp=2,dcp=4,kv=fp8", "tp=4,kv=fp8", 300),
];

#[test]
fn numbers_come_from_where_they_are() {
    for (model, prefill, decode, tokens) in PAIRS {
        let model = presets::find(model).unwrap().model().unwrap();
        let engine = |topology: &str, name: &str| {
            let topology: Topology = format!("{topology},blocks=2000").parse().unwrap();
            vllm::manifests(&model, &topology, name).unwrap()
        };
        let (sources, destination) = (engine(prefill, "prefill"), engine(decode, "decode"));
        let (from, to) = (tables(&sources[0], tokens, 3), tables(&destination[0], tokens, 5));
        let mut checked = 0;
        for rank in &destination {
            checked += check(rank, &sources, &from, &to, tokens, &format!("{prefill} {decode}"));
        }
        assert!(checked > 1000, "{} {prefill} {decode}: {checked}", model.name);
    }
}

/// Block ids of every group, no id twice, each `step` after the other.
fn tables(rank: &Manifest, tokens: u64, step: u32) -> Vec<Vec<u32>> {
    let mut next = 1;
    let tables = rank.groups().iter().map(|group| {
        let count = group.tokens_per_block.map_or(1, |size| tokens.div_ceil(size));
        let table = (0..count).map(|_| {
            next += step;
            next
        });
        table.collect()
    });
    tables.collect()
}

/// How many numbers were checked.
fn check(
    rank: &Manifest,
    sources: &[Manifest],
    from: &[Vec<u32>],
    to: &[Vec<u32>],
    tokens: u64,
    pair: &str,
) -> u64 {
    let refs: Vec<&Manifest> = sources.iter().collect();
    let plan = Plan::compile(rank, &refs).unwrap();
    let source: Vec<Table<'_>> = from.iter().map(|table| Table::new(table)).collect();
    let target: Vec<Table<'_>> = to.iter().map(|table| Table::new(table)).collect();
    let cached = vec![0; target.len()];
    let request = Request { tokens, cached: &cached, source: &source, destination: &target };
    let transfer = plan.transfer(&request).unwrap();
    // All copies, by where they land.
    let mut copies: Vec<(usize, ByteCopy)> = vec![];
    for number in 0..sources.len() {
        let loops = transfer.loops(number).unwrap();
        copies.extend(loops.copies().map(|copy| (number, copy)));
    }
    copies.sort_by_key(|(_, copy)| copy.destination);
    let mut checked = 0;
    for (group, kept) in rank.groups().iter().enumerate() {
        for (number, piece) in kept.pieces.iter().enumerate() {
            let kind = rank.kind(piece);
            let first = match kind.law.entries {
                0 => 0,
                _ => kind.law.closed(kept.window.first_live(tokens)),
            };
            for entry in (first..kind.law.entries(tokens)).filter(|&it| piece.phase.holds(it)) {
                for place in corners(piece) {
                    let lands = address(rank, group, number, to, entry, &place);
                    let after = copies.partition_point(|(_, copy)| copy.destination <= lands);
                    let (read, copy) = &copies[after.checked_sub(1).expect("a copy before it")];
                    let into = lands - copy.destination;
                    let what = format!("{pair}: {} of {entry}, {place:?}", piece.state);
                    assert!(into < copy.bytes, "{what}: no copy lands there");
                    let holders =
                        sources[*read].groups().iter().enumerate().flat_map(|(at, it)| {
                            it.pieces
                                .iter()
                                .enumerate()
                                .map(move |(index, piece)| (at, index, piece))
                        });
                    let mut right = holders.filter(|(_, _, other)| {
                        let mut spans = other.bounds.0.iter().zip(&place);
                        other.state == piece.state
                            && other.phase.holds(entry)
                            && spans.all(|(span, at)| (span.start..span.end).contains(at))
                    });
                    let (at, index, _) = right.next().unwrap_or_else(|| panic!("{what}: not held"));
                    let expected = address(&sources[*read], at, index, from, entry, &place);
                    assert_eq!(copy.source + into, expected, "{what}");
                    checked += 1;
                }
            }
        }
    }
    checked
}

/// The first and the last number of what is held of a state.
fn corners(piece: &Piece) -> [Vec<u64>; 2] {
    let spans = &piece.bounds.0;
    [spans.iter().map(|span| span.start).collect(), spans.iter().map(|span| span.end - 1).collect()]
}

/// Where a number of an entry lies, as `View` documents it.
fn address(
    rank: &Manifest,
    group: usize,
    number: usize,
    tables: &[Vec<u32>],
    entry: u64,
    place: &[u64],
) -> u64 {
    let piece = &rank.groups()[group].pieces[number];
    let (view, per_block) = (&piece.view, rank.entries_per_block(group, number));
    let local = piece.phase.local(entry);
    let block = tables[group][usize::try_from(local / per_block).unwrap()];
    let slot = local % per_block;
    let (kernel, within) = match view.kernel {
        Some(kernel) => (slot / kernel.entries * kernel.stride, slot % kernel.entries),
        None => (0, slot),
    };
    let axes = piece.bounds.0.iter().zip(&view.axes).zip(place);
    let inside: u64 = axes.map(|((span, stride), at)| (at - span.start) * stride).sum();
    let base = rank.regions()[view.region as usize].base + view.offset;
    base + u64::from(block) * view.block + kernel + within * view.entry + inside
}
