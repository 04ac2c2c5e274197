//! `kvferry bench`: measure on this machine.

mod contender;
mod memory;
mod transfer;

use std::process::ExitCode;

use clap::{Args, Subcommand};

/// Measure kvferry on this machine, next to its rivals.
#[derive(Debug, Args)]
pub(crate) struct Bench {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Transfer(transfer::Transfer),
    /// One side of a pair of processes that is being measured.
    #[command(hide = true)]
    Worker(contender::Worker),
}

impl Bench {
    pub(crate) fn run(self) -> ExitCode {
        let done = match self.command {
            Command::Transfer(transfer) => transfer.run(),
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
}
