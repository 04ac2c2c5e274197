//! Packed reads over NIXL: the peer gathers into memory that is registered with NIXL, NIXL moves it in one
//! piece, and this side scatters it.
//!
//! NIXL moves bytes and asks nobody; who gathers must be asked. So every transport has a small server (the
//! one of [`tcp`](kvferry_transport::tcp), which proves and checks) beside it, and tells of it in its description,
//! behind NIXL's own metadata, where older versions do not look. A slot of the peer's is kept for us until
//! we say that we have read it, and only its answer to that makes the bytes good: if the connection broke
//! meanwhile, the slot may have been used for something else, and the part is read again.
//!
//! Host memory is gathered and scattered by the CPU, that of a card by a kernel on it, between its pool and
//! slots of its own memory ([`Yards`]). Each lane asks for one part, fetches it, asks for the next, and only
//! then waits until the first is in its place: so one part is gathered while another is on the wire and a
//! third is scattered. A part is in place, and its slots are free, when both kernels have ended.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvferry_layout::{ByteCopy, CutLimits, Loops, Place, Price, Rates, Region};

use super::peer::{Inner, NixlPeer};
use super::state::State;
use kvferry_transport::shared::Transfer;
use kvferry_transport::shared::bytes::{Fields, put_block};
use kvferry_transport::shared::random::random;
use kvferry_transport::shared::rate::RateWatch;
use kvferry_transport::shared::staging::{Full, Use};
use kvferry_transport::shared::yard::Yards;
use kvferry_transport::tcp::{
    Address, Bounds, Client, Delivery, Fetch, Fetched, Forsaken, Lanes, Room, Secret, Server,
    gather,
};
use kvferry_transport::{Error, Instance, InvalidFrame};

/// Connections to each peer, so that one part is scattered while the next is fetched.
const LANES: Lanes = Lanes { count: 2, gathers: usize::MAX };
/// Of a card's memory, parts of so many bytes at least, however fast they begin.
const LEAST_PART: u64 = 4 << 20;
/// What gathering or scattering takes on a card: as it was on one H200, November 2026.
const CARD: Price = Price { launch: 15_000.0, copy: 0.1, byte: 1.0 / 1500.0 };
/// The same of CPUs, for one of the two sides: with these the better way was chosen in all 13 rows over NIXL of
/// docs/measured/lowering-2026-11-18.json.
const CPU: Price = Price { launch: 0.0, copy: 10.0, byte: 0.15 };
/// What it takes to ask the peer's server.
const ASKING: f64 = 50_000.0;
/// How long to wait for the peer's server: without it, reads are direct.
const PATIENCE: Duration = Duration::from_secs(2);
/// Marks the end of a description that tells of a server.
const MARK: &[u8; 8] = b"kvfy-pck";

/// The server of one transport.
#[derive(Debug)]
pub(super) struct Control {
    server: Server,
    secret: Secret,
    advertise: Option<IpAddr>,
    /// Bytes of the host's memory to pack into.
    host: u64,
}

impl Control {
    /// Starts it. `None` where there is no memory to pack into.
    pub(super) fn start(
        state: &State,
        bind: SocketAddr,
        advertise: Option<IpAddr>,
    ) -> Result<Option<Self>, Error> {
        let host = state.yards.of(Place::Host).and_then(|yard| yard.staging.region());
        let Some(Region { bytes: host, .. }) = host else { return Ok(None) };
        let secret = Secret { instance: state.instance, token: random()? };
        let (regions, generation) = (state.desk.regions.clone(), Arc::new(AtomicU64::new(0)));
        let yards = state.yards.clone();
        let bounds = Bounds::of_this_process();
        let fetched = Delivery::Fetched;
        let server = Server::start(bind, bounds, secret, regions, generation, yards, fetched)?;
        Ok(Some(Self { server, secret, advertise, host }))
    }

    /// How many connections its port turned away.
    pub(super) fn turned_away(&self) -> u64 {
        self.server.turned_away()
    }

