//! A transfer at an absurd rate is a sign that the wrong path was chosen: say so, once.
//!
//! Rates are judged by transfers of long copies only. Short copies are slow on every path, because
//! each of them costs the same whatever its length: about 7 µs in GPU memory. That is not the path's
//! fault, and so it is said in other words.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::contract::Report;

/// Smaller transfers say more about latency than about the path.
const SIZEABLE: u64 = 16 << 20;
/// Copies from this length on are long: at 10 µs each they still make 26 GB/s.
const LONG: u64 = 256 << 10;
/// How many sizeable transfers are looked at: a slow first one (page faults, connecting) is not
/// enough to cry wolf.
const LOOKED_AT: u32 = 4;

/// What carries the bytes, and so what rate would be absurd.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Medium {
    /// Memory of this host.
    Memory,
    /// GPUs of this host, and what is between them.
    Cards,
    /// A network card, with its rate in bytes per second where the system tells.
    Network(Option<f64>),
    /// NIXL, with the rate of the fastest RDMA card.
    Nixl(Option<f64>),
}

impl Medium {
    /// The rate under which something is wrong, and what that is likely to be.
    fn absurd(self, gpu: bool) -> Option<(f64, &'static str)> {
        match self {
            _ if gpu => Some((
                3e9,
                "GPU memory is being emulated in software over host memory or TCP; check that \
                 UCX_TLS allows cuda_ipc, cuda_copy and the RDMA transports, that both processes \
                 see each other's GPU (same container IPC and PID namespaces for one host), and \
                 that GPUDirect RDMA (nvidia_peermem or dmabuf) is there",
            )),
            Self::Cards => Some((
                5e9,
                "the card is busy with other work, or the way to the peer's card is slow; \
                 `nvidia-smi topo -m` shows what is between them",
            )),
            Self::Nixl(Some(rate)) => Some((
                rate / 20.0,
                "UCX has probably not chosen the RDMA card; check UCX_NET_DEVICES and UCX_TLS, and \
                 that the container has /dev/infiniband and enough locked memory (ulimit -l)",
            )),
            Self::Nixl(None) => Some((
                100e6,
                "UCX has probably chosen a slow network device; check UCX_NET_DEVICES and UCX_TLS",
            )),
            Self::Network(Some(rate)) => Some((
                rate / 20.0,
                "the route to the peer may not use the fastest card; check which address the peer \
                 advertises",
            )),
            Self::Network(None) => None,
            Self::Memory => Some((
                200e6,
                "the machine is overcommitted or swapping, or the memory is far from the CPUs that \
                 copy it",
            )),
        }
    }

    /// The fastest RDMA port of this host, if there is one.
    pub fn fastest_rdma() -> Option<f64> {
        // A port's `rate` reads like "400 Gb/sec (4X NDR)".
        files(Path::new("/sys/class/infiniband"), "ports")
            .flat_map(|ports| files(&ports, "rate"))
            .filter_map(|rate| fs::read_to_string(rate).ok())
            .filter_map(|text| text.split_whitespace().next()?.parse::<f64>().ok())
            .map(|gigabits| gigabits * 1e9 / 8.0)
            .reduce(f64::max)
    }

    /// The fastest network card of this host, as far as the drivers tell.
    pub fn fastest_card() -> Option<f64> {
        files(Path::new("/sys/class/net"), "speed")
            .filter_map(|speed| fs::read_to_string(speed).ok())
            .filter_map(|text| text.trim().parse::<f64>().ok())
            .filter(|&megabits| megabits > 0.0)
            .map(|megabits| megabits * 1e6 / 8.0)
            .reduce(f64::max)
    }
}

/// `name` in each entry of a directory; nothing where the directory is missing.
fn files(directory: &Path, name: &'static str) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .map(move |entry| entry.path().join(name))
}

/// Looks at the first sizeable transfers from one peer.
#[derive(Debug)]
pub struct RateWatch {
    medium: Medium,
    gpu: AtomicBool,
    long: Best,
    short: Best,
}

/// The best of the first few transfers of one kind.
#[derive(Debug, Default)]
struct Best {
    looked_at: AtomicU32,
    /// The best rate seen, as bits: rates are positive, so their bits sort as they do.
    rate: AtomicU64,
}

impl Best {
    /// Takes in one more transfer; the best rate when it was the last to be looked at.
    fn of(&self, report: &Report) -> Option<f64> {
        if self.looked_at.load(Ordering::Relaxed) >= LOOKED_AT {
            return None;
        }
        let rate = report.rate()?.to_bits();
        let best = self.rate.fetch_max(rate, Ordering::Relaxed).max(rate);
        let last = self.looked_at.fetch_add(1, Ordering::Relaxed) + 1 == LOOKED_AT;
        last.then(|| f64::from_bits(best))
    }
}

/// What there is to say of the transfers so far.
#[derive(Debug, PartialEq)]
enum Verdict {
    /// The path is wrong.
    Slow(String),
    /// The path may be right: the copies are short.
    Short(String),
}

impl Default for RateWatch {
    fn default() -> Self {
        Self::new(Medium::Memory)
    }
}

impl RateWatch {
    pub fn new(medium: Medium) -> Self {
        Self { medium, gpu: AtomicBool::new(false), long: Best::default(), short: Best::default() }
    }

    /// What carries the bytes.
    pub fn medium(&self) -> Medium {
        self.medium
    }

