//! A peer that packs: what its description tells of its server, and what is packed.

use std::net::SocketAddr;
use std::sync::Arc;

use kvferry_layout::{CutLimits, Loops, Place};

use kvferry_transport::Instance;
use kvferry_transport::shared::bytes::Fields;
use kvferry_transport::shared::packing_area::PackingAreas;
use kvferry_transport::shared::rate::Medium;
use kvferry_transport::shared::spans::Spans;
use kvferry_transport::tcp::{Address, Client, Secret, gather};

/// Of a card's memory, parts of so many bytes at least, however fast they begin.
const LEAST_PART: u64 = 4 << 20;
/// Runs of fewer bytes are packed, between memory of the hosts. Over UCX's way through the kernel a run takes 1.5 µs by
/// itself, as in `docs/measured/lowering-2026-11-1*.json`: those of 512 bytes and less were packed in a fifth of the
/// time or less, and of those of 7,859 and more none. Over an RDMA card, NVIDIA's users report 350 ns (vllm#55434).
pub const PACKS_BELOW: u64 = 4 << 10;
const PACKS_BELOW_RDMA: u64 = 1 << 10;
/// The same where the memory of both sides is on cards, and of one side. A run takes 7 µs by itself there, whatever
/// carries it; on one H200 40,960 of 8 KiB took 317 ms, where 80 of 8 MiB took 1.1. CPUs gather 7 GB in a second.
const PACKS_BELOW_ON_CARDS: u64 = 1 << 20;
const PACKS_BELOW_ON_ONE: u64 = 32 << 10;
/// Marks the end of a description that tells of a server.
pub(super) const MARK: &[u8; 8] = b"kvfy-pck";

/// What a description tells of a peer's server.
#[derive(Clone, Copy, Debug)]
pub(super) struct PackerAddress {
    pub(super) address: Address,
    host: Pool,
    /// Of the card that packs.
    card: Option<Pool>,
}

/// A peer's memory to pack into.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pool {
    pub(super) bytes: u64,
    /// Of a slot.
    pub(super) slot: u64,
}

impl PackerAddress {
    /// Where the server is.
    pub(super) fn endpoint(&self) -> SocketAddr {
        self.address.at
    }

    pub(super) fn pool(&self, on_card: bool) -> Option<Pool> {
        if on_card { self.card } else { Some(self.host) }
    }

    /// Splits what [`Control::describe`] wrote from NIXL's metadata; all of it is NIXL's where there is
    /// nothing of the kind.
    pub(super) fn split(metadata: &[u8], instance: Instance) -> (&[u8], Option<Self>) {
        let split = || {
            let rest = metadata.strip_suffix(MARK)?;
            let (rest, length) = rest.split_last_chunk::<4>()?;
            let at = rest.len().checked_sub(u32::from_le_bytes(*length) as usize)?;
            let (nixl, told) = rest.split_at(at);
            let mut fields = Fields(told);
            let secret = Secret { instance, token: fields.array()? };
            let host = Pool { bytes: fields.u64()?, slot: gather::SLOT_BYTES };
            let at = std::str::from_utf8(fields.block()?).ok()?.parse().ok()?;
            let card = match fields.0.is_empty() {
                true => None,
                false => Some(Pool { bytes: fields.u64()?, slot: fields.u64()? }),
            };
            let told = Self { address: Address { secret, at, packs: None }, host, card };
            fields.0.is_empty().then_some((nixl, told))
        };
        match split() {
            Some((nixl, told)) => (nixl, Some(told)),
            None => (metadata, None),
        }
    }
}

/// A peer that packs.
#[derive(Debug)]
pub(super) struct Packer {
    pub(super) client: Arc<Client>,
    /// Whether our memory, and the peer's, is on a card.
    pub(super) on_cards: (bool, bool),
    /// Bytes of the shorter slot, ours or the peer's.
    pub(super) slot: u64,
    pub(super) lanes: u64,
}

