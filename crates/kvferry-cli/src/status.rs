//! `kvferry status`: ask a running agent what it is doing.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use kvferry_agent::{Key, Tls, TlsFiles, Trust, ask_status};

/// Ask a running agent for its peers, its leases and the requests that it waits for.
///
/// The agent answers only to who holds its key: from a file, or from the environment (KVFERRY_KEY).
/// Without a key only agents on this machine that have none answer.
#[derive(Debug, Args)]
pub(crate) struct Status {
    /// Where the agent listens: host:port.
    address: String,
    /// A file that holds the shared key.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// This side's certificate, where the agent uses TLS (PEM).
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_authority"])]
    tls_certificate: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
    /// The authority that both sides' certificates come from (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_authority: Option<PathBuf>,
    /// How long to wait for an answer, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    timeout: u64,
    /// Print the answer as JSON.
    #[arg(long)]
    json: bool,
}

impl Status {
    pub(crate) fn run(self) -> ExitCode {
        match self.ask() {
            Ok(text) => {
                print!("{text}");
                ExitCode::SUCCESS
            }
            Err(problem) => {
                eprintln!("error: {problem}");
                ExitCode::FAILURE
            }
        }
    }

    fn ask(self) -> Result<String, String> {
        let trust = match (self.key_file, self.tls_certificate, self.tls_key, self.tls_authority) {
            (Some(path), ..) => Key::from_file(&path).map(Trust::Key),
            (None, Some(certificate), Some(private_key), Some(authority)) => {
                Tls::from_files(&TlsFiles { certificate, private_key, authority }).map(Trust::Tls)
            }
            _ => Trust::from_environment(),
        };
        let trust = trust.map_err(|error| error.to_string())?;
        let patience = Duration::from_secs(self.timeout.clamp(1, 3600));
        let status = ask_status(&self.address, &trust, patience)
            .map_err(|error| format!("{}: {error}", self.address))?;
        if self.json {
            let json = serde_json::to_string_pretty(&status).map_err(|error| error.to_string())?;
            return Ok(json + "\n");
        }
        let seconds = |ms: u64| format!("{:.1} s", ms as f64 / 1e3);
        let mut lines = vec![
            format!(
                "{} ({}), protocol {}, up {}, {} ranks",
                status.engine,
                status.incarnation,
                status.protocol,
                seconds(status.uptime_ms),
                status.ranks
            ),
            format!("leases: {}", status.leases.len()),
        ];
        lines.extend(status.leases.iter().map(|lease| {
            format!(
                "  {}: for {}, expires in {}, confirmed by {} ranks",
                lease.request,
                seconds(lease.age_ms),
                seconds(lease.left_ms),
                lease.confirmed
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
        lines.push(format!("connected to: {}", status.connected_to.join(", ")));
        Ok(lines.join("\n") + "\n")
    }
}