    /// What peers must know, to be put behind NIXL's metadata.
    pub(super) fn describe(&self, yards: &Yards) -> Result<Vec<u8>, Error> {
        let mut address = self.server.address()?;
        match self.advertise {
            Some(ip) => address.set_ip(ip),
            None if address.ip().is_unspecified() => return Ok(vec![]),
            None => {}
        }
        let mut out = self.secret.token.to_vec();
        out.extend(self.host.to_le_bytes());
        put_block(&mut out, address.to_string().as_bytes());
        if let Some((_, yard)) = yards.card()
            && let Some(region) = yard.staging.region()
        {
            for number in [region.bytes, yard.staging.slot_bytes()] {
                out.extend(number.to_le_bytes());
            }
        }
        out.extend((out.len() as u32).to_le_bytes());
        out.extend(MARK);
        Ok(out)
    }
}

/// What a description tells of a peer's server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told {
    address: Address,
    host: Pool,
    /// Of the card that packs.
    card: Option<Pool>,
}

/// A peer's memory to pack into.
#[derive(Clone, Copy, Debug)]
struct Pool {
    bytes: u64,
    /// Of a slot.
    slot: u64,
}

impl Told {
    /// Where the server is.
    pub(super) fn endpoint(&self) -> SocketAddr {
        self.address.at
    }

