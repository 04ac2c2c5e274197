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
//! The description carries a token of 256 random bits. Both ends of a connection prove that they know
//! it, without sending it and anew each time: who was not given the description is neither served nor
//! believed, even if they listened in before. Until then they have one of a bounded number of places, one deadline
//! for all that they say, and no thread (`door`). What is moved is not encrypted: use it on networks where
//! nobody listens in, or through a tunnel.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::Instant;

use kvferry_digest::{Digest, Program};
use kvferry_layout::{ByteCopy, Loops, Price, Rates, Region};
use parking_lot::Mutex;

use crate::contract::{Error, Instance, RegionId, StagingStatistics, Statistics, Transport};
use crate::shared::Transfer;
use crate::shared::admission::{Admission, Whole};
use crate::shared::bytes::{Fields, put_block};
use crate::shared::chunks::Chunked;
use crate::shared::custody::Interrupt;
use crate::shared::digests;
use crate::shared::packing_area::PackingAreas;
use crate::shared::random::random;
use crate::shared::rate::{Medium, RateWatch};
use crate::shared::spans::Spans;
use crate::shared::staging::Staging;

mod bounds;
mod client;
mod connections;
mod door;
pub(crate) mod frame;
#[doc(hidden)]
pub mod gather;
pub(crate) mod greeting;
mod proof;
mod server;
mod socket;
#[cfg(test)]
mod tests;

#[doc(hidden)]
pub use bounds::Bounds;
pub(crate) use client::PeerRegions;
#[doc(hidden)]
pub use client::{Address, Client, Fetch, Fetched, Lanes, Orphan, Room};
#[doc(hidden)]
pub use connections::{Delivery, Generation};
#[doc(hidden)]
pub use proof::Secret;
#[doc(hidden)]
pub use server::Server;
pub(crate) use socket::entry;

/// How a [`Tcp`] transport is set up.
#[derive(Clone, Debug)]
pub struct TcpOptions {
    /// Where to listen. Port 0 means any free one.
    pub bind: SocketAddr,
    /// The address to give to peers, where it is not the one to listen on: needed when `bind` is
    /// unspecified (`0.0.0.0`, `::`).
    pub advertise: Option<IpAddr>,
    /// Connections to each peer.
    pub connections: usize,
    /// Bytes of memory to pack into for peers, at most. Without any, peers read every run by itself.
    pub staging: u64,
}

impl Default for TcpOptions {
    fn default() -> Self {
        // One connection keeps a core busy on each side.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            bind: (Ipv4Addr::LOCALHOST, 0).into(),
            advertise: None,
            connections: (cores / 2).clamp(1, 4),
            staging: 32 << 20,
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

/// What a read takes over loopback: `kvferry-bench`'s example `price`, the best of four runs on a virtual machine with
/// two busy cores, November 2026.
const LOOPBACK: Price = Price { launch: 10_000.0, copy: 600.0, byte: 0.3 };

/// Nanoseconds for a run that is gathered and scattered, and for a byte that is moved twice more than one that is not
/// packed: with these the better way was chosen in all 26 rows of docs/measured/lowering-2026-11-18.json.
const GATHERED: f64 = 20.0;
const MOVED_TWICE: f64 = 0.2;

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
            options.bind,
            bounds,
            secret,
            regions,
            generation,
            areas.clone(),
            Delivery::Sent,
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
        self.admission.insert_host(self.name(), region)
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
        out.push(u8::from(self.options.staging > 0));
        Ok(out)
    }

    fn connect(&self, description: &[u8], deadline: Instant) -> Result<TcpPeer, Error> {
        let address = parse(description)?;
        let known = |peers: &[Arc<Client>]| {
            peers.iter().find(|client| client.instance() == address.secret.instance).cloned()
        };
        if let Some(client) = known(&self.peers.lock()) {
            return Ok(TcpPeer(client));
        }
        let medium = if address.at.ip().is_loopback() {
            Medium::Memory
        } else {
            Medium::Network(Medium::fastest_card())
        };
        let lanes = self.options.connections;
        let client = Client::open(
            address,
            Lanes { count: lanes, gathers: usize::MAX },
            RateWatch::new(medium),
            None,
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

    fn price(&self, peer: &TcpPeer) -> Price {
        // A card may be slower than loopback, and is never faster.
        let byte = peer.0.rate.medium().byte().unwrap_or_default().max(LOOPBACK.byte);
        Price { byte, ..LOOPBACK }
    }

    fn read(
        &self,
        peer: &TcpPeer,
        copies: &[ByteCopy],
        deadline: Instant,
    ) -> Result<Transfer, Error> {
        let client = &peer.0;
        let interrupt: Weak<dyn Interrupt> = Arc::downgrade(client) as _;
        // The peer checks its own side.
        let theirs = Spans::everything();
        let opened =
            self.admission.open(copies, &theirs, deadline, Some(interrupt), &client.rate)?;
        if !opened.custody.is_empty() {
            client.post(Chunked::new(opened.custody.clone(), opened.copies));
        }
        Ok(Transfer::posted(opened.custody))
    }

    fn digest(&self, program: &Program, deadline: Instant) -> Result<Vec<Digest>, Error> {
        digests::digest(&self.admission, None, program, deadline)
    }

    fn rates(&self, peer: &TcpPeer) -> Rates {
        let direct = self.price(peer);
        let packed = peer.0.packs().then_some(Price {
            copy: GATHERED,
            byte: direct.byte + MOVED_TWICE,
            ..direct
        });
        Rates { direct, packed }
    }

    fn read_packed(
        &self,
        peer: &TcpPeer,
        loops: &Loops,
        deadline: Instant,
    ) -> Result<Transfer, Error> {
        let client = &peer.0;
        if !client.packs() {
            return self.read_loops(peer, loops, deadline);
        }
        let (whole, written) = Whole::of(loops)?;
        let interrupt: Weak<dyn Interrupt> = Arc::downgrade(client) as _;
        let custody =
            self.admission.open_whole(&whole, &written, deadline, Some(interrupt), &client.rate)?;
        if !custody.is_empty() {
            client.post(Chunked::packed(custody.clone(), loops.clone(), gather::LIMITS));
        }
        Ok(Transfer::posted(custody))
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
        let packs = match fields.array()? {
            [0] => false,
            [1] => true,
            _ => return None,
        };
        fields.0.is_empty().then_some(Address { secret: Secret { instance, token }, at, packs })
    };
    parse().ok_or_else(|| Error::BadDescription("it is not one of the tcp transport".to_owned()))
}
