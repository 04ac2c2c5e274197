//! Between hosts, with nothing installed.
//!
//! Every transport runs a server for its registered memory and connects to its peers' servers over
//! a few connections each. Bytes go between the socket and the registered memory by vectored calls,
//! without a buffer between; a request carries up to 1,024 copies. The server checks every address
//! against its regions, and holds the regions it is serving.
//!
//! Packed reads carry loops instead of copies: the server gathers the runs into a slot of a bounded pool
//! and sends it, the client scatters what it receives; while one part is scattered, the next is sent and
//! the one after it gathered. A server with no slot left says so, and that part is read by its copies.
//! Its description says whether it packs at all.
//!
//! The memory of a card goes the same way, and no other: the card gathers into slots, of which the host has a copy in
//! pinned memory, and scatters from them, while the connections send and receive what is in others. A transport's regions are all of the
//! host or all of one card.
//!
//! The description carries a token of 256 random bits. Both ends of a connection prove that they know
//! it, without sending it and anew each time: who was not given the description is neither served nor
//! believed, even if they listened in before. Until then they have one of a bounded number of places, one deadline
//! for all that they say, and no thread (`door`).
//!
//! From then on what is asked and answered is encrypted, and so are the bytes that are moved where [`Encrypt`] says so
//! (`seal`). All of it rests on the token: who hands out a description keeps it from whoever listens.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::Instant;

use kvferry_digest::{Digest, Program};
use kvferry_layout::{CutLimits, Loops, Place, Region};
use parking_lot::Mutex;

use crate::contract::{Error, Instance, RegionId, StagingStatistics, Statistics, Transport};
use crate::shared::Transfer;
use crate::shared::admission::{Admission, Whole};
use crate::shared::bytes::{Fields, put_block};
use crate::shared::chunks::Chunked;
use crate::shared::custody::Interrupt;
use crate::shared::digests;
use crate::shared::packing_area::{Cards, PackingAreas};
use crate::shared::random::random;
use crate::shared::rate::{Medium, RateWatch};
use crate::shared::spans::Spans;
use crate::shared::staging::Staging;

mod bounds;
mod channel;
mod client;
mod connections;
mod door;
pub(crate) mod frame;
#[doc(hidden)]
pub mod gather;
pub(crate) mod greeting;
mod proof;
pub(crate) mod seal;
mod server;
mod socket;
#[cfg(test)]
mod tests;

#[doc(hidden)]
pub use bounds::Bounds;
pub(crate) use client::PeerRegions;
#[doc(hidden)]
pub use client::{Address, Arrival, Client, Fetch, Fetched, Lanes, Orphan, Packs, Room, Rooms};
#[doc(hidden)]
pub use connections::{Delivery, Generation};
#[doc(hidden)]
pub use proof::Secret;
pub use seal::Encrypt;
#[doc(hidden)]
pub use server::Server;
pub(crate) use socket::entry;

/// How a [`Tcp`] transport is set up.
#[derive(Clone, Debug)]
pub struct TcpOptions {
    /// Where to listen. Port 0 means any free one.
    pub bind: SocketAddr,
    /// Of which ports that is one.
    pub ports: Option<RangeInclusive<u16>>,
    /// The address to give to peers, where it is not the one to listen on: needed when `bind` is
    /// unspecified (`0.0.0.0`, `::`).
    pub advertise: Option<IpAddr>,
    /// Connections to each peer.
    pub connections: usize,
    /// Bytes of memory to pack into for peers, at most. Without any, peers read every run by itself.
    pub staging: u64,
    /// Whether the bytes that are moved are encrypted.
    pub encrypt: Encrypt,
    /// What opens cards, where their memory is to be moved.
    pub cards: Option<Arc<dyn Cards>>,
    /// What moves the memory of a card takes.
    pub card: CardSlots,
}

/// Memory of a card, and as much pinned memory of the host, that its bytes go through.
#[derive(Clone, Copy, Debug)]
pub struct CardSlots {
    /// Bytes of each.
    pub bytes: u64,
    /// Bytes of a slot: long enough to hide what a launch takes, short enough to be spread over the connections.
    pub slot: u64,
    /// Connections to each peer: a copy through a socket keeps a core busy, and is slower than the card by far.
    pub connections: usize,
}

