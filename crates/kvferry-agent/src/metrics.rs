//! Counters and histograms, and their export as Prometheus text.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::Failure;
use crate::lease::Ended;

/// A sum that only grows.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Upper bounds in seconds.
const BOUNDS: [f64; 16] = [
    0.0001, 0.000_25, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
];

/// How often something took how long.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    buckets: [AtomicU64; BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
}

impl Histogram {
    pub(crate) fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    fn write(&self, text: &mut Text<'_>, name: &str, label: &str) {
        let mut sum = 0;
        for (i, bucket) in self.buckets.iter().enumerate() {
            sum += bucket.load(Ordering::Relaxed);
            let bound = BOUNDS.get(i).map_or("+Inf".to_owned(), f64::to_string);
            text.line(&format!("{name}_bucket"), &format!("{label},le=\"{bound}\""), sum as f64);
        }
        let seconds = self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9;
        text.line(&format!("{name}_sum"), label, seconds);
        text.line(&format!("{name}_count"), label, sum as f64);
    }
}

/// Where the time of a request went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Phases {
    /// In the worker's queue.
    pub queue: Duration,
    /// Until the engine to read from was known.
    pub handshake: Duration,
    /// Turning block tables into copies.
    pub plan: Duration,
    /// Handing the copies to the transport.
    pub post: Duration,
    /// Until the last byte.
    pub wire: Duration,
    /// Until the lease was confirmed.
    pub confirm: Duration,
}

impl Phases {
    /// The names, in order.
    pub const NAMES: [&'static str; 6] = ["queue", "handshake", "plan", "post", "wire", "confirm"];

    /// The times, in the order of the names.
    pub fn times(&self) -> [Duration; 6] {
        [self.queue, self.handshake, self.plan, self.post, self.wire, self.confirm]
    }
}

/// What a worker counts.
#[derive(Debug, Default)]
pub(crate) struct WorkerMetrics {
    pub(crate) loads: Counter,
    pub(crate) done: Counter,
    pub(crate) aborted: Counter,
    pub(crate) expired: Counter,
    pub(crate) failed: [Counter; Failure::KINDS.len()],
    pub(crate) bytes: Counter,
    pub(crate) copies: Counter,
    pub(crate) handshakes: Counter,
    pub(crate) quarantines: Counter,
    pub(crate) phases: [Histogram; Phases::NAMES.len()],
}

impl WorkerMetrics {
    pub(crate) fn failed(&self, failure: &Failure) {
        let kind = Failure::KINDS.iter().position(|kind| *kind == failure.kind());
        if let Some(kind) = kind {
            self.failed[kind].add(1);
        }
    }

    /// `in_flight` and `quarantined` are what is so at this moment.
    pub(crate) fn text(&self, labels: &str, in_flight: usize, quarantined: usize) -> String {
        let mut out = String::new();
        let mut text = Text { out: &mut out, labels };
        text.head("kvferry_loads_total", "counter", "Requests to load.");
        text.line("kvferry_loads_total", "", self.loads.get() as f64);
        text.head("kvferry_loads_ended_total", "counter", "Requests by how their load ended.");
        let ended = [("done", &self.done), ("aborted", &self.aborted), ("expired", &self.expired)];
        for (how, counter) in ended {
            let label = format!("outcome=\"{how}\"");
            text.line("kvferry_loads_ended_total", &label, counter.get() as f64);
        }
        for (kind, counter) in Failure::KINDS.iter().zip(&self.failed) {
            let label = format!("outcome=\"failed\",reason=\"{kind}\"");
            text.line("kvferry_loads_ended_total", &label, counter.get() as f64);
        }
        text.head("kvferry_loads_in_flight", "gauge", "Loads under way.");
        text.line("kvferry_loads_in_flight", "", in_flight as f64);
        text.head(
            "kvferry_loads_quarantined",
            "gauge",
            "Ended loads whose blocks are kept back because bytes may still land in them.",
        );
        text.line("kvferry_loads_quarantined", "", quarantined as f64);
        for (name, help, counter) in [
            ("kvferry_read_bytes_total", "Bytes read and confirmed.", &self.bytes),
            ("kvferry_read_copies_total", "Copies read and confirmed.", &self.copies),
            ("kvferry_handshakes_total", "Handshakes with engines.", &self.handshakes),
            ("kvferry_quarantines_total", "Loads that went into quarantine.", &self.quarantines),
        ] {
            text.head(name, "counter", help);
            text.line(name, "", counter.get() as f64);
        }
        let name = "kvferry_load_phase_seconds";
        text.head(name, "histogram", "Where the time of loads that were done went.");
        for (phase, histogram) in Phases::NAMES.iter().zip(&self.phases) {
            histogram.write(&mut text, name, &format!("phase=\"{phase}\""));
        }
        out
    }
}

/// What a scheduler counts.
#[derive(Debug, Default)]
pub(crate) struct SchedulerMetrics {
    pub(crate) granted: Counter,
    pub(crate) ended: [Counter; Ended::ALL.len()],
    pub(crate) held: Histogram,
    pub(crate) connections: Counter,
    pub(crate) turned_away: Counter,
    pub(crate) misbehaved: Counter,
    pub(crate) refused: Counter,
    pub(crate) heartbeats: Counter,
    pub(crate) lost: Counter,
}

impl SchedulerMetrics {
    pub(crate) fn ended(&self, why: Ended, after: Duration) {
        self.ended[why as usize].add(1);
        self.held.observe(after);
    }

