//! `kvferry-bench lowering`: the ways to read, side by side.
//!
//! For each transport a process reads and another is read; both are this program.

mod case;
mod measure;
mod source;
mod svg;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use clap::Args;
use kvferry_nixl::{self, Nixl, NixlOptions};
use kvferry_transport::local::{Local, LocalOptions};
use kvferry_transport::tcp::{Tcp, TcpOptions};
use serde::Serialize;

use super::{Failure, chosen, writable};
use measure::Row;

/// Compare the ways to read: every copy by itself, packed, and more than is needed.
///
/// Real plans of real models, between two processes on this machine, host memory. Every byte of the
/// destination is checked once for each way. Times are from block ids to the last byte, the best of the
/// rounds.
#[derive(Debug, Args)]
pub(super) struct Lowering {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Draw the results into this file, as SVG.
    #[arg(long, value_name = "PATH")]
    svg: Option<PathBuf>,
    /// Rounds, of which the best counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Transports, separated by commas. NIXL takes part when it is installed.
    #[arg(long, value_delimiter = ',', default_values_t = ["tcp", "nixl", "local"].map(str::to_owned))]
    transports: Vec<String>,
    /// Only cases whose name contains this.
    #[arg(long, default_value = "", value_name = "TEXT")]
    only: String,
    /// Be the process that reads by this transport.
    #[arg(long, hide = true, value_name = "TRANSPORT")]
    read: Option<String>,
    /// Be the process that is read by this transport.
    #[arg(long, hide = true, value_name = "TRANSPORT")]
    serve: Option<String>,
}

#[derive(Debug, Serialize)]
struct Results {
    rounds: usize,
    /// Transports that could not take part, and why.
    absent: Vec<(String, String)>,
    rows: Vec<Row>,
}

impl Lowering {
    pub(super) fn run(self) -> Result<(), Failure> {
        if let Some(transport) = &self.serve {
            return match transport.as_str() {
                "tcp" => source::serve(|| Tcp::new(TcpOptions::default())),
                "local" => source::serve(|| Local::new(LocalOptions::default())),
                _ => source::serve(|| Nixl::new(&NixlOptions::default())),
            };
        }
        let settings = measure::Settings { rounds: self.rounds.max(1), only: self.only.clone() };
        if let Some(transport) = &self.read {
            return match transport.as_str() {
                "tcp" => measure::run(&settings, || Tcp::new(TcpOptions::default())),
                "local" => measure::run(&settings, || Local::new(LocalOptions::default())),
                _ => measure::run(&settings, || Nixl::new(&NixlOptions::default())),
            };
        }
        chosen(case::cases(), case::Case::name, &self.only)?;
        let known = |transport: &&String| ["tcp", "nixl", "local"].contains(&transport.as_str());
        if let Some(unknown) = self.transports.iter().find(|transport| !known(transport)) {
            return Err(format!("--transports {unknown}: use tcp, nixl or local").into());
        }
        if let Some(path) = &self.svg {
            writable("--svg", path)?;
        }
        let mut results = Results { rounds: settings.rounds, absent: vec![], rows: vec![] };
        if !self.json {
            println!("{}", heading());
        }
        let mut failed = vec![];
        for transport in &self.transports {
            if let Some(why) = absence(transport) {
                results.absent.push((transport.clone(), why));
            } else if let Err(error) = self.read_by(transport, &mut results) {
                failed.push(format!("{transport}: {error}"));
            }
        }
        if let Some(path) = &self.svg {
            std::fs::write(path, svg::draw(&results.rows))?;
        }
        if self.json {
            println!("{}", serde_json::to_string_pretty(&results)?);
        } else {
            print_conclusion(&results);
        }
        match failed.as_slice() {
            [] if results.rows.is_empty() => {
                Err("no transport took part: nothing was measured".into())
            }
            [] => Ok(()),
            failed => Err(failed.join("; ").into()),
        }
    }

    fn read_by(&self, transport: &str, results: &mut Results) -> Result<(), Failure> {
        let rounds = self.rounds.max(1).to_string();
        let mut child = Command::new(std::env::current_exe()?)
            .args(["lowering", "--read", transport, "--rounds", &rounds])
            .args(["--only", &self.only])
            .envs([("UCX_NET_DEVICES", "lo"), ("UCX_MEM_EVENTS", "n")])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().ok_or("no pipe from the process that reads")?;
        for line in BufReader::new(output).lines() {
            let row: Row = serde_json::from_str(&line?)?;
            if !self.json {
                println!("{}", line_of(&row));
            }
            results.rows.push(row);
        }
        match child.wait()? {
            status if status.success() => Ok(()),
            status => Err(format!("the process that reads ended with {status}").into()),
        }
    }
}

/// Why this transport cannot take part on this machine.
fn absence(transport: &str) -> Option<String> {
    let installed = if transport == "nixl" { kvferry_nixl::find(None).map(|_| ()) } else { Ok(()) };
    installed.err().map(|error| error.to_string())
}

fn heading() -> String {
    format!(
        "{:<6} {:<52} {:>6} {:>8} {:>8}  {:>9} {:>9} {:>9}  {:>9} {:<22} {:>7}",
        "by", "case", "MB", "copies", "mean", "direct", "packed", "full", "chosen", "", "of best"
    )
}

fn line_of(row: &Row) -> String {
    let mean = row.bytes / row.copies.max(1);
    format!(
        "{:<6} {:<52} {:>6.1} {:>8} {:>8}  {:>9.2} {:>9} {:>9.2}  {:>9.2} {:<22} {:>7.2}",
        row.transport,
        row.case,
        row.bytes as f64 / 1e6,
        row.copies,
        mean,
        row.direct_ms,
        row.packed_ms.map_or("-".to_owned(), |ms| format!("{ms:.2}")),
        row.full_read_ms,
        row.chosen_ms,
        row.chosen,
        row.of_best,
    )
}

fn print_conclusion(results: &Results) {
    println!(
        "\ntimes in ms, from block ids to the last byte, best of {} rounds. full: every block's span \
         as one copy, and what matters taken from it. of best: what was chosen over the better of direct and \
         packed",
        results.rounds
    );
    for (transport, why) in &results.absent {
        println!("{transport} did not take part: {why}");
    }
}
