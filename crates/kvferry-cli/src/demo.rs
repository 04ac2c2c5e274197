//! `kvferry demo`: prefill and decode engines as real processes, and every byte checked.

use std::ffi::OsString;
use std::io::IsTerminal;

use clap::{Args, ValueEnum};
use kvferry_demo::{Options, TransportKind};
use kvferry_models::Topology;

use crate::failure::Failure;
use crate::output;

/// Hand requests over between prefill and decode engines on this machine, and check every byte.
///
/// Every rank is a process of its own. Its memory is laid out as vLLM would lay it out for the model,
/// with fewer layers. Prefill leaves values that depend on the request, the state, the token and the
/// element; decode checks every one of them, and that nothing else has changed.
#[derive(Clone, Debug, Args)]
pub(crate) struct Demo {
    /// The model: a preset's name, or a part of it that no other has.
    #[arg(long, default_value = "kimi-linear-48b-a3b")]
    model: String,
    /// The prefill engine: a topology such as tp=2,pp=2 (see 'kvferry plan --help').
    #[arg(long, value_name = "TOPOLOGY", default_value = "tp=2")]
    prefill: Topology,
    /// A decode engine, likewise. Give this option several times for several engines.
    #[arg(long, value_name = "TOPOLOGY", default_value = "tp=4")]
    decode: Vec<Topology>,
    /// How many requests to hand over.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    requests: u32,
    /// How bytes are moved.
    #[arg(long, value_enum, default_value = "local")]
    transport: By,
    /// Kill and stop ranks at random, abort requests, let leases expire.
    #[arg(long)]
    chaos: bool,
    /// How many loads are compared with what prefill holds: off, a fraction, or all.
    #[arg(long, default_value = "0.01", value_parser = audit)]
    audit: f64,
    /// Use at least this many of the model's layers.
    #[arg(long, default_value_t = 8)]
    layers: u32,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    /// Seed of the random choices: the same seed draws the same requests.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// How bytes are moved.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum By {
    /// Read the other process's memory directly.
    Local,
    /// Over sockets.
    Tcp,
    /// With NVIDIA's transfer library ('kvferry nixl install').
    Nixl,
}

/// A fraction, or a word for one.
fn audit(text: &str) -> Result<f64, String> {
    let fraction = match text {
        "off" => 0.0,
        "all" => 1.0,
        other => other.parse().unwrap_or(f64::NAN),
    };
    match (0.0..=1.0).contains(&fraction) {
        true => Ok(fraction),
        false => Err("it must be off, a fraction from 0 to 1, or all".to_owned()),
    }
}

impl Demo {
    pub(crate) fn run(self, program: Vec<OsString>) -> Result<(), Failure> {
        let options = Options {
            program,
            model: self.model,
            prefill: self.prefill,
            decode: self.decode,
            requests: self.requests as usize,
            transport: match self.transport {
                By::Local => TransportKind::Local,
                By::Tcp => TransportKind::Tcp,
                By::Nixl => TransportKind::Nixl,
            },
            chaos: self.chaos,
            audit: self.audit,
            layers: self.layers,
            seed: self.seed,
            progress: !self.json && std::io::stderr().is_terminal(),
        };
        let report = kvferry_demo::run(&options).map_err(Failure::input)?;
        if self.json {
            output::print(&format!("{}\n", report.json()));
        } else {
            output::print(&report.text());
        }
        if report.is_good() { Ok(()) } else { Err(Failure::Said(1)) }
    }
}
