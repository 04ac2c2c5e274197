//! A transfer at an absurd rate is a sign that the wrong path was chosen: say so, once.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::transport::Report;

/// Smaller transfers say more about latency than about the path.
const SIZEABLE: u64 = 16 << 20;
/// How many sizeable transfers are looked at: a slow first one (page faults, connecting) is not
/// enough to cry wolf.
const LOOKED_AT: u32 = 4;

/// What carries the bytes, and so what rate would be absurd.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Link {
    /// Memory of this host.
    Memory,
    /// A network card, with its rate in bytes per second where the system tells.
    Network(Option<f64>),
    /// NIXL, with the rate of the fastest RDMA card.
    Nixl(Option<f64>),
}

impl Link {
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
    pub(crate) fn fastest_rdma() -> Option<f64> {
        // A port's `rate` reads like "400 Gb/sec (4X NDR)".
        files(Path::new("/sys/class/infiniband"), "ports")
            .flat_map(|ports| files(&ports, "rate"))
            .filter_map(|rate| fs::read_to_string(rate).ok())
            .filter_map(|text| text.split_whitespace().next()?.parse::<f64>().ok())
            .map(|gigabits| gigabits * 1e9 / 8.0)
            .reduce(f64::max)
    }

    /// The fastest network card of this host, as far as the drivers tell.
    pub(crate) fn fastest_card() -> Option<f64> {
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

/// Looks at the first sizeable transfers of one peer.
#[derive(Debug)]
pub(crate) struct RateWatch {
    link: Link,
    gpu: AtomicBool,
    looked_at: AtomicU32,
    /// The best rate seen, as bits: rates are positive, so their bits sort as they do.
    best: AtomicU64,
}

impl Default for RateWatch {
    fn default() -> Self {
        Self::new(Link::Memory)
    }
}

impl RateWatch {
    pub(crate) fn new(link: Link) -> Self {
        Self {
            link,
            gpu: AtomicBool::new(false),
            looked_at: AtomicU32::new(0),
            best: AtomicU64::new(0),
        }
    }

    /// From now on GPU memory is involved.
    pub(crate) fn gpu(&self) {
        self.gpu.store(true, Ordering::Relaxed);
    }

    pub(crate) fn observe(&self, report: &Report) {
        if let Some(warning) = self.judge(report) {
            tracing::warn!("{warning}");
        }
    }

    /// The warning that this transfer calls for; at most once in the life of the watch.
    fn judge(&self, report: &Report) -> Option<String> {
        if report.bytes < SIZEABLE || self.looked_at.load(Ordering::Relaxed) >= LOOKED_AT {
            return None;
        }
        let rate = report.rate()?;
        let best = self.best.fetch_max(rate.to_bits(), Ordering::Relaxed).max(rate.to_bits());
        let best = f64::from_bits(best);
        if self.looked_at.fetch_add(1, Ordering::Relaxed) + 1 != LOOKED_AT {
            return None;
        }
        let (floor, cause) = self.link.absurd(self.gpu.load(Ordering::Relaxed))?;
        (best < floor).then(|| {
            format!(
                "the first {LOOKED_AT} transfers of {} MiB or more reached {:.0} MB/s at best, \
                 where {:.0} MB/s would still be slow: {cause}",
                SIZEABLE >> 20,
                best / 1e6,
                floor / 1e6,
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn report(bytes: u64, millis: u64) -> Report {
        Report { bytes, time_on_wire: Duration::from_millis(millis), ..Report::default() }
    }

    fn warnings(watch: &RateWatch, reports: impl IntoIterator<Item = Report>) -> Vec<String> {
        reports.into_iter().filter_map(|report| watch.judge(&report)).collect()
    }

    #[test]
    fn an_absurd_rate_is_one_warning() {
        let watch = RateWatch::new(Link::Nixl(Some(50e9)));
        // 64 MiB in 100 ms is 671 MB/s: software emulation, not RDMA.
        let said = warnings(&watch, std::iter::repeat_n(report(64 << 20, 100), 20));
        assert_eq!(said.len(), 1);
        assert!(said[0].contains("RDMA"), "{}", said[0]);
    }

    #[test]
    fn gpu_memory_at_software_speed_is_a_warning() {
        let watch = RateWatch::new(Link::Nixl(None));
        watch.gpu();
        let said = warnings(&watch, std::iter::repeat_n(report(256 << 20, 400), 20));
        assert_eq!(said.len(), 1);
        assert!(said[0].contains("GPU"), "{}", said[0]);
    }

    #[test]
    fn one_slow_transfer_among_fast_ones_is_none() {
        let watch = RateWatch::new(Link::Nixl(Some(50e9)));
        let mut reports = vec![report(64 << 20, 2000)];
        reports.extend(std::iter::repeat_n(report(64 << 20, 2), 20));
        assert!(warnings(&watch, reports).is_empty());
    }

    #[test]
    fn small_transfers_say_nothing() {
        let watch = RateWatch::new(Link::Nixl(Some(50e9)));
        let said = warnings(&watch, std::iter::repeat_n(report(1 << 20, 1000), 100));
        assert!(said.is_empty());
    }
}
