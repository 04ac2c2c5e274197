//! Hand-offs as they come: pages of several sizes, long requests, many at once.

use std::ops::Range;
use std::time::Instant;

use kvferry_cuda::{Cuda, CudaOptions, CudaPeer};
use kvferry_layout::Loops;
use kvferry_plan::{ByteCopy, Plan, Request, Table};
use kvferry_transport::{Operation, Status, Transport};
use serde::Serialize;

use super::case::{Case, Ranks};
use super::measure::{Bench, Ready, median, soon};
use super::outcome::Outcome;
use crate::Failure;

const PAGES: [(u64, &str, &str); 2] =
    [(16, "tp=4,block=16", "tp=8,block=16"), (64, "tp=4,block=64", "tp=8,block=64")];
/// Thousands of tokens of a request, and how many there are at once.
const REQUESTS: [(u64, usize); 8] =
    [(8, 1), (32, 1), (128, 1), (512, 1), (8, 4), (8, 16), (8, 64), (32, 16)];
/// Thousands of tokens that a pool can hold. The first holds the most of the requests.
const POOLS: [u64; 7] = [512, 256, 128, 64, 32, 16, 8];

/// Memory for requests on both sides, which share one card.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Pool {
    page: u64,
    /// Thousands of tokens.
    thousands: u64,
    /// What both sides take, and what was free on the card.
    bytes: u64,
    free: u64,
    /// Requests that it does not hold: thousands of tokens, and how many at once.
    left_out: Vec<(u64, usize)>,
}

impl Pool {
    /// The largest for which the card has room; an eighth of what is free is left for lists and contexts.
    fn fitting(
        page: u64,
        free: u64,
        bytes: impl Fn(u64) -> Result<u64, Failure>,
    ) -> Result<Self, Failure> {
        let mut least = 0;
        for thousands in POOLS {
            least = bytes(thousands)?;
            if least <= free / 8 * 7 {
                let left_out = REQUESTS
                    .into_iter()
                    .filter(|&(tokens, requests)| tokens * requests as u64 > thousands);
                return Ok(Self {
                    page,
                    thousands,
                    bytes: least,
                    free,
                    left_out: left_out.collect(),
                });
            }
        }
        Err(format!(
            "the smallest pool takes {:.1} GB on both sides together, and seven eighths of the {:.1} \
             GB that are free on the card are less: end what else is on the card",
            least as f64 / 1e9,
            free as f64 / 1e9
        )
        .into())
    }

    fn holds(&self, request: (u64, usize)) -> bool {
        !self.left_out.contains(&request)
    }

    /// In one line.
    fn said(&self) -> String {
        let Self { page, thousands, bytes, free, left_out } = self;
        let left_out: Vec<String> = left_out
            .iter()
            .map(|&(tokens, requests)| match requests {
                1 => format!("{tokens}k"),
                _ => format!("{requests} x {tokens}k"),
            })
            .collect();
        format!(
            "pages of {page}: a pool of {thousands}k tokens, {:.1} GB on both sides of the {:.1} GB that were free; \
             left out: {}",
            *bytes as f64 / 1e9,
            *free as f64 / 1e9,
            if left_out.is_empty() { "nothing".to_owned() } else { left_out.join(", ") }
        )
    }
}

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

pub(super) fn run(
    bench: &mut Bench,
    pools: &mut Vec<Pool>,
    rows: &mut Vec<Handoff>,
    outcome: &mut Outcome,
) {
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
    for pages in PAGES {
        let measured = with_pages(bench, pages, pools, rows, outcome);
        outcome.keep(&format!("hand-offs: pages of {}", pages.0), measured);
    }
}

fn with_pages(
    bench: &mut Bench,
    (page, prefill, decode): (u64, &'static str, &'static str),
    pools: &mut Vec<Pool>,
    rows: &mut Vec<Handoff>,
    outcome: &mut Outcome,
) -> Result<(), Failure> {
    let case = |thousands| Case::scattered("llama-3.1-70b", prefill, decode, thousands << 10);
    // The source lets go of what it had.
    bench.source.hold(&[], false, None, None)?;
    let free = bench.card.free_memory()?;
    let bytes = |thousands| Ok(Ranks::new(&case(thousands))?.bytes());
    let pool = Pool::fitting(page, free, bytes)?;
    println!("{}", pool.said());
    let ready = bench.prepare(&case(pool.thousands))?;
    let (transport, peer) = ready.transport(&CudaOptions::default())?;
    for (thousands, requests) in REQUESTS.into_iter().filter(|&request| pool.holds(request)) {
        let row = measure(bench, &ready, (&transport, &peer), page, thousands << 10, requests);
        let name = format!("hand-offs: pages of {page}, {requests} x {thousands}k");
        let Some(row) = outcome.keep(&name, row) else { continue };
        show(&row);
        if row.wrong_bytes > 0 {
            outcome.fail(&format!("wrong bytes: {row:?}"));
        }
        rows.push(row);
    }
    pools.push(pool);
    Ok(())
}

fn show(row: &Handoff) {
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
        for source in 0..ready.plan.source_count() {
            copies.extend(checked.loops(source)?.copies());
        }
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
            let loops: Loops = checked.loops(source)?;
            operations.push(transport.read(peer, &loops, soon())?);
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

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    fn fitting(page: usize, free: u64) -> Result<Pool, Failure> {
        let (page, prefill, decode) = PAGES[page];
        Pool::fitting(page, free, |thousands| {
            let case = Case::scattered("llama-3.1-70b", prefill, decode, thousands << 10);
            Ok(Ranks::new(&case)?.bytes())
        })
    }

    #[test]
    fn both_sides_of_a_pool_fit_the_card() {
        // An H200, an A100 or H100, one with 24 GB, and one on which others have left little.
        for (free, thousands, left_out) in [
            (148 * GB, 512, vec![]),
            (84 * GB, 256, vec![(512, 1), (8, 64), (32, 16)]),
            (25 * GB, 128, vec![(512, 1), (8, 64), (32, 16)]),
            (2 * GB, 8, vec![(32, 1), (128, 1), (512, 1), (8, 4), (8, 16), (8, 64), (32, 16)]),
        ] {
            for page in 0..PAGES.len() {
                let pool = fitting(page, free).unwrap();
                assert_eq!((pool.thousands, &pool.left_out), (thousands, &left_out), "{pool:?}");
                // 80 KiB a token at the source, half as much at the destination, and a quarter to spare.
                let needed = (thousands << 10) * (120 << 10) / 4 * 5;
                assert!(pool.bytes >= needed && pool.bytes < needed + needed / 100 * 2, "{pool:?}");
                assert!(pool.bytes <= free, "{pool:?}");
            }
        }
    }

    #[test]
    fn a_pool_says_what_it_leaves_out() {
        let said = fitting(0, 84 * GB).unwrap().said();
        assert_eq!(
            said,
            "pages of 16: a pool of 256k tokens, 40.3 GB on both sides of the 84.0 GB that were free; left out: \
             512k, 64 x 8k, 16 x 32k"
        );
        assert!(fitting(1, 148 * GB).unwrap().said().ends_with("left out: nothing"));
    }

    #[test]
    fn a_card_without_room_is_an_error_with_both_values() {
        let error = fitting(0, GB).unwrap_err().to_string();
        assert!(error.contains("takes 1.3 GB") && error.contains("of the 1.0 GB"), "{error}");
    }
}
