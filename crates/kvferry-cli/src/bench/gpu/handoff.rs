//! Hand-offs as they come: pages of several sizes, long requests, many at once.

use std::ops::Range;
use std::time::Instant;

use kvferry_layout::Loops;
use kvferry_plan::{ByteCopy, Plan, Request, Table};
use kvferry_transport::cuda::{Cuda, CudaOptions, CudaPeer};
use kvferry_transport::{Operation, Status, Transport};
use serde::Serialize;

use super::Failure;
use super::measure::{Bench, Case, Ready, median, soon};

const PAGES: [(u64, &str, &str); 2] =
    [(16, "tp=4,block=16", "tp=8,block=16"), (64, "tp=4,block=64", "tp=8,block=64")];
/// Thousands of tokens of a request, and how many there are at once. The pool holds the most of both.
const REQUESTS: [(u64, usize); 8] =
    [(8, 1), (32, 1), (128, 1), (512, 1), (8, 4), (8, 16), (8, 64), (32, 16)];
const MOST: u64 = 512 << 10;

/// What was found for some requests at once. Times are medians in microseconds.
#[derive(Debug, Serialize)]
pub(super) struct Handoff {
    pub(super) page: u64,
    pub(super) tokens: u64,
    pub(super) requests: usize,
    pub(super) bytes: u64,
    pub(super) wrong_bytes: u64,
    /// One copy on the card of as many bytes.
    pub(super) limit_us: f64,
    /// From the block ids of the first to the last byte of the last.
    pub(super) us: f64,
    /// To the last byte of the first of them.
    pub(super) first_us: f64,
    /// From the block ids of the first to the launch of the last, for each of them.
    pub(super) cpu_us: f64,
}

pub(super) fn run(bench: &mut Bench, rows: &mut Vec<Handoff>) -> Result<(), Failure> {
    println!(
        "\nhand-offs of llama-3.1-70b tp=4 -> tp=8; first: to the last byte of the first request; cpu: of each"
    );
    println!(
        "{:>5} {:>8} {:>9} {:>9} {:>10} {:>10} {:>6} {:>6} {:>6} {:>7} {:>6}",
        "page",
        "tokens",
        "requests",
        "MB",
        "us",
        "first us",
        "GB/s",
        "limit",
        "of it",
        "cpu us",
        "wrong"
    );
    for (page, prefill, decode) in PAGES {
        let case = Case::scattered("llama-3.1-70b", prefill, decode, MOST);
        let ready = bench.prepare(&case)?;
        let (transport, peer) = ready.transport(&CudaOptions::default())?;
        for (thousands, requests) in REQUESTS {
            let row = measure(bench, &ready, (&transport, &peer), page, thousands << 10, requests)?;
            println!(
                "{:>5} {:>7}k {:>9} {:>9.1} {:>10.1} {:>10.1} {:>6.0} {:>6.0} {:>6.3} {:>7.1} {:>6}",
                row.page,
                row.tokens >> 10,
                row.requests,
                row.bytes as f64 / 1e6,
                row.us,
                row.first_us,
                row.bytes as f64 / row.us / 1e3,
                row.bytes as f64 / row.limit_us / 1e3,
                row.limit_us / row.us,
                row.cpu_us,
                row.wrong_bytes
            );
            rows.push(row);
        }
    }
    Ok(())
}

fn measure(
    bench: &Bench,
    ready: &Ready,
    (transport, peer): (&Cuda, &CudaPeer),
    page: u64,
    tokens: u64,
    requests: usize,
) -> Result<Handoff, Failure> {
    let blocks = (tokens / page) as usize;
    // Every request has blocks of its own.
    let own = |number: usize| number * blocks..(number + 1) * blocks;
    let tables: Vec<(Vec<Table<'_>>, Vec<Table<'_>>)> = (0..requests)
        .map(|number| (part(&ready.from, own(number)), part(&ready.to, own(number))))
        .collect();
    let cached = vec![0; ready.to.len()];
    let asked: Vec<Request<'_>> = tables
        .iter()
        .map(|(source, destination)| Request { tokens, cached: &cached, source, destination })
        .collect();
    let mut copies: Vec<ByteCopy> = vec![];
    for request in &asked {
        let checked = ready.plan.transfer(request)?;
        (0..ready.plan.source_count()).for_each(|source| copies.extend(checked.copies(source)));
    }
    let bytes = copies.iter().map(|copy| copy.bytes).sum();
    let limit_us = bench.limit(transport, peer, ready, bytes)?;
    bench.poison(ready)?;
    let (mut all, mut first, mut cpu, mut wrong_bytes) = (vec![], vec![], vec![], 0);
    for round in 0..bench.rounds + 1 {
        let times = burst(transport, peer, &ready.plan, &asked)?;
        if round == 0 {
            wrong_bytes = bench.checker.check(&ready.memory, &copies, &ready.spans)?;
            continue;
        }
        all.push(times.all);
        first.push(times.first);
        cpu.push(times.launched / requests as f64);
    }
    let (us, first_us, cpu_us) = (median(all), median(first), median(cpu));
    Ok(Handoff { page, tokens, requests, bytes, wrong_bytes, limit_us, us, first_us, cpu_us })
}

/// Some of the blocks of tables, as tables.
fn part(tables: &[(u64, Vec<u32>)], blocks: Range<usize>) -> Vec<Table<'_>> {
    tables.iter().map(|(_, ids)| Table::new(&ids[blocks.clone()])).collect()
}

struct Times {
    launched: f64,
    first: f64,
    all: f64,
}

/// Everything from the block ids of all requests to their last bytes.
fn burst(
    transport: &Cuda,
    peer: &CudaPeer,
    plan: &Plan,
    requests: &[Request<'_>],
) -> Result<Times, Failure> {
    let began = Instant::now();
    let micros = || began.elapsed().as_secs_f64() * 1e6;
    let mut operations = Vec::with_capacity(requests.len());
    for request in requests {
        let checked = plan.transfer(request)?;
        for source in (0..plan.source_count()).filter(|&source| plan.reads(source)) {
            let loops: Loops = checked.loops(source);
            operations.push(transport.read_loops(peer, &loops, soon())?);
        }
    }
    let (launched, mut first) = (micros(), 0.0);
    for (number, operation) in operations.iter().enumerate() {
        match operation.wait(soon()) {
            Status::Done(_) => {}
            other => return Err(format!("a transfer ended as {other:?}").into()),
        }
        if number == 0 {
            first = micros();
        }
    }
    Ok(Times { launched, first, all: micros() })
}
