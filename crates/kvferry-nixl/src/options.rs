//! How a transport is set up.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;

use super::capi::AgentSettings;
use kvferry_cuda::driver;
use kvferry_transport::Error;
use kvferry_transport::tcp::gather;

/// Slots that are made to fit are multiples of this many bytes.
const PAGE: u64 = 4096;

/// What UCX is told. Without the first it reads another process's GPU memory in software where it sees no NVLink, one
/// card included: 0.5 GB/s instead of 1,800 on an H200. Without the others its TCP moves GPU memory in segments of 8 KB.
const UCX: &str = "CUDA_IPC_ENABLE_GET_ZCOPY=on,TCP_TX_SEG_SIZE=4m,TCP_RX_SEG_SIZE=4m";
/// The same number of bytes.
const SEGMENT: u64 = 4 << 20;

/// Bytes of the longest segments of UCX's TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segments {
    pub(super) sent: u64,
    pub(super) received: u64,
}

impl Segments {
    pub(super) fn of_this_process() -> Self {
        let told = |name| std::env::var(name).map_or(SEGMENT, |text| bytes(&text));
        Self { sent: told("UCX_TCP_TX_SEG_SIZE"), received: told("UCX_TCP_RX_SEG_SIZE") }
    }

    /// Nobody may send more than the other side has room for: UCX does not agree on it, and writes beyond its buffer.
    pub(super) fn check(self, peer: Self) -> Result<(), Error> {
        for (who, one, other) in [("the peer", peer, self), ("this process", self, peer)] {
            if one.sent > other.received {
                return Err(Error::Unsupported(format!(
                    "over UCX's TCP {who} sends segments of up to {} bytes, and the other side has room for {}: set \
                     UCX_TCP_TX_SEG_SIZE and UCX_TCP_RX_SEG_SIZE to the same on both sides, or not at all",
                    one.sent, other.received
                )));
            }
        }
        Ok(())
    }
}

/// As UCX reads a size: 8k, 4MB, 8192, inf.
fn bytes(text: &str) -> u64 {
    let text = text.trim().to_ascii_lowercase();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let factor = match text[digits..].trim_start().bytes().next() {
        Some(b'k') => 1 << 10,
        Some(b'm') => 1 << 20,
        Some(b'g') => 1 << 30,
        _ => 1,
    };
    text[..digits].parse().map_or(u64::MAX, |number: u64| number.saturating_mul(factor))
}

/// How a [`Nixl`](super::Nixl) transport is set up.
#[derive(Clone, Debug)]
pub struct NixlOptions {
    /// The library, or the wheel's directory. Without: see [`find()`](super::find()). Its code runs in this process: name
    /// none that others may write, nor take it from anybody else.
    pub library: Option<PathBuf>,
    /// Folders of Python packages of the process that this runs in (its `site-packages`), to look
    /// for the wheel in before anything else is searched. A Python package knows its own for sure,
    /// where this library has to guess.
    pub site_packages: Vec<PathBuf>,
    /// The plugin that moves bytes.
    pub plugin: String,
    /// Its parameters.
    pub parameters: Vec<(String, String)>,
    /// Where the server listens that peers ask to pack, and the address to give to them where that is
    /// another one. Port 0 means any free one. An address of no host in particular without one to give
    /// means that peers read every run by itself.
    pub control: (SocketAddr, Option<IpAddr>),
    /// The ports that one may listen at: that server, and UCX where its TCP moves bytes.
    pub ports: Option<RangeInclusive<u16>>,
    /// Bytes of host memory to pack into for peers, and to fetch what peers packed, at most. Without any,
    /// nothing is packed.
    pub staging: u64,
    /// How the memory of a card is packed.
    pub card: CardPacking,
    /// Pause between two rounds of NIXL's progress thread, in microseconds. 0 burns a core.
    pub progress_delay_us: u64,
}

/// How the memory of a card is packed for peers, and what peers packed is put in its place.
#[derive(Clone, Debug)]
pub struct CardPacking {
    /// Bytes of the card's memory to pack into and to fetch to, at most, and at most an eighth of what nobody
    /// has when a transport first gets to know the card. Without any, the runs of GPU memory are read one by
    /// one.
    pub staging: u64,
    /// Bytes that are packed at a time, at most: a slot of that memory, of which there are at least four.
    pub slot: u64,
    /// How many of them a peer is asked for at once.
    pub lanes: usize,
    /// As of [`CudaOptions::sms`](kvferry_cuda::CudaOptions::sms).
    pub sms: Option<u32>,
    /// As of [`CudaOptions::kernel`](kvferry_cuda::CudaOptions::kernel).
    pub kernel: Option<PathBuf>,
}