impl CardSlots {
    /// The same with no more than so many bytes, in shorter slots if need be.
    #[must_use]
    pub fn within(self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        let slot = (bytes / MANY_SLOTS).clamp(gather::SLOT_BYTES, self.slot);
        Self { bytes, slot, ..self }
    }
}

/// As many slots keep eight connections busy in one direction, and the card beside them.
const MANY_SLOTS: u64 = 32;

impl Default for TcpOptions {
    fn default() -> Self {
        // One connection keeps a core busy on each side.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            bind: (Ipv4Addr::LOCALHOST, 0).into(),
            ports: None,
            advertise: None,
            connections: (cores / 2).clamp(1, 4),
            staging: 32 << 20,
            encrypt: Encrypt::default(),
            cards: None,
            // On an H200 slots of 4 MiB carried most, of 1 and 2 MiB less, and of 8 MiB no more.
            card: CardSlots {
                bytes: 128 << 20,
                slot: 4 << 20,
                connections: (cores / 2).clamp(1, 8),
            },
        }
    }
}

/// The `tcp` back end.
#[derive(Debug)]
pub struct Tcp {
    secret: Secret,
    options: TcpOptions,
    admission: Admission,
    peers: Mutex<Vec<Arc<Client>>>,
    areas: Arc<PackingAreas>,
    server: Server,
}

/// A peer of a [`Tcp`] transport.
#[derive(Clone, Debug)]
pub struct TcpPeer(pub(crate) Arc<Client>);

impl TcpPeer {
    /// Who it is.
    pub fn instance(&self) -> Instance {
        self.0.instance()
    }
}

const DESCRIPTION: &[u8; 8] = b"kvfy-tcp";
/// Who packs host memory does so into these.
const HOST_SLOTS: Option<Packs> = Some(Packs { slot: gather::SLOT_BYTES, on_card: false });

/// A run of the host's memory takes some 600 ns by itself; packed, 20, and each of its bytes is moved twice more. In
/// `docs/measured/lowering-2026-11-1*.json` runs of 512 bytes and less were packed in 0.21 to 0.88 of the time, and of
/// those of 7,859 and more none in less than 0.93.
pub const PACKS_BELOW: u64 = 2 << 10;
/// Parts of a card's memory have so many bytes at least, however many connections there are.
const LEAST_PART: u64 = 128 << 10;

impl Tcp {
    /// Starts to listen. Nothing can be read before something is registered.
    pub fn new(options: TcpOptions) -> Result<Self, Error> {
        let generation = Arc::new(AtomicU64::new(0));
        Self::with(options, Bounds::of_this_process(), generation)
    }

    /// With a count of the regions' changes that somebody else keeps.
    pub(crate) fn with(
        options: TcpOptions,
        bounds: Bounds,
        generation: Arc<dyn Generation>,
    ) -> Result<Self, Error> {
        let secret = Secret { instance: Instance(random()?), token: random()? };
        let admission = Admission::new()?;
        let areas = PackingAreas::new(Staging::new(options.staging, gather::SLOT_BYTES)?);
        let regions = admission.regions.clone();
        let server = Server::start(
            (options.bind, options.ports.as_ref()),
            bounds,
            secret,
            regions,
            generation,
            areas.clone(),
            Delivery::Sent(options.encrypt),
        )?;
        Ok(Self { secret, options, admission, peers: Mutex::default(), areas, server })
    }

    /// Who this is.
    pub fn instance(&self) -> Instance {
        self.secret.instance
    }

    pub(crate) fn admission(&self) -> &Admission {
        &self.admission
    }

    pub(crate) fn cut_all(&self) {
        self.server.cut_all();
    }

    /// The packing area of a card, made when its first region is registered.
    fn open_card(&self, gpu: u32) -> Result<(), Error> {
        let cards = self.options.cards.as_deref().ok_or_else(|| {
            Error::Unsupported(format!(
                "this tcp transport was made for host memory, and GPU {gpu} has that of a region: name what opens cards"
            ))
        })?;
        if let Some((known, _)) = self.areas.card() {
            return match known == gpu {
                true => Ok(()),
                false => Err(Error::Unsupported(format!(
                    "a tcp transport moves the memory of one GPU: it has regions of GPU {known} and is given one of GPU {gpu}"
                ))),
            };
        }
        let CardSlots { bytes, slot, .. } = self.options.card;
        let area = cards.open(gpu, bytes, slot)?;
        self.areas.open(|| Some((gpu, area)));
        Ok(())
    }

