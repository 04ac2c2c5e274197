//! The `kvferry` command. Each subcommand lives in a module of its own.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Move what a language model remembers of a prompt from prefill to decode.
#[derive(Debug, Parser)]
#[command(name = "kvferry", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {}

fn main() -> ExitCode {
    match Cli::parse().command {}
}
