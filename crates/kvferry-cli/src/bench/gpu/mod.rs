//! `kvferry bench gpu`: real plans of real models between two processes on one card.

mod beside;
mod handoff;
mod measure;
mod memory;
mod packed;
mod source;

use clap::ValueEnum;
use kvferry_transport::cuda::driver::Card;
use kvferry_transport::cuda::mappings;
use serde::Serialize;

use beside::Beside;
use handoff::Handoff;
use measure::{Bench, Row};
use packed::Packed;

use super::{Failure, chosen};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Suite {
    /// One request of each of many pairs.
    Rows,
    /// Pages of 16 and 64 tokens, 8k to 512k tokens, 1 to 64 requests at once.
    Handoff,
    /// Packing over NIXL, which must be found: a few of the rows, and several ways to pack.
    Packed,
    /// What a decode engine's steps lose while loads come in.
    Beside,
}

/// What is measured, and how.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Rounds of which the median is taken.
    pub(crate) rounds: usize,
    /// Which of them.
    pub(crate) suites: Vec<Suite>,
    /// Of the rows, only cases whose name contains this.
    pub(crate) only: String,
    /// A file for the results, as JSON.
    pub(crate) json: Option<std::path::PathBuf>,
}

#[derive(Debug, Serialize)]
struct Results {
    card: String,
    driver: i32,
    multiprocessors: u32,
    rows: Vec<Row>,
    /// Microseconds of a request of 128 copies of 8 KiB, as loops and as a list.
    small: Option<(f64, f64)>,
    handoffs: Vec<Handoff>,
    packed: Vec<Packed>,
    beside: Vec<Beside>,
    failures: Vec<String>,
}

/// The process that is read; what it is started with is up to the caller of [`run`].
pub(crate) fn serve() -> Result<(), Failure> {
    source::serve()
}

/// Measures; `source` are the arguments that make this program [`serve`].
pub(crate) fn run(settings: &Settings, source: &[&str]) -> Result<(), Failure> {
    let cases = chosen(measure::cases(), measure::Case::name, &settings.only)?;
    let card = Card::open(0)?;
    let (name, driver) = card.name()?;
    let multiprocessors = card.multiprocessors()?;
    println!(
        "{name}, driver for CUDA {}.{}, {multiprocessors} SMs",
        driver / 1000,
        driver % 1000 / 10
    );
    let mut bench = Bench {
        checker: memory::Checker::new(&card)?,
        card,
        source: source::Source::start(source)?,
        rounds: settings.rounds.max(1),
    };
    let (mut rows, mut handoffs, mut packed, mut beside) = (vec![], vec![], vec![], vec![]);
    let (mut small, mut failures) = (None, vec![]);
    for suite in &settings.suites {
        match suite {
            Suite::Rows => {
                measure_rows(&mut bench, &cases, &mut rows, &mut failures);
                small = Some(bench.small(128)?);
            }
            Suite::Handoff => {
                handoff::run(&mut bench, &mut handoffs)?;
                let wrong = handoffs.iter().filter(|row| row.wrong_bytes > 0);
                failures.extend(wrong.map(|row| format!("wrong bytes: {row:?}")));
            }
            Suite::Packed => {
                if let Err(error) = packed::run(&mut bench, &mut packed) {
                    println!("packed over nixl: {error}");
                    failures.push(format!("packed over nixl: {error}"));
                }
                let wrong = packed.iter().filter(|row| row.wrong_bytes > 0);
                failures.extend(wrong.map(|row| format!("wrong bytes: {row:?}")));
            }
            Suite::Beside => {
                if let Err(error) = beside::run(&mut bench, &mut beside) {
                    println!("beside a running model: {error}");
                    failures.push(format!("beside a running model: {error}"));
                }
            }
        }
    }
    if let Some((loops, list)) = small {
        println!("\n128 copies of 8 KiB: {loops:.1} us as loops, {list:.1} us as a list");
    }
    let results = Results {
        card: name,
        driver,
        multiprocessors,
        rows,
        small,
        handoffs,
        packed,
        beside,
        failures,
    };
    if let Some(path) = &settings.json {
        std::fs::write(path, serde_json::to_string_pretty(&results)?)?;
    }
    match results.failures.first() {
        None => Ok(()),
        Some(_) => Err(results.failures.join("\n").into()),
    }
}

/// One request of each of many pairs.
fn measure_rows(
    bench: &mut Bench,
    cases: &[measure::Case],
    rows: &mut Vec<Row>,
    failures: &mut Vec<String>,
) {
    println!(
        "us: from block ids to the last byte, with five sixths of the SMs; all, 32, 16: of the limit with so many; cpu: from block ids to launched (check + loops + post); price: what the cost model says"
    );
    println!(
        "{:<64} {:>8} {:>8} {:>6} {:>9} {:>6} {:>6} {:>6}  {:>5} {:>5} {:>5}  {:>9} {:>6} {:>6} {:>6} {:>9} {:>6}",
        "case",
        "MB",
        "copies",
        "nests",
        "us",
        "GB/s",
        "limit",
        "of it",
        "all",
        "32",
        "16",
        "card us",
        "cpu us",
        "check",
        "loops",
        "price us",
        "wrong"
    );
    for case in cases {
        match bench.run(case) {
            Ok(row) => {
                let bounded: String =
                    row.bounded.iter().map(|(_, _, of)| format!(" {of:>5.2}")).collect();
                println!(
                    "{:<64} {:>8.1} {:>8} {:>6} {:>9.1} {:>6.0} {:>6.0} {:>6.3} {bounded}  {:>9.1} {:>6.1} {:>6.1} {:>6.1} {:>9.1} {:>6}",
                    row.name,
                    row.bytes as f64 / 1e6,
                    row.copies,
                    row.nests,
                    row.us,
                    row.rate(),
                    row.bytes as f64 / row.limit_us / 1e3,
                    row.of_limit,
                    row.card_us,
                    row.cpu_us,
                    row.check_us,
                    row.loops_us,
                    row.price_us,
                    row.wrong_bytes,
                );
                if row.wrong_bytes > 0 {
                    failures.push(format!("{}: {} bytes are wrong", row.name, row.wrong_bytes));
                }
                rows.push(row);
            }
            Err(error) => {
                println!("{}: {error}", case.name());
                failures.push(format!("{}: {error}", case.name()));
            }
        }
        if mappings() > 0 {
            failures.push(format!("{}: {} mappings are left", case.name(), mappings()));
        }
    }
}
