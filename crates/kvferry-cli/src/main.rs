//! The `kvferry` command. Each subcommand lives in a module of its own.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod check;
mod explain;
mod failure;
mod models;
mod plan;
mod report;
mod request;
mod table;

/// Move what a language model remembers of a prompt from prefill to decode.
///
/// Exit codes: 0 it works, 2 the pair is refused, 1 the input or the usage is wrong.
#[derive(Debug, Parser)]
#[command(name = "kvferry", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Models(models::Args),
    Plan(plan::Args),
    Check(check::Args),
    Explain(explain::Args),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return failure::usage(&error),
    };
    let result = match cli.command {
        Command::Models(args) => models::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Explain(args) => explain::run(&args),
    };
    failure::exit(result)
}