    fn pool(&self, on_card: bool) -> Option<Pool> {
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
            let told = Self { address: Address { secret, at, packs: true }, host, card };
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
    /// Gets to know the peer's server, and measures. `None` where it cannot be reached or does not pack:
    /// its reads are direct then, and the log says why.
    pub(super) fn meet(
        state: &Arc<State>,
        peer: &NixlPeer,
        told: &Told,
        deadline: Instant,
    ) -> Option<Self> {
        let on_cards = (state.has_gpu(), peer.is_on_gpu());
        let directly = |why: &dyn std::fmt::Display| {
            tracing::info!("short runs of {peer:?} are read one by one, because {why}");
        };
        let Some(theirs) = told.pool(on_cards.1) else {
            directly(&"it does not pack the memory of its GPU");
            return None;
        };
        let ours = match on_cards.0 {
            true => state.yards.card().map(|(_, yard)| yard),
            false => state.yards.of(Place::Host),
        };
        let Some(ours) = ours else {
            directly(&"the memory of our own GPU is not packed");
            return None;
        };
        let fetch = Fetcher { state: Arc::downgrade(state), peer: Arc::downgrade(&peer.0) };
        let rate = RateWatch::new(peer.0.rate.medium());
        let until = deadline.min(Instant::now() + PATIENCE);
        let lanes = match on_cards {
            (false, false) => LANES,
            // No more than there are slots for on both sides: who finds none only waits.
            _ => {
                let ours =
                    ours.staging.region().map_or(0, |all| all.bytes / ours.staging.slot_bytes());
                let slots = ours.min(theirs.bytes / theirs.slot.max(1)).max(1);
                let count =
                    state.options.card.lanes.min(usize::try_from(slots).unwrap_or(usize::MAX));
                Lanes { count, gathers: 1 }
            }
        };
        let opened = Client::open(told.address, lanes, rate, Some(Arc::new(fetch)), until);
        let client = match opened {
            Ok(client) => client,
            Err(error) => {
                let at = told.address.at;
                directly(&format!("its server for packing at {at} cannot be reached: {error}"));
                return None;
            }
        };
        let slot = ours.staging.slot_bytes().min(theirs.slot);
        let lanes = lanes.count as u64;
        let direct = peer.price(on_cards.0);
        let packed = packed_price(&direct, on_cards, slot * lanes);
        let rates = Rates { direct, packed: Some(packed) };
        Some(Self { client, rates, on_cards, slot, lanes })
    }

    /// How large the parts of loops may be that write these spans. `None` where they cannot be packed: they
    /// are in places that the peer was not met for.
    pub(super) fn limits(
        &self,
        state: &State,
        peer: &NixlPeer,
        loops: &Loops,
        written: &[(u64, u64)],
    ) -> Option<CutLimits> {
        if self.on_cards == (false, false) {
            return Some(gather::LIMITS);
        }
        let read = loops.nests().filter_map(|nest| nest.extents()).map(|(read, _)| read);
        let theirs = peer.spans().place(read.map(|read| (read.start, read.end - read.start)))?;
        let ours = state.desk.regions.spans().place(written.iter().copied())?;
        state.yards.of(ours)?;
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

/// Fetches by NIXL what a peer has gathered.
struct Fetcher {
    /// The transport has the peers, and a peer has this: it must keep neither alive.
    state: Weak<State>,
    peer: Weak<Inner>,
}

impl Fetcher {
    fn read(&self, state: &State, copies: &[ByteCopy], until: Instant) -> Result<Transfer, Error> {
        let peer = NixlPeer(self.peer.upgrade().ok_or(Error::Disconnected)?);
        state.read_uncounted(&peer, copies, until)
    }
}

impl std::fmt::Debug for Fetcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Fetcher").field(&self.peer.upgrade().map(NixlPeer)).finish()
    }
}

impl Fetch for Fetcher {
    fn room(
        &self,
        loops: &Loops,
        patience: Duration,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Room, Full> {
        // Whoever is told so reads directly, and hears that the transport is gone.
        let state = self.state.upgrade().ok_or(Full::Stalled)?;
        state.settle_forsaken();
        let written = loops.nests().filter_map(|nest| nest.extents()).map(|(_, written)| written);
        let written = written.map(|written| (written.start, written.end - written.start));
        let place = match state.has_gpu() {
            true => state.desk.regions.spans().place(written),
            false => Some(Place::Host),
        };
        let place = place.ok_or(Full::Stalled)?;
        let staging = state.yards.of(place).ok_or(Full::Stalled)?.staging.clone();
        let yards = state.yards.clone();
        // It may take long: the transport must not be kept for that.
        drop(state);
        let slot = staging.take_while(Use::Own, patience, is_wanted)?;
        Ok(Room { slot, yards, place })
    }

    fn begin(
        &self,
        room: Room,
        loops: &Loops,
        address: u64,
        deadline: Instant,
    ) -> Result<Fetched, Error> {
        let state = self.state.upgrade().ok_or(Error::Disconnected)?;
        let bytes = loops.packed_bytes().unwrap_or(u64::MAX);
        if bytes > room.slot.bytes() {
            return Err(Error::PeerMisbehaved(InvalidFrame::Length(bytes)));
        }
        let copy = ByteCopy { source: address, destination: room.slot.address(), bytes };
        let operation = self.read(&state, &[copy], deadline)?;
        Ok(Fetched { operation, room })
    }

    fn direct(&self, copies: &[ByteCopy], deadline: Instant) -> Result<Transfer, Error> {
        let state = self.state.upgrade().ok_or(Error::Disconnected)?;
        self.read(&state, copies, deadline)
    }

    fn forsake(&self, forsaken: Forsaken) {
        match self.state.upgrade() {
            Some(state) => {
                state.forsaken.lock().push(forsaken);
                // It may have ended before it was on the list.
                state.settle_forsaken();
            }
            // The transport is gone, and NIXL's agent with it: nothing lands any more.
            None => drop(forsaken),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let (metadata, read) = Told::split(&without, instance);
        assert_eq!(metadata, b"metadata");
        let read = read.expect("it tells of a server");
        assert!(read.pool(true).is_none() && read.pool(false).is_some_and(|p| p.bytes == 1 << 20));
        told.extend([256_u64, 32].iter().flat_map(|number| number.to_le_bytes()));
        let with = framed(&told);
        let card = Told::split(&with, instance).1.and_then(|told| told.card);
        assert!(card.is_some_and(|card| (card.bytes, card.slot) == (256, 32)));
        // Half of a number is nothing.
        told.pop();
        assert!(Told::split(&framed(&told), instance).1.is_none());
    }
}