impl Default for CardPacking {
    fn default() -> Self {
        // A transfer costs NIXL 100 µs however long it is, in which an H200 moves 150 MB.
        Self { staging: 512 << 20, slot: 64 << 20, lanes: 8, sms: None, kernel: None }
    }
}

impl CardPacking {
    /// The least [`staging`](Self::staging) that something can be packed into.
    pub const LEAST_STAGING: u64 = 4 * gather::SLOT_BYTES.next_multiple_of(PAGE);

    /// Bytes to take of a card of whose memory so many are free, and of a slot of those. Where they are few,
    /// there are at least four slots all the same, so that packing, moving and unpacking overlap. `None` where
    /// they are too few to pack into.
    pub(super) fn fitted(&self, free: u64) -> Option<(u64, u64)> {
        let bytes = self.staging.min(free / 8);
        let slot = self.slot.min(gather::MOST_PACKED).min(bytes / 4 / PAGE * PAGE);
        (slot >= gather::SLOT_BYTES).then(|| (bytes / slot * slot, slot))
    }
}

impl Default for NixlOptions {
    fn default() -> Self {
        let parameters = [
            // Without this a dead peer is never reported.
            ("ucx_error_handling_mode", "peer"),
            // Without these a post on one host does the whole copy in the calling thread.
            ("num_threads", "1"),
            ("split_batch_size", "1"),
            // UCX's own settings; `UCX_…` in the environment goes before each.
            ("engine_config", UCX),
        ];
        Self {
            library: None,
            site_packages: Vec::new(),
            plugin: "UCX".to_owned(),
            parameters: parameters.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec(),
            control: ((Ipv4Addr::LOCALHOST, 0).into(), None),
            ports: None,
            staging: 32 << 20,
            card: CardPacking::default(),
            progress_delay_us: 1000,
        }
    }
}

impl NixlOptions {
    /// The same as NIXL's own interface takes it.
    pub fn settings(&self) -> AgentSettings {
        let mut parameters = self.parameters.clone();
        if let Some(ports) = &self.ports {
            let range = format!(",TCP_PORT_RANGE={}-{}", ports.start(), ports.end());
            for (_, settings) in parameters.iter_mut().filter(|(key, _)| key == "engine_config") {
                settings.push_str(&range);
            }
        }
        AgentSettings {
            progress_delay_us: self.progress_delay_us,
            plugin: self.plugin.clone(),
            parameters,
            cards_are_host: driver::is_a_stand_in(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_ucx_reads_them() {
        for (text, size) in
            [("8k", 8192), ("4m", SEGMENT), ("4MB", SEGMENT), ("8192", 8192), ("2 gb", 2 << 30)]
        {
            assert_eq!(bytes(text), size, "{text}");
        }
        assert_eq!(["inf", "auto", ""].map(bytes), [u64::MAX; 3]);
        assert!(UCX.contains("TCP_TX_SEG_SIZE=4m") && UCX.contains("TCP_RX_SEG_SIZE=4m"));
    }

    #[test]
    fn neither_side_sends_more_than_the_other_has_room_for() {
        let of = |sent, received| Segments { sent, received };
        let usual = of(SEGMENT, SEGMENT);
        for (fine, peer) in [(usual, usual), (of(8192, SEGMENT), of(SEGMENT, 8192))] {
            assert!(fine.check(peer).is_ok(), "{fine:?} {peer:?}");
        }
        let small = of(8192, 8192);
        let said = usual.check(small).unwrap_err().to_string();
        assert!(said.contains("this process sends") && said.contains("room for 8192"), "{said}");
        let said = small.check(usual).unwrap_err().to_string();
        assert!(said.contains("the peer sends segments of up to 4194304 bytes"), "{said}");
    }

    #[test]
    fn staging_leaves_room_on_the_card() {
        let card = CardPacking::default();
        let mib = 1 << 20;
        for (free, bytes, slot) in
            [(140 << 10, 512, 64), (4 << 10, 512, 64), (2400, 256, 64), (1600, 200, 50), (64, 8, 2)]
        {
            let fitted = Some((bytes * mib, slot * mib));
            assert_eq!(card.fitted(free * mib), fitted, "{free} MiB are free");
        }
        assert_eq!(card.fitted(mib), None);
        let few = CardPacking { staging: 5 * mib, ..card };
        assert_eq!(few.fitted(u64::MAX), Some((5 * mib, 5 * mib / 4)));
        let least = CardPacking { staging: CardPacking::LEAST_STAGING, ..few };
        assert!(least.fitted(u64::MAX).is_some());
        let less = CardPacking { staging: CardPacking::LEAST_STAGING - 1, ..least };
        assert_eq!(less.fitted(u64::MAX), None);
    }
}
