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
//! slots of its own memory ([`PackingAreas`]). Each lane asks for one part, fetches it, asks for the next, and only
//! then waits until the first is in its place: so one part is gathered while another is on the wire and a
//! third is scattered. A part is in place, and its slots are free, when both kernels have ended.

use std::net::IpAddr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvferry_layout::{ByteCopy, Loops, Place, Region};

use super::options::NixlOptions;
use super::packer::{MARK, Packer, PackerAddress};
use super::peer::{Inner, NixlPeer};
use super::state::State;
use kvferry_transport::shared::Transfer;
use kvferry_transport::shared::bytes::put_block;
use kvferry_transport::shared::packing_area::PackingAreas;
use kvferry_transport::shared::random::random;
use kvferry_transport::shared::rate::RateWatch;
use kvferry_transport::shared::staging::{Full, Use, Waiting};
use kvferry_transport::tcp::{
    Arrival, Bounds, Client, Delivery, Encrypt, Fetch, Fetched, Lanes, Orphan, Room, Secret, Server,
};
use kvferry_transport::{Error, InvalidFrame};

/// Connections to each peer, so that one part is scattered while the next is fetched.
const LANES: Lanes = Lanes { count: 2, gathers: usize::MAX, encrypt: Encrypt::Never };
/// How long to wait for the peer's server: without it, reads are direct.
const PATIENCE: Duration = Duration::from_secs(2);
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
    pub(super) fn start(state: &State, options: &NixlOptions) -> Result<Option<Self>, Error> {
        let (bind, advertise) = options.control;
        let host = state.areas.of(Place::Host).and_then(|area| area.staging.region());
        let Some(Region { bytes: host, .. }) = host else { return Ok(None) };
        let secret = Secret { instance: state.instance, token: random()? };
        let (regions, generation) = (state.admission.regions.clone(), Arc::new(AtomicU64::new(0)));
        let areas = state.areas.clone();
        let bounds = Bounds::of_this_process();
        let fetched = Delivery::Fetched;
        let at = (bind, options.ports.as_ref());
        let server = Server::start(at, bounds, secret, regions, generation, areas, fetched)?;
        Ok(Some(Self { server, secret, advertise, host }))
    }

    /// How many connections its port turned away.
    pub(super) fn turned_away(&self) -> u64 {
        self.server.turned_away()
    }

    /// What peers must know, to be put behind NIXL's metadata.
    pub(super) fn describe(&self, areas: &PackingAreas) -> Result<Vec<u8>, Error> {
        let mut address = self.server.address()?;
        match self.advertise {
            Some(ip) => address.set_ip(ip),
            None if address.ip().is_unspecified() => return Ok(vec![]),
            None => {}
        }
        let mut out = self.secret.token.to_vec();
        out.extend(self.host.to_le_bytes());
        put_block(&mut out, address.to_string().as_bytes());
        if let Some((_, area)) = areas.card()
            && let Some(region) = area.staging.region()
        {
            for number in [region.bytes, area.staging.slot_bytes()] {
                out.extend(number.to_le_bytes());
            }
        }
        out.extend((out.len() as u32).to_le_bytes());
        out.extend(MARK);
        Ok(out)
    }
}

/// Gets to know the peer's server. `None` where it cannot be reached or does not pack:
/// its reads are direct then, and the log says why.
pub(super) fn meet(
    state: &Arc<State>,
    peer: &NixlPeer,
    told: &PackerAddress,
    deadline: Instant,
) -> Option<Packer> {
    let on_cards = (state.has_gpu(), peer.is_on_gpu());
    let directly = |why: &dyn std::fmt::Display| {
        tracing::info!("short runs of {peer:?} are read one by one, because {why}");
    };
    let Some(theirs) = told.pool(on_cards.1) else {
        directly(&"it does not pack the memory of its GPU");
        return None;
    };
    let ours = match on_cards.0 {
        true => state.areas.card().map(|(_, area)| area),
        false => state.areas.of(Place::Host),
    };
    let Some(ours) = ours else {
        directly(&"the memory of our own GPU is not packed");
        return None;
    };
    let fetch = Fetcher { state: Arc::downgrade(state), peer: Arc::downgrade(&peer.0) };
    let rate = RateWatch::new(peer.medium());
    let until = deadline.min(Instant::now() + PATIENCE);
    let lanes = match on_cards {
        (false, false) => LANES,
        // No more than there are slots for on both sides: who finds none only waits.
        _ => {
            let ours = ours.staging.region().map_or(0, |all| all.bytes / ours.staging.slot_bytes());
            let slots = ours.min(theirs.bytes / theirs.slot.max(1)).max(1);
            let count = state.options.card.lanes.min(usize::try_from(slots).unwrap_or(usize::MAX));
            Lanes { count, gathers: 1, ..LANES }
        }
    };
    let opened = Client::open(told.address, lanes, rate, Arrival::Fetched(Arc::new(fetch)), until);
    let client = match opened {
        Ok(client) => client,
        Err(error) => {
            let at = told.address.at;
            directly(&format!("its server for packing at {at} cannot be reached: {error}"));
            return None;
        }
    };
    let slot = ours.staging.slot_bytes().min(theirs.slot);
    Some(Packer { client, on_cards, slot, lanes: lanes.count as u64 })
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
    fn room(&self, loops: &Loops, waiting: &mut Waiting) -> Result<Option<Room>, Full> {
        // Whoever is told so reads directly, and hears that the transport is gone.
        let state = self.state.upgrade().ok_or(Full::Stalled)?;
        state.settle_orphans();
        let written = loops.nests().filter_map(|nest| nest.extents()).map(|(_, written)| written);
        let written = written.map(|written| (written.start, written.end - written.start));
        let place = match state.has_gpu() {
            true => state.admission.regions.spans().place(written),
            false => Some(Place::Host),
        };
        let place = place.ok_or(Full::Stalled)?;
        let area = state.areas.of(place).ok_or(Full::Stalled)?;
        let slot = area.staging.take_now(Use::Own, waiting)?;
        Ok(slot.map(|slot| Room { slot, areas: state.areas.clone(), place }))
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

    fn adopt(&self, orphan: Orphan) {
        match self.state.upgrade() {
            Some(state) => {
                state.orphans.lock().push(orphan);
                // It may have ended before it was on the list.
                state.settle_orphans();
            }
            // The transport is gone, and NIXL's agent with it: nothing lands any more.
            None => drop(orphan),
        }
    }
}
