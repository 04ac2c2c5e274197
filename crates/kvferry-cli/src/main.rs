//! The `kvferry` command. Each subcommand lives in a module of its own.

mod bench;
mod demo;
mod nixl;
mod status;

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
    Demo(demo::Demo),
    /// One process of a demo.
    #[command(hide = true)]
    DemoProcess,
    Nixl(nixl::Nixl),
    Status(status::Status),
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
        Command::Demo(demo) => demo.run(),
        Command::DemoProcess => demo::run_child(),
        Command::Nixl(nixl) => nixl.run(),
        Command::Status(status) => status.run(),
    }
}