    /// From now on GPU memory is involved.
    pub fn gpu(&self) {
        self.gpu.store(true, Ordering::Relaxed);
    }

    pub fn observe(&self, report: &Report) {
        match self.judge(report) {
            Some(Verdict::Slow(text)) => tracing::warn!("transfers are slow: {text}"),
            Some(Verdict::Short(text)) => {
                tracing::info!("transfers are made of short copies: {text}");
            }
            None => {}
        }
    }

    /// What this transfer gives reason to say; each verdict at most once in the life of the watch.
    fn judge(&self, report: &Report) -> Option<Verdict> {
        if report.bytes < SIZEABLE {
            return None;
        }
        let mean = report.bytes / report.copies_posted.max(1);
        let best = if mean >= LONG { &self.long } else { &self.short }.of(report)?;
        let (floor, cause) = self.medium.absurd(self.gpu.load(Ordering::Relaxed))?;
        if best >= floor {
            return None;
        }
        let reached = format!("the first {LOOKED_AT} transfers of {} MiB or more", SIZEABLE >> 20);
        Some(if mean >= LONG {
            Verdict::Slow(format!(
                "{reached} reached {:.0} MB/s at best, where {:.0} MB/s would still be slow: {cause}",
                best / 1e6,
                floor / 1e6,
            ))
        } else {
            let unpacked = match report.packed {
                0 => "",
                _ => ", among them those that were to be packed and could not be packed in time",
            };
            let micros = (report.time_to_post + report.time_on_wire).as_secs_f64() * 1e6
                / report.copies_posted.max(1) as f64;
            Verdict::Short(format!(
                "{reached} in short copies ({mean} bytes on average, {micros:.1} µs each{unpacked}) \
                 reached {:.0} MB/s at best: the time goes into the number of copies, not into bytes. Equal \
                 layouts on both sides, or larger blocks, make them longer",
                best / 1e6,
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn report(bytes: u64, millis: u64, copies: u64) -> Report {
        let time_on_wire = Duration::from_millis(millis);
        Report { bytes, copies_posted: copies, time_on_wire, ..Report::default() }
    }

    fn verdicts(watch: &RateWatch, reports: impl IntoIterator<Item = Report>) -> Vec<Verdict> {
        reports.into_iter().filter_map(|report| watch.judge(&report)).collect()
    }

    fn many(report: Report) -> impl Iterator<Item = Report> {
        std::iter::repeat_n(report, 20)
    }

    #[test]
    fn an_absurd_rate_is_one_warning() {
        let watch = RateWatch::new(Medium::Nixl(Some(50e9)));
        // 64 MiB in 100 ms is 671 MB/s: software emulation, not RDMA.
        let said = verdicts(&watch, many(report(64 << 20, 100, 64)));
        let [Verdict::Slow(text)] = &said[..] else { panic!("{said:?}") };
        assert!(text.contains("RDMA"), "{text}");
    }

    #[test]
    fn gpu_memory_at_software_speed_is_a_warning() {
        let watch = RateWatch::new(Medium::Nixl(None));
        watch.gpu();
        let said = verdicts(&watch, many(report(256 << 20, 400, 1)));
        let [Verdict::Slow(text)] = &said[..] else { panic!("{said:?}") };
        assert!(text.contains("GPU"), "{text}");
    }

    /// A 70-billion-parameter model from 4 ranks to 8 on one H200: 40,960 copies of 8 KiB at 1.1 GB/s.
    #[test]
    fn short_copies_are_not_blamed_on_software_emulation() {
        let watch = RateWatch::new(Medium::Nixl(None));
        watch.gpu();
        let said = verdicts(&watch, many(report(336 << 20, 317, 40_960)));
        let [Verdict::Short(text)] = &said[..] else { panic!("{said:?}") };
        assert!(text.contains("8601 bytes on average, 7.7 µs each"), "{text}");
        assert!(!text.contains("emulated"), "{text}");
        // And they do not hide that long ones are slow, too.
        let said = verdicts(&watch, many(report(256 << 20, 400, 100)));
        assert!(matches!(said[..], [Verdict::Slow(_)]), "{said:?}");
    }

    /// The same to be packed, in six parts of which one was: what was read run by run is no long copy.
    #[test]
    fn packing_that_falls_back_is_not_blamed_on_software_emulation() {
        let watch = RateWatch::new(Medium::Nixl(None));
        watch.gpu();
        let packed = 56 << 20;
        let fell_back = Report { packed, ..report(336 << 20, 270, 1 + 40_960 * 5 / 6) };
        let said = verdicts(&watch, many(fell_back));
        let [Verdict::Short(text)] = &said[..] else { panic!("{said:?}") };
        assert!(text.contains("short copies") && text.contains("could not be packed"), "{text}");
        assert!(!text.contains("emulated"), "{text}");
    }

    #[test]
    fn one_slow_transfer_among_fast_ones_is_none() {
        let watch = RateWatch::new(Medium::Nixl(Some(50e9)));
        let mut reports = vec![report(64 << 20, 2000, 1)];
        reports.extend(many(report(64 << 20, 2, 1)));
        assert_eq!(verdicts(&watch, reports), []);
    }

    #[test]
    fn small_transfers_say_nothing() {
        let watch = RateWatch::new(Medium::Nixl(Some(50e9)));
        assert_eq!(verdicts(&watch, many(report(1 << 20, 1000, 1))), []);
    }
}
