//! `kvferry demo`: prefill and decode engines as real processes, and every byte checked.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Args;
use kvferry_models::Topology;

use words::By;

mod child;
mod crew;
mod pool;
mod report;
mod shape;
mod show;
mod words;

pub(crate) use child::run as run_child;

/// Hand requests over between prefill and decode engines on this machine, and check every byte.
///
/// Every rank is a process of its own, with memory laid out as vLLM would for the model, with fewer
/// layers. Prefill leaves values that depend on the request, the state, the token and the element;
/// decode compares all of them, and that nothing else has changed.
#[derive(Clone, Debug, Args)]
pub(crate) struct Demo {
    /// The model: a preset's name, or a part of it that no other has.
    #[arg(long, default_value = "kimi-linear-48b-a3b")]
    pub(crate) model: String,
    /// The prefill engine.
    #[arg(long, value_name = "TOPOLOGY", default_value = "tp=2")]
    pub(crate) prefill: Topology,
    /// A decode engine. May be given several times.
    #[arg(long, value_name = "TOPOLOGY", default_value = "tp=4")]
    pub(crate) decode: Vec<Topology>,
    /// How many requests to hand over.
    #[arg(long, default_value_t = 100)]
    pub(crate) requests: usize,
    /// How bytes are moved.
    #[arg(long, value_enum, default_value = "local")]
    pub(crate) transport: By,
    /// Kill and stop ranks at random, abort requests, let leases expire.
    #[arg(long)]
    pub(crate) chaos: bool,
    /// At least so many of the model's layers.
    #[arg(long, default_value_t = 8)]
    pub(crate) layers: u32,
    /// Print the result as JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Where the dice start: the same seed draws the same requests.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

impl Demo {
    pub(crate) fn run(self) -> ExitCode {
        let quiet = self.json || !std::io::stderr().is_terminal();
        match show::run(&self, quiet) {
            Ok(report) => {
                if self.json {
                    println!("{}", report.json());
                } else {
                    print!("{}", report.text());
                }
                if report.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
            }
            Err(problem) => {
                eprintln!("error: {problem}");
                ExitCode::FAILURE
            }
        }
    }
}
