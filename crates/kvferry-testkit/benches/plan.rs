//! What describing, compiling and yielding cost, as ratios to the least that any implementation pays.
//!
//! `cargo bench -p kvferry-testkit`

use std::hint::black_box;
use std::time::Instant;

use kvferry_layout::Manifest;
use kvferry_models::rules::vllm;
use kvferry_models::{Topology, presets};
use kvferry_plan::{ByteCopy, Plan, Request, Table};
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
    println!("yielding a request's copies (median of 15 interleaved rounds)");
    println!(
        "  check: block tables to segments; yield: segments to copies in the caller's buffer;"
    );
    println!(
        "  loop: plain loops that write the same triples from known bases and strides; ratio: yield / loop"
    );
    println!(
        "{:38} {:>7} {:>10} {:>9} {:>9} {:>8} {:>8} {:>7} {:>7}",
        "pair", "tokens", "blocks", "copies", "check us", "yield ns", "loop ns", "ratio", "allocs"
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

/// Copies of equal length at equal strides.
struct Row {
    first: ByteCopy,
    count: u64,
    source: u64,
    destination: u64,
}

/// The copies as the fewest rows, from the first on.
fn rows(copies: &[ByteCopy]) -> Vec<Row> {
    let mut rows: Vec<Row> = vec![];
    for &copy in copies {
        if let Some(row) = rows.last_mut() {
            let (source, destination) = (
                copy.source.checked_sub(row.first.source),
                copy.destination.checked_sub(row.first.destination),
            );
            if row.count == 1
                && row.first.bytes == copy.bytes
                && let (Some(source), Some(destination)) = (source, destination)
            {
                (row.count, row.source, row.destination) = (2, source, destination);
                continue;
            }
            if row.first.bytes == copy.bytes
                && source == Some(row.count * row.source)
                && destination == Some(row.count * row.destination)
            {
                row.count += 1;
                continue;
            }
        }
        rows.push(Row { first: copy, count: 1, source: 0, destination: 0 });
    }
    rows
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
    let copies = |transfer: &kvferry_plan::Transfer<'_>| {
        (0..pair.sources.len()).map(|source| transfer.summary(source).copies).sum::<u64>()
    };
    let transfer = plan.transfer(&request).unwrap_or_else(|error| panic!("{}: {error}", pair.name));
    let count = copies(&transfer) as usize;
    let mut buffer = vec![ByteCopy::default(); count + 1];
    let fill = |transfer: &kvferry_plan::Transfer<'_>, buffer: &mut [ByteCopy]| {
        let mut filled = 0;
        for source in 0..pair.sources.len() {
            filled += transfer.copies(source).fill(&mut buffer[filled..]);
        }
        filled
    };
    let (filled, heap) = heap::measure(|| {
        let checked = plan.transfer(&request).expect("checked above");
        fill(&checked, &mut buffer)
    });
    assert_eq!(filled, count);
    // The plain loop knows every base, stride and count beforehand.
    let rows = rows(&buffer[..count]);
    let plain = |buffer: &mut [ByteCopy]| {
        let mut slots = buffer.iter_mut();
        for row in &rows {
            for (index, slot) in (0..row.count).zip(&mut slots) {
                *slot = ByteCopy {
                    source: row.first.source + index * row.source,
                    destination: row.first.destination + index * row.destination,
                    bytes: row.first.bytes,
                };
            }
        }
    };
    let mut again = vec![ByteCopy::default(); count];
    plain(&mut again);
    assert_eq!(again, buffer[..count]);
    let repeat = (200_000 / count.max(1)).clamp(1, 1000);
    let mut rounds: Vec<[f64; 3]> = (0..15)
        .map(|_| {
            let checked = median(1, || {
                for _ in 0..repeat {
                    black_box(plan.transfer(black_box(&request)).is_ok());
                }
            });
            let yielded = median(1, || {
                for _ in 0..repeat {
                    black_box(fill(&transfer, black_box(&mut buffer)));
                }
            });
            let looped = median(1, || (0..repeat).for_each(|_| plain(black_box(&mut buffer))));
            [checked, yielded, looped].map(|time| time / repeat as f64)
        })
        .collect();
    rounds.sort_by(|a, b| (a[1] / a[2]).total_cmp(&(b[1] / b[2])));
    let [checked, yielded, looped] = rounds[rounds.len() / 2];
    println!(
        "{:38} {:>7} {:>10} {:>9} {:>9.1} {:>8.2} {:>8.2} {:>7.2} {:>7}",
        pair.name,
        tokens,
        if scattered { "scattered" } else { "contiguous" },
        count,
        checked / 1e3,
        yielded / count as f64,
        looped / count as f64,
        yielded / looped,
        heap.calls,
    );
}
