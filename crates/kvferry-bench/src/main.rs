//! What kvferry takes, next to its rivals and to what the hardware can: measured between processes of one machine, for those
//! who work on kvferry. Each subcommand lives in a module of its own.

mod bare;
mod contender;
mod gpu;
mod helper;
mod lowering;
mod memory;
mod overlap;
mod transfer;

use std::fs::OpenOptions;
use std::path::Path;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

/// Why nothing, or not all, was measured.
type Failure = Box<dyn std::error::Error>;

/// Measure kvferry on this machine, next to its rivals.
///
/// Exit codes: 0 all was measured, 1 something could not be, or the input or the usage is wrong.
#[derive(Debug, Parser)]
#[command(name = "kvferry-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Transfer(transfer::Transfer),
    Gpu(Gpu),
    Lowering(lowering::Lowering),
    Overlap(overlap::Overlap),
    /// One side of a pair of processes that is being measured.
    #[command(hide = true)]
    Worker(contender::Worker),
}

/// Measure the cuda transport, packing over nixl, and GPU memory over tcp: real plans of real models, between two processes
/// on one card.
///
/// Every byte of the destination is checked. The limit is one copy on the card of as many bytes of the
/// other process's memory, in the same run. Whatever fails, the rest is measured; the command then ends
/// with 1 and says what failed.
#[derive(Debug, Args)]
struct Gpu {
    /// Rounds of which medians are taken.
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// What to measure, separated by commas. Without it everything; what needs NIXL takes part when that is
    /// installed.
    #[arg(long, value_delimiter = ',', value_name = "SUITES")]
    suites: Vec<gpu::Suite>,
    /// Of the rows and of what is packed, only cases whose name contains this.
    #[arg(long, default_value = "", value_name = "TEXT")]
    only: String,
    /// Print JSON. What was found meanwhile is on the standard error.
    #[arg(long)]
    json: bool,
    /// Write the same JSON to this file.
    #[arg(long, value_name = "PATH")]
    save: Option<std::path::PathBuf>,
    /// Be the process that is read.
    #[arg(long, hide = true)]
    serve: bool,
}

impl Gpu {
    fn run(self) -> Result<(), Failure> {
        let Self { rounds, suites, only, json, save, serve } = self;
        if serve {
            return gpu::serve();
        }
        let settings = gpu::Settings { rounds, suites, only, json, save };
        gpu::run(&settings, &["gpu", "--serve"])
    }
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Nothing is left to do when standard output or error is closed.
            let _ = error.print();
            return ExitCode::from(u8::from(error.use_stderr()));
        }
    };
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .without_time()
        .with_target(false)
        .init();
    let done = match cli.command {
        Command::Transfer(transfer) => transfer.run(),
        Command::Gpu(gpu) => gpu.run(),
        Command::Lowering(lowering) => lowering.run(),
        Command::Overlap(overlap) => overlap.run(),
        Command::Worker(worker) => worker.run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// That a file can be written: asked before anything is measured that could not be kept. One that was not there
/// is not there afterwards, either.
fn writable(option: &str, path: &Path) -> Result<(), Failure> {
    let new = path.symlink_metadata().is_err();
    OpenOptions::new().append(true).create(true).open(path).map_err(|error| {
        format!("{option} {}: {error}; name a file that can be written", path.display())
    })?;
    if new {
        std::fs::remove_file(path)?;
    }
    Ok(())
}

/// The cases whose name contains `only`, of which there must be some.
fn chosen<C>(
    mut cases: Vec<C>,
    name: impl Fn(&C) -> String,
    only: &str,
) -> Result<Vec<C>, Failure> {
    let known: Vec<String> = cases.iter().map(&name).collect();
    cases.retain(|case| name(case).contains(only));
    if cases.is_empty() {
        let known = known.join("; ");
        return Err(
            format!("--only {only}: no case has that in its name; they are: {known}").into()
        );
    }
    Ok(cases)
}
