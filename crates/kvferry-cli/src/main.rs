//! The `kvferry` command. Each subcommand lives in a module of its own.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod demo;
mod drain;
mod explain;
mod failure;
mod models;
mod nixl;
mod output;
mod plan;
mod reach;
mod report;
mod sides;
mod status;
mod tables;
mod text;

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
    #[command(visible_alias = "check")]
    Plan(plan::Args),
    Explain(explain::Args),
    Bench(bench::Bench),
    Demo(demo::Demo),
    /// One process of a demo.
    #[command(hide = true, name = kvferry_demo::PROCESS)]
    DemoProcess,
    Nixl(nixl::Nixl),
    Status(status::Status),
    Drain(drain::Drain),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return failure::usage(&error),
    };
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .without_time()
        .with_target(false)
        .init();
    match cli.command {
        Command::Models(args) => failure::exit(models::run(&args)),
        Command::Plan(args) => failure::exit(plan::run(&args)),
        Command::Explain(args) => failure::exit(explain::run(&args)),
        Command::Bench(bench) => bench.run(),
        Command::Demo(demo) => demo.run(),
        Command::DemoProcess => kvferry_demo::run_process(),
        Command::Nixl(nixl) => nixl.run(),
        Command::Status(status) => status.run(),
        Command::Drain(drain) => drain.run(),
    }
}
