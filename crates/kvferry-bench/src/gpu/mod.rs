//! `kvferry-bench gpu`: real plans of real models between two processes on one card.

mod beside;
mod case;
mod handoff;
mod measure;
mod memory;
mod outcome;
mod packed;
mod plain;
mod sockets;
mod source;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use kvferry_cuda::driver::Card;
use kvferry_cuda::mappings;
use kvferry_demo::own_output;
use kvferry_nixl as nixl;
use serde::Serialize;

use beside::Beside;
use handoff::{Handoff, Pool};
use measure::{Bench, Row};
use outcome::Outcome;
use packed::Packed;
use sockets::Sockets;

use super::{Failure, chosen, writable};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Suite {
    /// One request of each of many pairs.
    Rows,
    /// Pages of 16 and 64 tokens, 8k to 512k tokens, 1 to 64 requests at once.
    Handoff,
    /// Packing over NIXL, which must be found: a few of the rows, beside NIXL alone, and several ways to pack.
    Packed,
    /// GPU memory over tcp, beside plain sockets: a few of the rows, and several sizes of slots.
    Tcp,
    /// What a decode engine's steps lose while loads come in.
    Beside,
}

impl Suite {
    fn name(self) -> &'static str {
        match self {
            Self::Rows => "rows",
            Self::Handoff => "hand-offs",
            Self::Packed => "packed over nixl",
            Self::Tcp => "over tcp",
            Self::Beside => "beside a running model",
        }
    }
}

/// All of them, in the order in which they are measured.
const ALL: [Suite; 5] = [Suite::Rows, Suite::Packed, Suite::Tcp, Suite::Handoff, Suite::Beside];

/// What is measured, and how.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Rounds of which the median is taken.
    pub(crate) rounds: usize,
    /// Which of them; none means all that this machine can.
    pub(crate) suites: Vec<Suite>,
    /// Of the rows and of what is packed, only cases whose name contains this.
    pub(crate) only: String,
    /// Whether the results are printed as JSON. The tables are on the standard error then.
    pub(crate) json: bool,
    /// A file for the results, as JSON.
    pub(crate) save: Option<PathBuf>,
}

#[derive(Debug, Default, Serialize)]
struct Results {
    card: String,
    driver: i32,
    multiprocessors: u32,
    rows: Vec<Row>,
    /// Microseconds of a request of 128 copies of 8 KiB, as loops and as a list.
    small: Option<f64>,
    pools: Vec<Pool>,
    handoffs: Vec<Handoff>,
    packed: Vec<Packed>,
    tcp: Vec<Sockets>,
    beside: Vec<Beside>,
    #[serde(flatten)]
    outcome: Outcome,
}

/// The process that is read; what it is started with is up to the caller of [`run`].
pub(crate) fn serve() -> Result<(), Failure> {
    source::serve()
}

/// Measures; `source` are the arguments that make this program [`serve`].
pub(crate) fn run(settings: &Settings, source: &[&str]) -> Result<(), Failure> {
    let cases = chosen(case::cases(), case::Case::name, &settings.only)?;
    if let Some(path) = &settings.save {
        writable("--save", path)?;
    }
    // UCX writes its warnings to the standard output, which is for JSON then.
    let output = settings.json.then(own_output::take).transpose()?;
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
    let mut results = Results { card: name, driver, multiprocessors, ..Results::default() };
    let nixl = nixl::find(None).err().map(|error| error.to_string());
    let save = settings.save.as_deref();
    each(&settings.suites, nixl.as_deref(), save, &mut results, |suite, results| {
        // Of its own for each, so that none suffers from what became of the one before it.
        bench.source = source::Source::start(source)?;
        let Results { rows, small, pools, handoffs, packed, tcp, beside, outcome, .. } = results;
        match suite {
            Suite::Rows => {
                measure_rows(&mut bench, &cases, rows, outcome);
                *small = outcome.keep("128 copies of 8 KiB", bench.small(128));
            }
            Suite::Handoff => handoff::run(&mut bench, pools, handoffs, outcome),
            Suite::Packed => packed::run(&mut bench, &settings.only, packed, outcome),
            Suite::Tcp => sockets::run(&mut bench, &settings.only, tcp, outcome),
            Suite::Beside => beside::run(&mut bench, nixl.as_deref(), beside, outcome)?,
        }
        Ok(())
    });
    if let Some(us) = results.small {
        println!("\n128 copies of 8 KiB: {us:.1} us");
    }
    finish(&mut results, save, output)
}

/// Measures each of some suites, or of all, whatever becomes of the ones before it, and saves what there is by
/// then. `nixl` says why there is none: those that cannot do without it then only fail if somebody asked for them.
fn each(
    suites: &[Suite],
    nixl: Option<&str>,
    save: Option<&Path>,
    results: &mut Results,
    mut measure: impl FnMut(Suite, &mut Results) -> Result<(), Failure>,
) {
    for &suite in if suites.is_empty() { &ALL } else { suites } {
        match nixl {
            Some(why) if suite == Suite::Packed => match suites.is_empty() {
                true => results.outcome.miss(suite.name(), why),
                false => results.outcome.fail(&format!("{}: {why}", suite.name())),
            },
            _ => {
                let measured = measure(suite, results);
                results.outcome.keep(suite.name(), measured);
            }
        }
        // What counts is whether all of it can be saved in the end.
        if let Some(path) = save
            && let Err(error) = write(results, path)
        {
            println!("not saved yet: {error}");
        }
    }
}

fn write(results: &Results, path: &Path) -> Result<(), Failure> {
    let json = serde_json::to_string_pretty(results)?;
    std::fs::write(path, json).map_err(|error| format!("--save {}: {error}", path.display()).into())
}

/// Writes the results to where they are wanted; then an error, where something failed.
fn finish(results: &mut Results, save: Option<&Path>, output: Option<File>) -> Result<(), Failure> {
    if let Some(mut output) = output {
        writeln!(output, "{}", serde_json::to_string_pretty(results)?)?;
    }
    let saved = save.map_or(Ok(()), |path| write(results, path));
    results.outcome.keep("results", saved);
    results.outcome.end()
}

/// One request of each of many pairs.
fn measure_rows(
    bench: &mut Bench,
    cases: &[case::Case],
    rows: &mut Vec<Row>,
    outcome: &mut Outcome,
) {
    println!(
        "us: from block ids to the last byte, with five sixths of the SMs; all, 32, 16: of the limit with so many; cpu: from block ids to launched (check + loops + post)"
    );
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
        "all",
        "32",
        "16",
        "card us",
        "cpu us",
        "check",
        "loops",
        "wrong"
    );
    for case in cases {
        if let Some(row) = outcome.keep(&case.name(), bench.run(case)) {
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
                outcome.fail(&format!("{}: {} bytes are wrong", row.name, row.wrong_bytes));
            }
            rows.push(row);
        }
        if mappings() > 0 {
            outcome.fail(&format!("{}: {} mappings are left", case.name(), mappings()));
        }
    }
}
