//! A peer that packs: what its description tells of its server, and what it takes.

use std::net::SocketAddr;
use std::sync::Arc;

use kvferry_layout::{CutLimits, Loops, Place, Price, Rates};

use kvferry_transport::Instance;
use kvferry_transport::shared::bytes::Fields;
use kvferry_transport::shared::packing_area::PackingAreas;
use kvferry_transport::shared::spans::Spans;
use kvferry_transport::tcp::{Address, Client, Secret, gather};

/// Of a card's memory, parts of so many bytes at least, however fast they begin.
const LEAST_PART: u64 = 4 << 20;
/// What gathering or scattering takes on a card: as it was on one H200, November 2026.
const CARD: Price = Price { launch: 15_000.0, copy: 0.1, byte: 1.0 / 1500.0 };
/// The same of CPUs, for one of the two sides: with these the better way was chosen in all 13 rows over NIXL of
/// docs/measured/lowering-2026-11-18.json.
const CPU: Price = Price { launch: 0.0, copy: 10.0, byte: 0.15 };
/// What it takes to ask the peer's server.
const ASKING: f64 = 50_000.0;
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
    pub(super) rates: Rates,
    /// Whether our memory, and the peer's, is on a card.
    pub(super) on_cards: (bool, bool),
    /// Bytes of the shorter slot, ours or the peer's.
    slot: u64,
    lanes: u64,
}

impl Packer {
    /// `direct` is what reads take that are not packed.
    pub(super) fn new(
        client: Arc<Client>,
        direct: Price,
        on_cards: (bool, bool),
        slot: u64,
        lanes: u64,
    ) -> Self {
        let packed = packed_price(&direct, on_cards, slot * lanes);
        Self { client, rates: Rates { direct, packed: Some(packed) }, on_cards, slot, lanes }
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
        let bytes = part(loops.bytes(), self.lanes, &self.rates.direct, most);
        Some(CutLimits { bytes, ..gather::LIMITS })
    }
}

/// Bytes of a part of so many: one part for each lane, but none that takes longer to begin than to move, and
/// all of them about as long.
fn part(bytes: u64, lanes: u64, direct: &Price, most: u64) -> u64 {
    let worth = (direct.launch / direct.byte) as u64;
    let asked = bytes.div_ceil(lanes.max(1)).max(worth).clamp(LEAST_PART.min(most), most);
    bytes.div_ceil(bytes.div_ceil(asked).max(1)).max(1)
}

/// What packing takes, by what direct reads take. `at_once` bytes are on their way at a time.
fn packed_price(direct: &Price, on_cards: (bool, bool), at_once: u64) -> Price {
    let [from, to] = [on_cards.1, on_cards.0].map(|on_card| if on_card { CARD } else { CPU });
    let launch = ASKING + direct.launch + from.launch + to.launch;
    // Every part is asked for and fetched, a few of them at a time.
    let at_once = match on_cards {
        (false, false) => 4 * gather::LIMITS.bytes,
        _ => at_once,
    };
    let part = launch / at_once as f64;
    Price { launch, copy: from.copy + to.copy, byte: direct.byte + from.byte + to.byte + part }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_transport::shared::bytes::put_block;

    const MIB: u64 = 1 << 20;

    /// On one H200: short runs are packed, for a hundredth of the time, and long ones are not.
    #[test]
    fn cards_pack_short_runs_and_read_long_ones() {
        let direct = Price { launch: 100_000.0, copy: 7_000.0, byte: 0.0006 };
        let packed = packed_price(&direct, (true, true), 128 << 20);
        let (llama, bytes) = (40_960, 336 << 20);
        assert!(packed.of(llama, bytes) * 100.0 < direct.of(llama, bytes), "{packed:?}");
        assert!(packed.of(80, 671 << 20) > direct.of(80, 671 << 20), "{packed:?}");
        // CPUs move a byte and a run more slowly than a card.
        let mixed = packed_price(&direct, (true, false), 128 << 20);
        assert!(mixed.byte > packed.byte && mixed.copy > packed.copy, "{mixed:?}");
    }

    #[test]
    fn parts_are_worth_a_transfer() {
        let (mib, most) = (MIB, 64 << 20);
        // Within a card, a transfer begins in the time that it takes to move 166 MB.
        let card = Price { launch: 100_000.0, copy: 7_000.0, byte: 0.0006 };
        // Over a network of 50 GB/s, 2 MB.
        let network = Price { byte: 0.02, launch: 40_000.0, ..card };
        for (bytes, on_card, over_network) in [
            (mib, mib, mib),
            (44 * mib, 44 * mib, 11 * mib),
            (320 * mib, 64 * mib, 64 * mib),
            (330 * mib, 55 * mib, 55 * mib),
        ] {
            assert_eq!(part(bytes, 4, &card, most), on_card, "{bytes}");
            assert_eq!(part(bytes, 4, &network, most), over_network, "{bytes}");
        }
        // However small slots are.
        assert_eq!(part(100, 4, &card, 10), 10);
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
