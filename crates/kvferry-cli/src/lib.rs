//! The `kvferry` command, for programs that offer it: [`run`] is all of it. Each subcommand lives in a module of its own.

use std::ffi::OsString;

use clap::{Parser, Subcommand};

use failure::Failure;

mod demo;
mod drain;
mod explain;
mod failure;
mod hub;
mod link;
mod models;
mod nixl;
mod output;
mod plan;
mod reach;
mod report;
mod sides;
mod sizing;
mod status;
pub mod tables;
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
    Demo(demo::Demo),
    /// One process of a demo.
    #[command(hide = true, name = kvferry_demo::PROCESS)]
    DemoProcess,
    Nixl(nixl::Nixl),
    Link(link::Link),
    Status(status::Status),
    Drain(drain::Drain),
}

/// Does what a command line says, of which the first word is the program's name, and answers the exit code. `program` is
/// what starts this program again, which a demo does.
///
/// What is asked for goes to standard output and what went wrong to standard error, where warnings go too unless the
/// process has a subscriber of its own for them.
pub fn run<W>(words: impl IntoIterator<Item = W>, program: Vec<OsString>) -> u8
where
    W: Into<OsString> + Clone,
{
    let cli = match Cli::try_parse_from(words) {
        Ok(cli) => cli,
        Err(error) => return failure::usage(&error),
    };
    // Where there is one already, it is the process's own.
    let _ = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .without_time()
        .with_target(false)
        .try_init();
    failure::exit(match cli.command {
        Command::Models(args) => models::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Demo(demo) => demo.run(program),
        Command::DemoProcess => match kvferry_demo::run_process() {
            true => Ok(()),
            false => Err(Failure::Said(1)),
        },
        Command::Nixl(nixl) => nixl.run(),
        Command::Link(link) => link.run(),
        Command::Status(status) => status.run(),
        Command::Drain(drain) => drain.run(),
    })
}