    /// In which parts bytes are moved between us and a peer, where a card has the memory of either: there is no other
    /// way then. `None` where both have host memory.
    fn card_limits(&self, client: &Client, bytes: u64) -> Result<Option<CutLimits>, Error> {
        let ours = self.areas.card().map(|(_, area)| area.staging.slot_bytes());
        let theirs = client.packs();
        if ours.is_none() && theirs.is_none_or(|theirs| !theirs.on_card) {
            return Ok(None);
        }
        let theirs = theirs.ok_or_else(|| {
            let why = "the peer packs nothing, and bytes for a GPU come packed: give it memory to pack into";
            Error::Unsupported(why.to_owned())
        })?;
        // Nests start at multiples of 16.
        let spare = gather::SLOT_BYTES - gather::LIMITS.bytes;
        let most = ours.unwrap_or(u64::MAX).min(theirs.slot).saturating_sub(spare).max(1);
        let part = bytes.div_ceil(self.options.card.connections.max(1) as u64);
        Ok(Some(CutLimits { bytes: part.clamp(LEAST_PART.min(most), most), ..gather::LIMITS }))
    }

    fn post_packed(
        &self,
        client: &Arc<Client>,
        loops: &Loops,
        limits: CutLimits,
        deadline: Instant,
    ) -> Result<Transfer, Error> {
        let (whole, written) = Whole::of(loops)?;
        let interrupt: Weak<dyn Interrupt> = Arc::downgrade(client) as _;
        let custody =
            self.admission.open_whole(&whole, &written, deadline, Some(interrupt), &client.rate)?;
        if !custody.is_empty() {
            client.post(Chunked::packed(custody.clone(), loops.clone(), limits));
        }
        Ok(Transfer::posted(custody))
    }

    pub(crate) fn turned_away(&self) -> u64 {
        self.server.turned_away()
    }
}

impl Transport for Tcp {
    type Peer = TcpPeer;
    type Operation = Transfer;

