//! `kvferry bench gpu`: real plans of real models between two processes on one card.

mod measure;
mod memory;
mod source;

use kvferry_transport::cuda::driver::Card;
use kvferry_transport::cuda::mappings;
use serde::Serialize;

use measure::{Bench, Row};

pub(crate) type Failure = Box<dyn std::error::Error>;

/// What is measured, and how.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Rounds of which the median is taken.
    pub(crate) rounds: usize,
    /// Only cases whose name contains this.
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
    small: (f64, f64),
    failures: Vec<String>,
}

/// The process that is read; what it is started with is up to the caller of [`run`].
pub(crate) fn serve() -> Result<(), Failure> {
    source::serve()
}

/// Measures; `source` are the arguments that make this program [`serve`].
pub(crate) fn run(settings: &Settings, source: &[&str]) -> Result<(), Failure> {
    let card = Card::open(0)?;
    let (name, driver) = card.name()?;
    let multiprocessors = card.multiprocessors()?;
    println!(
        "{name}, driver for CUDA {}.{}, {multiprocessors} SMs",
        driver / 1000,
        driver % 1000 / 10
    );
    println!(
        "us: from block ids to the last byte; cpu: from block ids to launched (check + loops + post)"
    );
    let mut bench = Bench {
        checker: memory::Checker::new(&card)?,
        card,
        source: source::Source::start(source)?,
        rounds: settings.rounds.max(1),
    };
    println!(
        "{:<64} {:>8} {:>8} {:>6} {:>9} {:>6} {:>6} {:>6}  {:>5} {:>5} {:>5}  {:>9} {:>6} {:>6} {:>6} {:>6}",
        "case",
        "MB",
        "copies",
        "nests",
        "us",
        "GB/s",
        "limit",
        "of it",
        "66",
        "32",
        "16",
        "card us",
        "cpu us",
        "check",
        "loops",
        "wrong"
    );
    let (mut rows, mut failures) = (vec![], vec![]);
    for case in measure::cases().iter().filter(|case| case.name().contains(&settings.only)) {
        match bench.run(case) {
            Ok(row) => {
                let bounded: String =
                    row.bounded.iter().map(|(_, _, of)| format!(" {of:>5.2}")).collect();
                println!(
                    "{:<64} {:>8.1} {:>8} {:>6} {:>9.1} {:>6.0} {:>6.0} {:>6.3} {bounded}  {:>9.1} {:>6.1} {:>6.1} {:>6.1} {:>6}",
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
    let small = bench.small(128)?;
    println!("128 copies of 8 KiB: {:.1} us as loops, {:.1} us as a list", small.0, small.1);
    let results = Results { card: name, driver, multiprocessors, rows, small, failures };
    if let Some(path) = &settings.json {
        std::fs::write(path, serde_json::to_string_pretty(&results)?)?;
    }
    match results.failures.first() {
        None => Ok(()),
        Some(_) => Err(results.failures.join("\n").into()),
    }
}
