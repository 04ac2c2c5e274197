//! `kvferry-bench overlap`: how much of the transfer prefill hides.

mod link;
mod pair;
mod plot;

use std::fs;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use self::pair::{Pair, Prefill, Times, Way};
use crate::Failure;

/// Measure how much of the transfer prefill hides, against the prompt's length.
///
/// A prefill and a decode engine hand requests over by tcp: sequentially, where decode reads when prefill
/// has ended; following, where it reads what is complete while prefill computes the rest; and following by
/// layer, where it also reads the layers of the chunk in flight that are written. Prefill is a timer, which says
/// chunk by chunk that so many tokens are complete, and which layers; agents, memory and bytes are real. Each
/// read is held back for as long as a link of the given rate would take, by default a little more than the rate
/// at which prefill fills memory. The ways take turns, and all bytes are compared after each request.
#[derive(Debug, Args)]
pub(super) struct Overlap {
    /// Lengths of the prompts, separated by commas.
    #[arg(long, value_delimiter = ',', default_values_t = [1024, 2048, 4096, 8192, 16384])]
    tokens: Vec<u64>,
    /// Tokens that prefill computes in a second.
    #[arg(long, default_value_t = 8192)]
    speed: u64,
    /// Tokens of a chunk: what is complete is told after each.
    #[arg(long, default_value_t = 512)]
    chunk: u64,
    /// What the link carries, as a multiple of what prefill computes.
    #[arg(long, default_value_t = 1.1)]
    link: f64,
    /// How often everything is measured.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Write the results to this file, as JSON.
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
    /// Draw the exposed time against the prompt's length into this file.
    #[arg(long, value_name = "PATH")]
    svg: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Results {
    tokens_per_second: u64,
    chunk: u64,
    bytes_per_token: u64,
    link_bytes_per_second: f64,
    rounds: usize,
    lengths: Vec<Row>,
}

/// Medians for one length, in milliseconds.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) tokens: u64,
    /// From prefill's last token to decode's last byte, confirmed.
    pub(super) exposed: Ways,
    /// From prefill's start to the same.
    pub(super) total: Ways,
    /// The total of following over that of the sequential way, in the same round.
    pub(super) ratio: f64,
    /// The same, by layer.
    pub(super) ratio_by_layer: f64,
}

#[derive(Debug, Serialize)]
pub(super) struct Ways {
    pub(super) sequential: f64,
    pub(super) following: f64,
    pub(super) by_layer: f64,
    /// Following by layer, over a link without limit.
    pub(super) unlimited: f64,
}

/// In this order, and whether the link is limited.
const WAYS: [(Way, bool); 4] =
    [(Way::Sequential, true), (Way::Following, true), (Way::ByLayer, true), (Way::ByLayer, false)];

impl Overlap {
    pub(super) fn run(self) -> Result<(), Failure> {
        let Self { speed, chunk, rounds, link, .. } = self;
        let longest = self.tokens.iter().copied().max().unwrap_or(0);
        if speed == 0 || chunk == 0 || rounds == 0 || self.tokens.contains(&0) || longest == 0 {
            return Err(
                "nothing to measure: --tokens, --speed, --chunk and --rounds are at least 1".into(),
            );
        }
        if longest > 1 << 20 {
            return Err(
                format!("--tokens {longest}: that is too long, take at most {}", 1 << 20).into()
            );
        }
        if !(link.is_finite() && link > 0.0) {
            return Err(format!("--link {link}: that is not a rate").into());
        }
        let rate = link * (speed * pair::BYTES_PER_TOKEN) as f64;
        let pair = Pair::start(longest)?;
        // The handshake is not measured.
        pair.hand_over(&Prefill { tokens: 1, speed, chunk }, Way::ByLayer, None)?;
        let mut lengths = vec![];
        for &tokens in &self.tokens {
            let prefill = Prefill { tokens, speed, chunk };
            let mut times: Vec<[Times; WAYS.len()]> = vec![];
            for round in 0..rounds {
                say(&format!("{tokens} tokens, round {} of {rounds}", round + 1));
                let mut one = [Times::default(); WAYS.len()];
                // They take turns, and take turns in who begins.
                for at in (0..WAYS.len()).map(|at| (at + round) % WAYS.len()) {
                    let (way, limited) = WAYS[at];
                    one[at] = pair.hand_over(&prefill, way, limited.then_some(rate))?;
                }
                times.push(one);
            }
            lengths.push(row(tokens, &times));
        }
        say("");
        let results = Results {
            tokens_per_second: speed,
            chunk,
            bytes_per_token: pair::BYTES_PER_TOKEN,
            link_bytes_per_second: rate,
            rounds,
            lengths,
        };
        print(&results);
        if let Some(path) = &self.json {
            fs::write(path, serde_json::to_string_pretty(&results)? + "\n")?;
        }
        if let Some(path) = &self.svg {
            fs::write(path, plot::svg(&results.lengths))?;
        }
        Ok(())
    }
}

/// How far it is, where somebody watches.
fn say(what: &str) {
    let mut stderr = std::io::stderr();
    if stderr.is_terminal() {
        _ = write!(stderr, "\r{what:40}\r");
    }
}

fn row(tokens: u64, times: &[[Times; WAYS.len()]]) -> Row {
    let of = |what: fn(&Times) -> Duration| {
        let way = |way: usize| {
            median(times.iter().map(|one| what(&one[way]).as_secs_f64() * 1e3).collect())
        };
        Ways { sequential: way(0), following: way(1), by_layer: way(2), unlimited: way(3) }
    };
    let ratio = |way: usize| {
        let ratios =
            times.iter().map(|one| one[way].total.as_secs_f64() / one[0].total.as_secs_f64());
        median(ratios.collect())
    };
    Row {
        tokens,
        exposed: of(|times| times.exposed),
        total: of(|times| times.total),
        ratio: ratio(1),
        ratio_by_layer: ratio(2),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

fn print(results: &Results) {
    let Results { tokens_per_second, chunk, bytes_per_token, rounds, lengths, .. } = results;
    let rate = results.link_bytes_per_second / 1e6;
    println!(
        "prefill (simulated): {tokens_per_second} tokens/s in chunks of {chunk}; {bytes_per_token} bytes per token; \
         link: {rate:.0} MB/s; medians of {rounds} rounds"
    );
    println!();
    println!(
        "{:>8} {:^43}   {:^43} {:^17}",
        "", "exposed (ms)", "start to end (ms)", "over sequential"
    );
    let ways =
        format!("{:>10} {:>10} {:>10} {:>10}", "sequential", "following", "by layer", "no limit");
    println!("{:>8} {ways}   {ways} {:>9} {:>9}", "tokens", "following", "by layer");
    for Row { tokens, exposed, total, ratio, ratio_by_layer } in lengths {
        let show = |ways: &Ways| {
            let Ways { sequential, following, by_layer, unlimited } = ways;
            format!("{sequential:>10.1} {following:>10.1} {by_layer:>10.1} {unlimited:>10.1}")
        };
        let (exposed, total) = (show(exposed), show(total));
        println!("{tokens:>8} {exposed}   {total} {ratio:>9.2} {ratio_by_layer:>9.2}");
    }
}