    fn counters(&self) -> [(&'static str, &'static str, &Counter); 7] {
        [
            ("leases_granted", "Leases granted.", &self.granted),
            ("connections", "Peers that proved themselves.", &self.connections),
            (
                "connections_turned_away",
                "Connections that did not prove themselves, or came when there were too many.",
                &self.turned_away,
            ),
            (
                "connections_misbehaved",
                "Connections ended because the peer broke the protocol.",
                &self.misbehaved,
            ),
            ("refusals", "Peers that do not fit.", &self.refused),
            ("heartbeats", "Leases of others extended.", &self.heartbeats),
            ("holds_lost", "Leases of others that were lost.", &self.lost),
        ]
    }

    /// Every counter by its name; leases that ended also by why they did.
    pub(crate) fn counts(&self) -> Vec<(String, u64)> {
        let ended = Ended::ALL.iter().zip(&self.ended);
        let ended = ended.map(|(why, counter)| (format!("leases_{why}"), counter.get()));
        let others = self.counters().map(|(name, _, counter)| (name.to_owned(), counter.get()));
        ended.chain(others).collect()
    }

    pub(crate) fn text(&self, labels: &str, open: usize, holds: usize) -> String {
        let mut out = String::new();
        let mut text = Text { out: &mut out, labels };
        text.head("kvferry_leases_ended_total", "counter", "Leases by how they ended.");
        for (why, counter) in Ended::ALL.iter().zip(&self.ended) {
            let label = format!("why=\"{why}\"");
            text.line("kvferry_leases_ended_total", &label, counter.get() as f64);
        }
        for (name, help, counter) in self.counters() {
            let name = format!("kvferry_{name}_total");
            text.head(&name, "counter", help);
            text.line(&name, "", counter.get() as f64);
        }
        text.head("kvferry_leases_open", "gauge", "Leases that are open.");
        text.line("kvferry_leases_open", "", open as f64);
        text.head("kvferry_holds_open", "gauge", "Leases of others that are kept alive.");
        text.line("kvferry_holds_open", "", holds as f64);
        text.head("kvferry_lease_seconds", "histogram", "How long leases lasted.");
        self.held.write(&mut text, "kvferry_lease_seconds", "");
        out
    }
}

struct Text<'a> {
    out: &'a mut String,
    labels: &'a str,
}

impl Text<'_> {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        _ = writeln!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, label: &str, value: f64) {
        let comma = if self.labels.is_empty() || label.is_empty() { "" } else { "," };
        let label = label.trim_start_matches(',');
        _ = writeln!(self.out, "{name}{{{}{comma}{label}}} {value}", self.labels);
    }
}

/// A value between the quotes of a label.
pub(crate) fn escape(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_counts_up_to_each_bound() {
        let metrics = SchedulerMetrics::default();
        metrics.ended(Ended::Expired, Duration::from_millis(3));
        metrics.ended(Ended::Expired, Duration::from_secs(100));
        let text = metrics.text("engine=\"p\"", 3, 0);
        for line in [
            "kvferry_leases_ended_total{engine=\"p\",why=\"expired\"} 2",
            "kvferry_lease_seconds_bucket{engine=\"p\",le=\"0.0025\"} 0",
            "kvferry_lease_seconds_bucket{engine=\"p\",le=\"0.005\"} 1",
            "kvferry_lease_seconds_bucket{engine=\"p\",le=\"+Inf\"} 2",
            "kvferry_lease_seconds_count{engine=\"p\"} 2",
            "kvferry_lease_seconds_sum{engine=\"p\"} 100.003",
            "kvferry_leases_open{engine=\"p\"} 3",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\nis not in\n{text}");
        }
    }

    #[test]
    fn names_do_not_break_out_of_labels() {
        assert_eq!(escape("a\"b\\c\nd"), r#"a\"b\\c\nd"#);
    }
}
