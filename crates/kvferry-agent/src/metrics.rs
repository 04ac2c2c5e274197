//! Counters and histograms, and their export as Prometheus text.
//!
//! Names and what they mean are told here alone: [`catalogue`] gives them to whoever exports them under
//! a roof of their own.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvferry_transport::StagingStatistics;

use crate::carrier::Carrier;
use crate::rules::failure::Failure;
use crate::rules::lease::Ended;

/// A name, and what it stands for.
pub type Described = (&'static str, &'static str);

/// Everything that is counted or measured, by section:
///
/// * `counters`: those of [`Scheduler::counts`](crate::Scheduler::counts);
/// * `worker_counters`: those of [`Worker::counts`](crate::Worker::counts);
/// * `timings`: where a load's time can go, in order ([`Timings`]);
/// * `outcomes`: how a load can end ([`Outcome`](crate::Outcome));
/// * `failures`: why one can fail ([`Failure::kind`](crate::Failure::kind)).
pub fn catalogue() -> [(&'static str, Vec<Described>); 5] {
    let counters = SchedulerMetrics::default();
    let counters = counters.counters().map(|(name, help, _)| (name, help));
    let of_workers = WorkerMetrics::default().counters(&Served::default());
    let of_workers = of_workers.map(|(name, help, _)| (name, help));
    let timings = Timings::NAMES.into_iter().zip(Timings::MEANINGS);
    let failures = Failure::KINDS.into_iter().zip(Failure::MEANINGS);
    [
        ("counters", counters.to_vec()),
        ("worker_counters", of_workers.to_vec()),
        ("timings", timings.collect()),
        ("outcomes", OUTCOMES.to_vec()),
        ("failures", failures.collect()),
    ]
}

/// How a load can end.
const OUTCOMES: [Described; 4] = [
    ("done", "All bytes are here, and good."),
    ("failed", "Something broke."),
    ("expired", "The lease did not hold, and what was read is not used."),
    ("aborted", "The engine did not want the request any more."),
];

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
pub struct Timings {
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
    /// Comparing what landed with what the source holds, where that was due.
    pub audit: Duration,
    /// Until the lease was confirmed.
    pub confirm: Duration,
}

impl Timings {
    /// The names, in order.
    pub const NAMES: [&'static str; 7] =
        ["queue", "handshake", "plan", "post", "wire", "audit", "confirm"];

    /// What each of them measures, in the order of the names.
    pub const MEANINGS: [&'static str; Self::NAMES.len()] = [
        "In the worker's queue.",
        "Until the engine to read from was known.",
        "Turning block tables into copies.",
        "Handing the copies to the transport.",
        "Until the last byte.",
        "Comparing what landed with what the source holds, where that was due.",
        "Until the lease was confirmed.",
    ];

    /// The times, in the order of the names.
    pub fn times(&self) -> [Duration; Self::NAMES.len()] {
        [self.queue, self.handshake, self.plan, self.post, self.wire, self.audit, self.confirm]
    }
}

/// What a rank's carrier says of those who read from it.
#[derive(Debug, Default)]
pub(crate) struct Served {
    staging: StagingStatistics,
    turned_away: u64,
}

impl Served {
    pub(crate) fn by(carrier: &dyn Carrier) -> Self {
        Self { staging: carrier.staging(), turned_away: carrier.turned_away() }
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
    pub(crate) packed_bytes: Counter,
    pub(crate) ahead_bytes: Counter,
    pub(crate) handshakes: Counter,
    pub(crate) quarantines: Counter,
    pub(crate) audits_matched: Counter,
    pub(crate) audits_mismatched: Counter,
    pub(crate) audits_unable: Counter,
    pub(crate) audited_bytes: Counter,
    pub(crate) timings: [Histogram; Timings::NAMES.len()],
}

impl WorkerMetrics {
    pub(crate) fn failed(&self, failure: &Failure) {
        self.failed[failure.number()].add(1);
    }

    /// Those that engines export under a roof of their own, beside what each load's end tells them.
    fn counters(&self, served: &Served) -> [(&'static str, &'static str, u64); 7] {
        [
            (
                "read_packed_bytes",
                "Of the bytes read and confirmed, those that the source packed.",
                self.packed_bytes.get(),
            ),
            (
                "read_ahead_bytes",
                "Of the bytes read and confirmed, those of layers that were read while others were computed.",
                self.ahead_bytes.get(),
            ),
            (
                "audits_matched",
                "Audits that found what the source holds.",
                self.audits_matched.get(),
            ),
            (
                "audits_mismatched",
                "Audits that found other bytes than the source holds: the load failed.",
                self.audits_mismatched.get(),
            ),
            (
                "audits_unable",
                "Audits that were due and could not be made: the load was used all the same.",
                self.audits_unable.get(),
            ),
            (
                "packed_refused",
                "Parts that were not packed, because no memory came free: they were read directly.",
                served.staging.refused,
            ),
            (
                "data_connections_turned_away",
                "Connections to read this rank by that did not prove themselves, or were too many.",
                served.turned_away,
            ),
        ]
    }

    /// Those counters by name.
    pub(crate) fn counts(&self, served: &Served) -> Vec<(String, u64)> {
        self.counters(served).map(|(name, _, count)| (name.to_owned(), count)).to_vec()
    }

    /// `in_flight`, `quarantined` and `served` are what is so at this moment.
    pub(crate) fn text(
        &self,
        labels: &str,
        in_flight: usize,
        quarantined: usize,
        served: &Served,
    ) -> String {
        let staging = &served.staging;
        let mut out = String::new();
        let mut text = Text { out: &mut out, labels };
        text.head("kvferry_loads_begun_total", "counter", "Requests whose load has begun.");
        text.line("kvferry_loads_begun_total", "", self.loads.get() as f64);
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
            ("kvferry_audited_bytes_total", "Bytes compared by audits.", &self.audited_bytes),
        ] {
            text.head(name, "counter", help);
            text.line(name, "", counter.get() as f64);
        }
        // Audits follow, as one family.
        for (name, help, count) in self.counters(served) {
            if !name.starts_with("audits_") {
                let name = format!("kvferry_{name}_total");
                text.head(&name, "counter", help);
                text.line(&name, "", count as f64);
            }
        }
        let name = "kvferry_audits_total";
        text.head(name, "counter", "Loads compared with what the source holds, by what was found.");
        for (result, counter) in [
            ("matched", &self.audits_matched),
            ("mismatch", &self.audits_mismatched),
            ("unable", &self.audits_unable),
        ] {
            text.line(name, &format!("result=\"{result}\""), counter.get() as f64);
        }
        for (name, kind, help, value) in [
            ("kvferry_staging_bytes", "gauge", "Memory to pack into for peers.", staging.bytes),
            ("kvferry_staging_used_bytes", "gauge", "Of that, in use.", staging.in_use),
            ("kvferry_packed_total", "counter", "Parts packed for peers.", staging.packed),
            (
                "kvferry_packed_waits_total",
                "counter",
                "Parts that waited for memory to be packed into.",
                staging.waits,
            ),
        ] {
            text.head(name, kind, help);
            text.line(name, "", value as f64);
        }
        let name = "kvferry_load_phase_seconds";
        text.head(name, "histogram", "Where the time of loads that were done went.");
        for (phase, histogram) in Timings::NAMES.iter().zip(&self.timings) {
            histogram.write(&mut text, name, &format!("phase=\"{phase}\""));
        }
        out
    }
}

/// What is counted where peers come in.
#[derive(Debug, Default)]
pub(crate) struct ListenerCounts {
    pub(crate) connections: Counter,
    pub(crate) turned_away: Counter,
    pub(crate) misbehaved: Counter,
}

/// What a scheduler counts.
#[derive(Debug, Default)]
pub(crate) struct SchedulerMetrics {
    pub(crate) granted: Counter,
    pub(crate) ended: [Counter; Ended::ALL.len()],
    pub(crate) held: Histogram,
    pub(crate) listener: Arc<ListenerCounts>,
    pub(crate) refused: Counter,
    pub(crate) heartbeats: Counter,
    pub(crate) lost: Counter,
    pub(crate) forged: Counter,
}

impl SchedulerMetrics {
    pub(crate) fn ended(&self, why: Ended, after: Duration) {
        self.ended[why as usize].add(1);
        self.held.observe(after);
    }

    fn counters(&self) -> [(&'static str, &'static str, &Counter); 12] {
        let [confirmed, abandoned, expired, revoked] = &self.ended;
        [
            (
                "leases_granted",
                "Requests whose blocks this engine promised to keep.",
                &self.granted,
            ),
            (
                "leases_confirmed",
                "Requests whose blocks came back because all of the other side has read them.",
                confirmed,
            ),
            (
                "leases_abandoned",
                "Requests whose blocks came back because the other side does not want them.",
                abandoned,
            ),
            (
                "leases_expired",
                "Requests whose blocks came back because nobody asked for them in time.",
                expired,
            ),
            ("leases_revoked", "Requests whose blocks this engine took back.", revoked),
            ("connections", "Peers that proved themselves.", &self.listener.connections),
            (
                "connections_turned_away",
                "Peers that did not prove themselves, or were too many.",
                &self.listener.turned_away,
            ),
            ("connections_misbehaved", "Peers that broke the protocol.", &self.listener.misbehaved),
            ("refusals", "Peers whose memory does not fit this engine's.", &self.refused),
            ("heartbeats", "Leases of other engines that were extended.", &self.heartbeats),
            ("holds_lost", "Leases of other engines that were lost before a load.", &self.lost),
            (
                "confirmations_not_granted",
                "Reads by block tables that this engine did not grant: they were changed on the way.",
                &self.forged,
            ),
        ]
    }

    /// Every counter by its name.
    pub(crate) fn counts(&self) -> Vec<(String, u64)> {
        self.counters().map(|(name, _, counter)| (name.to_owned(), counter.get())).to_vec()
    }

    pub(crate) fn text(&self, labels: &str, open: usize, holds: usize, draining: bool) -> String {
        let mut out = String::new();
        let mut text = Text { out: &mut out, labels };
        text.head("kvferry_leases_ended_total", "counter", "Leases by how they ended.");
        for (why, counter) in Ended::ALL.iter().zip(&self.ended) {
            let label = format!("why=\"{why}\"");
            text.line("kvferry_leases_ended_total", &label, counter.get() as f64);
        }
        // Leases that ended were counted above, as one family.
        let is_end = |name: &str| Ended::ALL.iter().any(|why| name == format!("leases_{why}"));
        for (name, help, counter) in self.counters() {
            if is_end(name) {
                continue;
            }
            let name = format!("kvferry_{name}_total");
            text.head(&name, "counter", help);
            text.line(&name, "", counter.get() as f64);
        }
        text.head("kvferry_leases_open", "gauge", "Leases that are open.");
        text.line("kvferry_leases_open", "", open as f64);
        text.head("kvferry_holds_open", "gauge", "Leases of others that are kept alive.");
        text.line("kvferry_holds_open", "", holds as f64);
        text.head("kvferry_draining", "gauge", "1 while the engine promises nothing new.");
        text.line("kvferry_draining", "", f64::from(draining));
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
        let text = metrics.text("engine=\"p\"", 3, 0, false);
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
    fn every_name_in_the_catalogue_is_counted_and_described() {
        let catalogue = catalogue();
        assert_eq!(catalogue.each_ref().map(|(_, all)| all.len()), [12, 7, 7, 4, 9]);
        for (section, described) in &catalogue {
            for (name, help) in described {
                assert!(help.ends_with('.'), "{section}: {name}: {help}");
            }
        }
        let counts = SchedulerMetrics::default().counts();
        let counted: Vec<&str> = counts.iter().map(|(name, _)| name.as_str()).collect();
        let named: Vec<&str> = catalogue[0].1.iter().map(|(name, _)| *name).collect();
        assert_eq!(counted, named);
        // In the text every end of a lease is there once, by why it ended.
        for why in Ended::ALL {
            assert!(named.contains(&format!("leases_{why}").as_str()), "{why}");
            let metrics = SchedulerMetrics::default();
            metrics.ended(why, Duration::ZERO);
            let text = metrics.text("", 0, 0, false);
            let counted = text.lines().filter(|line| line.starts_with("kvferry_leases_"));
            let counted: Vec<&str> = counted.filter(|line| line.ends_with(" 1")).collect();
            assert_eq!(counted, [format!("kvferry_leases_ended_total{{why=\"{why}\"}} 1")]);
            let count = metrics.counts().into_iter().find(|(_, n)| *n == 1).unwrap();
            assert_eq!(count.0, format!("leases_{why}"));
        }
        let (metrics, served) = (WorkerMetrics::default(), Served::default());
        let counts = metrics.counts(&served);
        let counted: Vec<&str> = counts.iter().map(|(name, _)| name.as_str()).collect();
        let named: Vec<&str> = catalogue[1].1.iter().map(|(name, _)| *name).collect();
        assert_eq!(counted, named);
        let text = metrics.text("", 0, 0, &served);
        for name in named.iter().filter(|name| !name.starts_with("audits_")) {
            assert!(text.contains(&format!("\nkvferry_{name}_total{{}} 0\n")), "{name}");
        }
        for (outcome, _) in OUTCOMES {
            assert!(text.contains(&format!("outcome=\"{outcome}\"")), "{outcome}");
        }
    }

    #[test]
    fn names_do_not_break_out_of_labels() {
        assert_eq!(escape("a\"b\\c\nd"), r#"a\"b\\c\nd"#);
    }
}