impl Packer {
    /// Runs of fewer bytes are packed.
    pub(super) fn packs_below(&self, medium: Medium) -> u64 {
        match (self.on_cards, medium) {
            ((true, true), _) => PACKS_BELOW_ON_CARDS,
            ((false, false), Medium::Nixl(Some(_))) => PACKS_BELOW_RDMA,
            ((false, false), _) => PACKS_BELOW,
            _ => PACKS_BELOW_ON_ONE,
        }
    }

    /// How large the parts of loops may be that write these spans. `None` where they cannot be packed: they
    /// are in places that the peer was not met for.
    pub(super) fn limits(
        &self,
        (ours, theirs): (&Spans, &Spans),
        areas: &PackingAreas,
        loops: &Loops,
        written: &[(u64, u64)],
    ) -> Option<CutLimits> {
        if self.on_cards == (false, false) {
            return Some(gather::LIMITS);
        }
        let read = loops.nests().filter_map(|nest| nest.extents()).map(|(read, _)| read);
        let theirs = theirs.place(read.map(|read| (read.start, read.end - read.start)))?;
        let ours = ours.place(written.iter().copied())?;
        areas.of(ours)?;
        if self.on_cards != (ours != Place::Host, theirs != Place::Host) {
            return None;
        }
        // Nests start at multiples of 16.
        let spare = gather::SLOT_BYTES - gather::LIMITS.bytes;
        let most = self.slot.saturating_sub(spare).max(1);
        let bytes = part(loops.bytes(), self.lanes, self.on_cards.0, most);
        Some(CutLimits { bytes, ..gather::LIMITS })
    }
}

/// Bytes of a part of so many, all of them about as long: one part for each lane, or to a card as few as can be, because
/// a transfer to it begins in the time that it takes to move 166 MB.
fn part(bytes: u64, lanes: u64, to_card: bool, most: u64) -> u64 {
    let least = if to_card { most } else { LEAST_PART.min(most) };
    let asked = bytes.div_ceil(lanes.max(1)).clamp(least, most);
    bytes.div_ceil(bytes.div_ceil(asked).max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_transport::shared::bytes::put_block;

    const MIB: u64 = 1 << 20;

    #[test]
    fn parts_are_worth_a_transfer() {
        let (mib, most) = (MIB, 64 << 20);
        for (bytes, to_card, to_host) in [
            (mib, mib, mib),
            (44 * mib, 44 * mib, 11 * mib),
            (320 * mib, 64 * mib, 64 * mib),
            (330 * mib, 55 * mib, 55 * mib),
        ] {
            assert_eq!(part(bytes, 4, true, most), to_card, "{bytes}");
            assert_eq!(part(bytes, 4, false, most), to_host, "{bytes}");
        }
        // However small slots are.
        assert_eq!(part(100, 4, true, 10), 10);
    }

    #[test]
    fn what_is_told_is_read() {
        let instance = Instance([3; 16]);
        let mut told = vec![7; 32];
        told.extend((1_u64 << 20).to_le_bytes());
        put_block(&mut told, b"127.0.0.1:5000");
        let framed = |told: &[u8]| {
            let length = (told.len() as u32).to_le_bytes();
            [b"metadata", told, &length, MARK].concat()
        };
        let without = framed(&told);
        let (metadata, read) = PackerAddress::split(&without, instance);
        assert_eq!(metadata, b"metadata");
        let read = read.expect("it tells of a server");
        assert!(read.pool(true).is_none() && read.pool(false).is_some_and(|p| p.bytes == 1 << 20));
        told.extend([256_u64, 32].iter().flat_map(|number| number.to_le_bytes()));
        let with = framed(&told);
        let card = PackerAddress::split(&with, instance).1.and_then(|told| told.card);
        assert!(card.is_some_and(|card| (card.bytes, card.slot) == (256, 32)));
        // Half of a number is nothing.
        told.pop();
        assert!(PackerAddress::split(&framed(&told), instance).1.is_none());
    }
}
