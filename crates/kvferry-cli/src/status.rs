//! `kvferry status`: ask a running agent what it is doing.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use kvferry_agent::{Key, Tls, TlsFiles, Trust, ask_status};

use crate::text;

/// Ask a running agent for its peers, its leases and the requests that it waits for.
///
/// An agent only answers those who hold its key: hand it in as a file, or in the environment
/// (KVFERRY_KEY). Without a key, only agents on this machine that have none either will answer.
#[derive(Debug, Args)]
pub(crate) struct Status {
    /// Where the agent listens, as host:port. The server's log says it at the start.
    address: String,
    /// A file that holds the shared key.
    #[arg(long, value_name = "FILE", conflicts_with = "tls_certificate")]
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
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
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
        let has_port =
            self.address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        if !has_port {
            return Err(format!("'{}' is not an address: give host:port", self.address));
        }
        let trust = match (self.key_file, self.tls_certificate, self.tls_key, self.tls_authority) {
            (Some(path), ..) => Key::from_file(&path).map(Trust::Key),
            (None, Some(certificate), Some(private_key), Some(authority)) => {
                Tls::from_files(&TlsFiles { certificate, private_key, authority }).map(Trust::Tls)
            }
            _ => Trust::from_environment(),
        };
        let trust = trust.map_err(|error| error.to_string())?;
        let patience = Duration::from_secs(self.timeout);
        let status = ask_status(&self.address, &trust, patience)
            .map_err(|error| format!("{} does not answer: {error}", self.address))?;
        if self.json {
            let json = serde_json::to_string_pretty(&status).map_err(|error| error.to_string())?;
            return Ok(json + "\n");
        }
        Ok(told(&status))
    }
}

/// For people.
fn told(status: &kvferry_agent::Status) -> String {
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
    lines.extend(status.leases.iter().map(|lease| {
        format!(
            "  {}: held for {}, expires in {}, confirmed by {}",
            lease.request,
            seconds(lease.age_ms),
            seconds(lease.left_ms),
            text::many(lease.confirmed as u64, "rank"),
        )
    }));
    lines.push(format!("growing: {}", status.growing.len()));
    lines.extend(status.growing.iter().map(|lease| {
        let restarts = match lease.epoch {
            0 => String::new(),
            epoch => format!(", started over {}", text::many(epoch.into(), "time")),
        };
        format!(
            "  {}: {} after {}{restarts}, {}",
            lease.request,
            text::many(lease.tokens, "token"),
            seconds(lease.age_ms),
            text::many(lease.followers as u64, "follower"),
        )
    }));
    for (title, reading) in [("waiting", false), ("reading", true)] {
        let holds: Vec<_> = status.holds.iter().filter(|hold| hold.reading == reading).collect();
        lines.push(format!("{title}: {}", holds.len()));
        lines.extend(holds.iter().map(|hold| {
            let age = seconds(hold.age_ms);
            format!("  {}: from {} at {}, for {age}", hold.request, hold.engine, hold.address)
        }));
    }
    lines.push(format!("peers: {}", status.peers.len()));
    lines.extend(
        status
            .peers
            .iter()
            .map(|peer| format!("  {} from {}, protocol {}", peer.who, peer.from, peer.protocol)),
    );
    let connected = match status.connected_to.as_slice() {
        [] => "nobody".to_owned(),
        some => some.join(", "),
    };
    lines.push(format!("connected to: {}", connected));
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use kvferry_agent::{GrowingStatus, Incarnation, LeaseStatus};

    use super::*;

    #[test]
    fn leases_that_are_kept_and_leases_that_grow() {
        let growing = |request: &str, tokens, epoch, followers| GrowingStatus {
            request: request.to_owned(),
            age_ms: 1500,
            tokens,
            epoch,
            followers,
        };
        let status = kvferry_agent::Status {
            engine: "p".to_owned(),
            incarnation: Incarnation(1),
            protocol: "1.3".to_owned(),
            uptime_ms: 60_000,
            ranks: 1,
            leases: vec![LeaseStatus {
                request: "kept".to_owned(),
                age_ms: 2000,
                left_ms: 28_000,
                confirmed: 0,
            }],
            growing: vec![growing("new", 0, 0, 0), growing("long", 4096, 2, 3)],
            holds: vec![],
            peers: vec![],
            connected_to: vec![],
        };
        let said = told(&status);
        let lines: Vec<&str> = said.lines().skip(1).take(5).collect();
        assert_eq!(
            lines,
            [
                "leases: 1",
                "  kept: held for 2.0 s, expires in 28.0 s, confirmed by 0 ranks",
                "growing: 2",
                "  new: 0 tokens after 1.5 s, 0 followers",
                "  long: 4 096 tokens after 1.5 s, started over 2 times, 3 followers",
            ]
        );
        let json = serde_json::to_value(&status).unwrap();
        assert_eq!(json["growing"][1]["tokens"], 4096);
        // What an older agent says has none.
        let mut older = json;
        older.as_object_mut().unwrap().remove("growing");
        let older: kvferry_agent::Status = serde_json::from_value(older).unwrap();
        assert!(older.growing.is_empty());
    }
}
