//! The `kvferry` command. Each subcommand lives in a module of its own.

mod bench;
mod nixl;

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
enum Command {
    Bench(bench::Bench),
    Nixl(nixl::Nixl),
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .without_time()
        .with_target(false)
        .init();
    match Cli::parse().command {
        Command::Bench(bench) => bench.run(),
        Command::Nixl(nixl) => nixl.run(),
    }
}
