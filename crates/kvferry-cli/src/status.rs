//! `kvferry status`: ask a running agent what it is doing.

use std::process::ExitCode;

use clap::Args;
use kvferry_agent::ask_status;

use crate::reach::Reach;
use crate::text;

/// Ask a running agent for its peers, its leases and the requests that it waits for.
///
/// An agent only answers those who hold its key: hand it in as a file, or in the environment
/// (KVFERRY_KEY). Without a key, only agents on this machine that have none either will answer.
#[derive(Debug, Args)]
pub(crate) struct Status {
    #[command(flatten)]
    reach: Reach,
    /// Print the answer as JSON.
    #[arg(long)]
    json: bool,
}

impl Status {
    pub(crate) fn run(self) -> ExitCode {
        match self.ask() {
            Ok(text) => {
                crate::output::print(&text);
                ExitCode::SUCCESS
            }
            Err(problem) => {
                eprintln!("error: {problem}");
                ExitCode::FAILURE
            }
        }
    }

    fn ask(self) -> Result<String, String> {
        let trust = self.reach.trust()?;
        let status = ask_status(&self.reach.address, &trust, self.reach.patience())
            .map_err(|error| format!("{} does not answer: {error}", self.reach.address))?;
        if self.json {
            let json = serde_json::to_string_pretty(&status).map_err(|error| error.to_string())?;
            return Ok(json + "\n");
        }
        let seconds = |ms: u64| format!("{:.1} s", ms as f64 / 1e3);
        let mut lines = vec![
            format!(
                "{} ({}), protocol {}, up for {}, {}",
                status.engine,
                status.incarnation,
                status.protocol,
                seconds(status.uptime_ms),
                text::many(status.ranks as u64, "rank"),
            ),
            format!("leases: {}", status.leases.len()),
        ];
        if status.draining {
            lines.insert(1, "draining: it hands over nothing new".to_owned());
        }
        lines.extend(status.leases.iter().map(|lease| {
            format!(
                "  {}: held for {}, expires in {}, confirmed by {}",
                lease.request,
                seconds(lease.age_ms),
                seconds(lease.left_ms),
                text::many(lease.confirmed as u64, "rank"),
            )
        }));
        for (title, reading) in [("waiting", false), ("reading", true)] {
            let holds: Vec<_> =
                status.holds.iter().filter(|hold| hold.reading == reading).collect();
            lines.push(format!("{title}: {}", holds.len()));
            lines.extend(holds.iter().map(|hold| {
                let age = seconds(hold.age_ms);
                format!("  {}: from {} at {}, for {age}", hold.request, hold.engine, hold.address)
            }));
        }
        lines.push(format!("peers: {}", status.peers.len()));
        lines.extend(
            status.peers.iter().map(|peer| {
                format!("  {} from {}, protocol {}", peer.who, peer.from, peer.protocol)
            }),
        );
        let connected = match status.connected_to.as_slice() {
            [] => "nobody".to_owned(),
            some => some.join(", "),
        };
        lines.push(format!("connected to: {}", connected));
        Ok(lines.join("\n") + "\n")
    }
}
