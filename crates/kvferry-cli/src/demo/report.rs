//! What a demo has shown.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use kvferry_agent::Timings;
use serde::Serialize;

/// The result.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Report {
    pub(crate) model: String,
    pub(crate) layers: u32,
    pub(crate) transport: String,
    pub(crate) engines: Vec<String>,
    pub(crate) processes: usize,
    pub(crate) requests: usize,
    pub(crate) exact: usize,
    pub(crate) aborted: usize,
    pub(crate) failed: BTreeMap<String, usize>,
    pub(crate) tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) bytes: u64,
    pub(crate) copies: u64,
    pub(crate) wrong_bytes: u64,
    pub(crate) compared_bytes: u64,
    pub(crate) audited_bytes: u64,
    pub(crate) seconds: f64,
    /// Bytes per second while bytes were moving, of one rank.
    pub(crate) rate: f64,
    pub(crate) memcpy_rate: f64,
    pub(crate) phases: Vec<PhaseReport>,
    pub(crate) chaos: Option<ChaosReport>,
    /// Blocks that did not come back.
    pub(crate) lost_blocks: usize,
    /// Processes that had to be made to end.
    pub(crate) survivors: usize,
    pub(crate) problems: Vec<String>,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct PhaseReport {
    pub(crate) phase: String,
    pub(crate) median_ms: f64,
    pub(crate) worst_ms: f64,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ChaosReport {
    pub(crate) killed: usize,
    /// Processes that ended although nobody killed them.
    pub(crate) crashed: usize,
    pub(crate) stopped: usize,
    pub(crate) restarts: usize,
    pub(crate) leases_expired: usize,
}

impl Report {
    /// Whether all went as it must. Requests may fail where there is chaos; they may not be wrong.
    pub(crate) fn is_good(&self) -> bool {
        let failed: usize = self.failed.values().sum();
        self.wrong_bytes == 0
            && self.lost_blocks == 0
            && self.survivors == 0
            && self.problems.is_empty()
            && self.exact + self.aborted + failed == self.requests
            && self.exact > 0
            && (failed == 0 || self.chaos.is_some())
            && self.chaos.as_ref().is_none_or(|chaos| chaos.crashed == 0)
    }

    pub(crate) fn json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        let mut line = |name: &str, value: String| _ = writeln!(out, "  {name:<18}{value}");
        let gib = (1_u64 << 30) as f64;
        line("model", format!("{}, {} layers", self.model, self.layers));
        for engine in &self.engines {
            line("engine", engine.clone());
        }
        line("processes", format!("{}, transport {}", self.processes, self.transport));
        let mut ends = format!("{} exact", self.exact);
        if self.aborted > 0 {
            _ = write!(ends, ", {} aborted", self.aborted);
        }
        for (reason, count) in &self.failed {
            _ = write!(ends, ", {count} {reason}");
        }
        line("requests", format!("{}: {ends}", self.requests));
        line(
            "tokens",
            format!("{}, {} of them already on the decode side", self.tokens, self.cached_tokens),
        );
        line(
            "moved",
            format!("{:.1} MiB in {} copies", self.bytes as f64 / (1 << 20) as f64, self.copies),
        );
        line(
            "rate",
            format!(
                "{:.2} GiB/s on a rank while it reads: {:.0} % of memcpy ({:.2} GiB/s)",
                self.rate / gib,
                100.0 * self.rate / self.memcpy_rate.max(1.0),
                self.memcpy_rate / gib
            ),
        );
        for phase in &self.phases {
            line(
                &format!("  {}", phase.phase),
                format!("median {:.2} ms, worst {:.2} ms", phase.median_ms, phase.worst_ms),
            );
        }
        if let Some(chaos) = &self.chaos {
            line(
                "chaos",
                format!(
                    "{} processes killed, {} stopped for a while, {} engines restarted, {} leases expired",
                    chaos.killed, chaos.stopped, chaos.restarts, chaos.leases_expired
                ),
            );
            if chaos.crashed > 0 {
                line("CRASHED", format!("{} processes that nobody had killed", chaos.crashed));
            }
            let back = match self.lost_blocks {
                0 => "all back on both sides".to_owned(),
                lost => format!("{lost} LOST"),
            };
            line("blocks", back);
            line("processes left", self.survivors.to_string());
        }
        line(
            "checked",
            format!(
                "{:.1} MiB of requests' blocks, {:.1} MiB of pools, in {:.1} s",
                self.compared_bytes as f64 / (1 << 20) as f64,
                self.audited_bytes as f64 / (1 << 20) as f64,
                self.seconds
            ),
        );
        for problem in &self.problems {
            line("PROBLEM", problem.clone());
        }
        _ = writeln!(out, "{} wrong bytes", self.wrong_bytes);
        out
    }
}

/// Median and worst of each phase.
pub(crate) fn phases(all: &[Timings]) -> Vec<PhaseReport> {
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let phases = Timings::NAMES.iter().enumerate().map(|(i, name)| {
        let mut times: Vec<Duration> = all.iter().map(|phases| phases.times()[i]).collect();
        times.sort_unstable();
        PhaseReport {
            phase: (*name).to_owned(),
            median_ms: times.get(times.len() / 2).copied().map_or(0.0, milliseconds),
            worst_ms: times.last().copied().map_or(0.0, milliseconds),
        }
    });
    phases.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Report {
        Report { requests: 3, exact: 2, aborted: 1, ..Report::default() }
    }

    #[test]
    fn the_verdict_is_the_truth() {
        assert!(good().is_good());
        assert!(!Report { wrong_bytes: 1, ..good() }.is_good());
        assert!(!Report { lost_blocks: 1, ..good() }.is_good());
        assert!(!Report { survivors: 1, ..good() }.is_good());
        assert!(!Report { exact: 1, ..good() }.is_good(), "a request is missing");
        assert!(!Report { problems: vec!["x".to_owned()], ..good() }.is_good());
        assert!(!Report { exact: 0, aborted: 3, ..good() }.is_good(), "nothing was shown");
        let failed = Report { exact: 1, failed: [("x".to_owned(), 1)].into(), ..good() };
        assert!(!failed.is_good(), "without chaos nothing may fail");
        let chaos = Some(ChaosReport::default());
        assert!(Report { chaos, ..failed.clone() }.is_good());
        let chaos = Some(ChaosReport { crashed: 1, ..ChaosReport::default() });
        assert!(!Report { chaos, ..failed }.is_good(), "a crash is none of the chaos");
    }
}