    fn name(&self) -> &'static str {
        "tcp"
    }

    unsafe fn register(&self, region: Region) -> Result<RegionId, Error> {
        // Peers are told one kind of memory, and bytes go one way.
        let elsewhere =
            |other: &Region| (other.place == Place::Host) != (region.place == Place::Host);
        if let Some(other) = self.admission.regions.spans().0.into_iter().find(elsewhere) {
            return Err(Error::Unsupported(format!(
                "a tcp transport moves memory of the host or of a GPU: it has a region of {:?} and is given one of {:?}",
                other.place, region.place
            )));
        }
        if let Place::Gpu(gpu) = region.place {
            self.open_card(gpu)?;
        }
        self.admission.regions.insert(region)
    }

    fn deregister(&self, region: RegionId, deadline: Instant) -> Result<(), Error> {
        self.admission.regions.remove(region, deadline, || (), || self.server.cut_all()).map(|_| ())
    }

    fn describe(&self) -> Result<Vec<u8>, Error> {
        let mut address = self.server.address()?;
        if let Some(ip) = self.options.advertise {
            address.set_ip(ip);
        } else if address.ip().is_unspecified() {
            return Err(Error::Unsupported(format!(
                "peers cannot connect to {address}: say which address to advertise"
            )));
        }
        let mut out = DESCRIPTION.to_vec();
        out.extend(self.secret.instance.0);
        out.extend(self.secret.token);
        put_block(&mut out, address.to_string().as_bytes());
        let packs = match self.areas.card() {
            Some((_, area)) => Some(Packs { slot: area.staging.slot_bytes(), on_card: true }),
            None => HOST_SLOTS.filter(|_| self.options.staging > 0),
        };
        let (slot, on_card) = packs.map_or((0, false), |packs| (packs.slot, packs.on_card));
        out.extend(slot.to_le_bytes());
        out.push(u8::from(on_card));
        Ok(out)
    }

    fn connect(&self, description: &[u8], deadline: Instant) -> Result<TcpPeer, Error> {
        let address = parse(description)?;
        let known = |peers: &[Arc<Client>]| {
            peers.iter().find(|client| client.instance() == address.secret.instance).cloned()
        };
        if let Some(client) = known(&self.peers.lock()) {
            client.repack(address.packs);
            return Ok(TcpPeer(client));
        }
        let medium = if address.at.ip().is_loopback() {
            Medium::Memory
        } else {
            Medium::Network(Medium::fastest_card())
        };
        let on_card = address.packs.is_some_and(|packs| packs.on_card);
        let lanes = match on_card || self.areas.card().is_some() {
            true => self.options.card.connections,
            false => self.options.connections,
        };
        let client = Client::open(
            address,
            Lanes { count: lanes, gathers: usize::MAX, encrypt: self.options.encrypt },
            RateWatch::new(medium),
            Arrival::Sent(Rooms::new(self.areas.clone())),
            deadline,
        )?;
        self.peers.lock().push(client.clone());
        Ok(TcpPeer(client))
    }

    fn endpoints(&self, description: &[u8]) -> Vec<SocketAddr> {
        parse(description).map(|address| address.at).into_iter().collect()
    }

    fn disconnect(&self, peer: &TcpPeer) {
        self.peers.lock().retain(|client| !Arc::ptr_eq(client, &peer.0));
        peer.0.close();
    }

    fn is_encrypted(&self, peer: &TcpPeer) -> bool {
        peer.0.encrypts()
    }

    fn read(&self, peer: &TcpPeer, loops: &Loops, deadline: Instant) -> Result<Transfer, Error> {
        let client = &peer.0;
        if let Some(limits) = self.card_limits(client, loops.bytes())? {
            return self.post_packed(client, loops, limits, deadline);
        }
        let interrupt: Weak<dyn Interrupt> = Arc::downgrade(client) as _;
        // The peer checks its own side.
        let theirs = Spans::everything();
        let opened =
            self.admission.open(loops, &theirs, deadline, Some(interrupt), &client.rate)?;
        if !opened.custody.is_empty() {
            client.post(Chunked::new(opened.custody.clone(), opened.copies));
        }
        Ok(Transfer::posted(opened.custody))
    }

    fn digest(&self, program: &Program, deadline: Instant) -> Result<Vec<Digest>, Error> {
        let cards = self.options.cards.as_deref().map(Cards::digests);
        digests::digest(&self.admission, cards, program, deadline)
    }

    fn packs_below(&self, peer: &TcpPeer) -> u64 {
        match (self.card_limits(&peer.0, 0), peer.0.packs()) {
            // What is sealed is copied for it, packed or not; and of cards, one way is both.
            (Ok(None), Some(_)) if !peer.0.encrypts() => PACKS_BELOW,
            (Ok(_), Some(_)) => u64::MAX,
            _ => 0,
        }
    }

    fn read_packed(
        &self,
        peer: &TcpPeer,
        loops: &Loops,
        deadline: Instant,
    ) -> Result<Transfer, Error> {
        let client = &peer.0;
        match (self.card_limits(client, loops.bytes())?, client.packs()) {
            (Some(limits), _) => self.post_packed(client, loops, limits, deadline),
            (None, Some(_)) => self.post_packed(client, loops, gather::LIMITS, deadline),
            (None, None) => self.read(peer, loops, deadline),
        }
    }

    fn staging(&self) -> StagingStatistics {
        self.areas.statistics()
    }

    fn statistics(&self) -> Statistics {
        Statistics { turned_away: self.turned_away(), ..self.admission.statistics() }
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        let peers = std::mem::take(&mut *self.peers.lock());
        for client in peers {
            client.close();
        }
    }
}

fn parse(description: &[u8]) -> Result<Address, Error> {
    let mut fields = Fields(description);
    let mut parse = || {
        if &fields.array::<8>()? != DESCRIPTION {
            return None;
        }
        let instance = Instance(fields.array()?);
        let token = fields.array()?;
        let at = std::str::from_utf8(fields.block()?).ok()?.parse().ok()?;
        let packs = match (fields.u64()?, fields.array()?) {
            (0, [0]) => None,
            (slot, [0]) => HOST_SLOTS.filter(|packs| packs.slot == slot).map(Some)?,
            (slot @ gather::SLOT_BYTES..=gather::MOST_PACKED, [1]) => {
                Some(Packs { slot, on_card: true })
            }
            _ => return None,
        };
        fields.0.is_empty().then_some(Address { secret: Secret { instance, token }, at, packs })
    };
    parse().ok_or_else(|| Error::BadDescription("it is not one of the tcp transport".to_owned()))
}
