//! What describing and compiling cost, and what a request costs before anything of it is read.
//!
//! `cargo bench -p kvferry-testkit`

use std::hint::black_box;
use std::time::Instant;

use kvferry_layout::Manifest;
use kvferry_models::rules::vllm;
use kvferry_models::{Topology, presets};
use kvferry_plan::{Loops, Plan, Request, Table};
use kvferry_testkit::heap::{self, Counting};

#[global_allocator]
static HEAP: Counting = Counting;

/// The median of `rounds` timings in nanoseconds.
fn median(rounds: usize, mut work: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_nanos() as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[rounds / 2]
}

struct Pair {
    name: String,
    destination: Manifest,
    sources: Vec<Manifest>,
}

/// Released models, laid out as vLLM 0.32 lays them out.
fn pairs() -> Vec<Pair> {
    let pair = |model: &str, prefill: &str, decode: &str| {
        let found = presets::find(model).expect("a preset").model().expect("a known family");
        let side = |topology: &str, engine| {
            let topology: Topology =
                format!("{topology},blocks=20000").parse().expect("a topology");
            vllm::manifests(&found, &topology, engine).expect("a topology that vLLM runs")
        };
        Pair {
            name: format!("{model} {prefill} -> {decode}"),
            destination: side(decode, "decode").swap_remove(0),
            sources: side(prefill, "prefill"),
        }
    };
    vec![
        pair("nemotron-h-8b", "tp=8", "tp=2"),
        pair("kimi-linear-48b", "tp=4", "tp=1"),
        pair("llama-3.1-70b", "tp=8", "tp=4,pp=2"),
        pair("llama-3.1-70b", "tp=4", "tp=4"),
        pair("kimi-k3", "tp=6", "tp=4"),
    ]
}

/// Block ids: in one run, or each far from its neighbours.
fn table(blocks: u64, scattered: bool, first: u32) -> Vec<u32> {
    // 7919 is prime and larger than any step between neighbours that could look contiguous.
    let id = |i: u64| if scattered { (i * 7919 % 19_391) as u32 } else { i as u32 };
    (0..blocks).map(|i| first + id(i)).collect()
}

fn main() {
    let pairs = pairs();
    println!("compiling one destination rank's plan (median of 21)");
    println!(
        "{:38} {:>7} {:>9} {:>9} {:>9} {:>10} {:>9}",
        "pair", "sources", "wire KiB", "mem KiB", "plan KiB", "compile ms", "x decode"
    );
    for pair in &pairs {
        let sources: Vec<&Manifest> = pair.sources.iter().collect();
        let bytes = pair.destination.to_bytes();
        let decode = median(21, || drop(black_box(Manifest::from_bytes(&bytes))));
        let compile = median(21, || drop(black_box(Plan::compile(&pair.destination, &sources))));
        let (_, manifest) = heap::measure(|| pair.destination.clone());
        let (_, plan) = heap::measure(|| Plan::compile(&pair.destination, &sources));
        println!(
            "{:38} {:>7} {:>9.1} {:>9.1} {:>9.1} {:>10.3} {:>9.2}",
            pair.name,
            sources.len(),
            bytes.len() as f64 / 1024.0,
            manifest.kept as f64 / 1024.0,
            plan.kept as f64 / 1024.0,
            compile / 1e6,
            compile / decode,
        );
    }

    println!();
    println!("a request as loops (median of 15 rounds)");
    println!(
        "  us: from block tables to the loops of all sources; ns: that for each block of all tables;"
    );
    println!("  of 25 GB/s: that of the time in which a link of that rate carries its bytes");
    println!(
        "{:38} {:>7} {:>10} {:>9} {:>9} {:>7} {:>9} {:>7} {:>11} {:>7}",
        "pair", "tokens", "blocks", "MB", "copies", "nests", "us", "ns", "of 25 GB/s", "allocs"
    );
    for pair in &pairs {
        let sources: Vec<&Manifest> = pair.sources.iter().collect();
        let plan = Plan::compile(&pair.destination, &sources).expect("these pairs fit");
        for tokens in [1_000u64, 8_000, 32_000, 128_000] {
            for scattered in [false, true] {
                measure(pair, &plan, tokens, scattered);
            }
        }
    }
}

fn measure(pair: &Pair, plan: &Plan, tokens: u64, scattered: bool) {
    let tables = |manifest: &Manifest| {
        let mut next = 1;
        let tables = manifest.groups().iter().map(|group| {
            let blocks = group.tokens_per_block.map_or(1, |size| tokens.div_ceil(size));
            let table = table(blocks, scattered && blocks > 1, next);
            if blocks == 1 {
                next += 1;
            }
            table
        });
        tables.collect::<Vec<_>>()
    };
    // State groups take the first ids, the attention group the rest.
    let order = |mut tables: Vec<Vec<u32>>| {
        let singles = tables.iter().filter(|table| table.len() == 1).count() as u32;
        for table in tables.iter_mut().filter(|table| table.len() > 1) {
            let shift = singles + 1 - table.iter().min().copied().unwrap_or(0);
            table.iter_mut().for_each(|id| *id += shift);
        }
        tables
    };
    let (source, destination) = (order(tables(&pair.sources[0])), order(tables(&pair.destination)));
    let source: Vec<Table<'_>> = source.iter().map(|table| Table::new(table)).collect();
    let destination: Vec<Table<'_>> = destination.iter().map(|table| Table::new(table)).collect();
    let cached = vec![0; destination.len()];
    let request = Request { tokens, cached: &cached, source: &source, destination: &destination };
    let blocks: usize = source.iter().chain(&destination).map(|table| table.blocks.len()).sum();
    let loops = || -> Vec<Loops> {
        let transfer = plan.transfer(black_box(&request)).expect("a sound request");
        let loops = |source| transfer.loops(source).expect("a sound plan");
        (0..pair.sources.len()).map(loops).collect()
    };
    let (made, heap) = heap::measure(loops);
    let sum = |of: fn(&Loops) -> u64| made.iter().map(of).sum::<u64>();
    let bytes = sum(Loops::bytes) as f64;
    let repeat = (100_000 / blocks.max(1)).clamp(1, 1000);
    let took = median(15, || (0..repeat).for_each(|_| drop(black_box(loops()))));
    let took = took / repeat as f64;
    println!(
        "{:38} {:>7} {:>10} {:>9.1} {:>9} {:>7} {:>9.1} {:>7.2} {:>10.3}% {:>7}",
        pair.name,
        tokens,
        if scattered { "scattered" } else { "contiguous" },
        bytes / 1e6,
        sum(Loops::runs),
        sum(|loops| loops.nests().len() as u64),
        took / 1e3,
        took / blocks as f64,
        100.0 * took / (bytes / 25.0),
        heap.calls,
    );
}
