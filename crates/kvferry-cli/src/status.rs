//! `kvferry status`: ask a running agent what it is doing.

use clap::Args;
use kvferry_agent::ask_status;

use crate::failure::Failure;
use crate::output;
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
    pub(crate) fn run(self) -> Result<(), Failure> {
        let trust = self.reach.trust()?;
        let status = ask_status(&self.reach.address, &trust, self.reach.patience())
            .map_err(|error| self.reach.silent(&error))?;
        output::print(&match self.json {
            true => serde_json::to_string_pretty(&status).map_err(Failure::input)? + "\n",
            false => told(&status),
        });
        Ok(())
    }
}

/// How many there are, and the line that stands for those that are left out.
fn many(told: usize, left_out: usize) -> (usize, Option<String>) {
    (told + left_out, (left_out > 0).then(|| format!("  and {left_out} more")))
}

/// For people.
fn told(status: &kvferry_agent::Status) -> String {
    let seconds = |ms: u64| format!("{:.1} s", ms as f64 / 1e3);
    let (leases, more_leases) = many(status.leases.len(), status.left_out.leases);
    let (growing, more_growing) = many(status.growing.len(), status.left_out.growing);
    let (peers, more_peers) = many(status.peers.len(), status.left_out.peers);
    let mut lines = vec![
        format!(
            "{} ({}), protocol {}, up for {}, {}",
            status.engine,
            status.incarnation,
            status.protocol,
            seconds(status.uptime_ms),
            text::many(status.ranks as u64, "rank"),
        ),
        format!("leases: {leases}"),
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
    lines.extend(more_leases);
    lines.push(format!("growing: {growing}"));
    lines.extend(status.growing.iter().map(|lease| {
        let restarts = match lease.restarts {
            0 => String::new(),
            restarts => format!(", started over {}", text::many(restarts.into(), "time")),
        };
        format!(
            "  {}: {} after {}{restarts}, {}",
            lease.request,
            text::many(lease.tokens, "token"),
            seconds(lease.age_ms),
            text::many(lease.followers as u64, "follower"),
        )
    }));
    lines.extend(more_growing);
    for (title, reading) in [("waiting", false), ("reading", true)] {
        let holds: Vec<_> = status.holds.iter().filter(|hold| hold.reading == reading).collect();
        lines.push(format!("{title}: {}", holds.len()));
        lines.extend(holds.iter().map(|hold| {
            let age = seconds(hold.age_ms);
            format!("  {}: from {} at {}, for {age}", hold.request, hold.engine, hold.address)
        }));
    }
    if status.left_out.holds > 0 {
        lines.push(format!("waiting or reading: {} more", status.left_out.holds));
    }
    lines.push(format!("peers: {peers}"));
    lines.extend(
        status
            .peers
            .iter()
            .map(|peer| format!("  {} from {}, protocol {}", peer.who, peer.from, peer.protocol)),
    );
    lines.extend(more_peers);
    let mut connected = match status.connected_to.as_slice() {
        [] => "nobody".to_owned(),
        some => some.join(", "),
    };
    if status.left_out.connected_to > 0 {
        connected += &format!(" and {} more", status.left_out.connected_to);
    }
    lines.push(format!("connected to: {connected}"));
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use kvferry_agent::{GrowingStatus, Incarnation, LeaseStatus, LeftOut};

    use super::*;

    #[test]
    fn leases_that_are_kept_and_leases_that_grow() {
        let growing = |request: &str, tokens, restarts, followers| GrowingStatus {
            request: request.to_owned(),
            age_ms: 1500,
            tokens,
            restarts,
            followers,
        };
        let status = kvferry_agent::Status {
            engine: "p".to_owned(),
            incarnation: Incarnation(1),
            protocol: "1.3".to_owned(),
            uptime_ms: 60_000,
            ranks: 1,
            draining: false,
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
            left_out: LeftOut { leases: 3, peers: 70, ..LeftOut::default() },
        };
        let said = told(&status);
        let lines: Vec<&str> = said.lines().skip(1).take(6).collect();
        assert_eq!(
            lines,
            [
                "leases: 4",
                "  kept: held for 2.0 s, expires in 28.0 s, confirmed by 0 ranks",
                "  and 3 more",
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
