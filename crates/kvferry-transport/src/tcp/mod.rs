//! Between hosts, with nothing installed.
//!
//! Every transport runs a server for its registered memory and connects to its peers' servers over
//! a few connections each. Bytes go between the socket and the registered memory by vectored calls,
//! without a buffer between; a request carries up to 1,024 copies. The server checks every address
//! against its regions, and holds the regions it is serving.
//!
//! The description carries a token of 256 random bits. Both ends of a connection prove that they know
//! it, without sending it and anew each time: who was not given the description is neither served nor
//! believed, even if they listened in before. What is moved is not encrypted: use it on networks where
//! nobody listens in, or through a tunnel.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use crate::bytes::{Fields, put_block};
use crate::counters::Counters;
use crate::error::Error;
use crate::keeper::Keeper;
use crate::merge::Direction;
use crate::progress::{Interrupt, Order, Progress, Transfer};
use crate::random::random;
use crate::rate::{Link as Medium, RateWatch};
use crate::region::{RegionId, Regions, Spans};
use crate::transport::{Instance, MAX_NOTIFICATION_BYTES, Notification, Statistics, Transport};

use kvferry_layout::{ByteCopy, Place, Price, Region};

mod client;
mod frame;
mod proof;
mod server;
mod socket;
#[cfg(test)]
mod tests;

use client::Address;
pub(crate) use client::{Link, Table};
pub(crate) use server::Generation;
use server::Server;
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
}

impl Default for TcpOptions {
    fn default() -> Self {
        // One connection keeps a core busy on each side.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            bind: (Ipv4Addr::LOCALHOST, 0).into(),
            advertise: None,
            connections: (cores / 2).clamp(1, 4),
        }
    }
}

/// The `tcp` back end.
#[derive(Debug)]
pub struct Tcp {
    instance: Instance,
    token: frame::Token,
    options: TcpOptions,
    regions: Arc<Regions>,
    counters: Arc<Counters>,
    next: AtomicU64,
    peers: Mutex<Vec<Arc<Link>>>,
    keeper: Keeper,
    server: Server,
}

/// A peer of a [`Tcp`] transport.
#[derive(Clone, Debug)]
pub struct TcpPeer(pub(crate) Arc<Link>);

impl TcpPeer {
    /// Who it is.
    pub fn instance(&self) -> Instance {
        self.0.instance
    }
}

const DESCRIPTION: &[u8; 8] = b"kvfy-tcp";

impl Tcp {
    /// Starts to listen. Nothing can be read before something is registered.
    pub fn new(options: TcpOptions) -> Result<Self, Error> {
        Self::with_table(options, Arc::default(), Arc::new(AtomicU64::new(0)))
    }

    pub(crate) fn with_table(
        options: TcpOptions,
        regions: Arc<Regions>,
        generation: Arc<dyn Generation>,
    ) -> Result<Self, Error> {
        let instance = Instance(random()?);
        let token = random()?;
        let server = Server::start(options.bind, token, instance, regions.clone(), generation)?;
        Ok(Self {
            instance,
            token,
            options,
            regions,
            counters: Arc::default(),
            next: AtomicU64::new(1),
            peers: Mutex::default(),
            keeper: Keeper::start()?,
            server,
        })
    }

    /// Who this is.
    pub fn instance(&self) -> Instance {
        self.instance
    }

    fn peers(&self) -> MutexGuard<'_, Vec<Arc<Link>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn regions(&self) -> &Arc<Regions> {
        &self.regions
    }

    pub(crate) fn cut_all(&self) {
        self.server.cut_all();
    }

    /// Checks and sets up an operation; whoever calls posts it.
    #[expect(clippy::too_many_arguments, reason = "the parts of one operation")]
    pub(crate) fn order(
        &self,
        direction: Direction,
        copies: &[ByteCopy],
        peer: &Spans,
        notification: Option<&[u8]>,
        deadline: Instant,
        interrupt: Weak<dyn Interrupt>,
        rate: &Arc<RateWatch>,
    ) -> Result<Arc<Progress>, Error> {
        let began = Instant::now();
        check_notification(notification)?;
        let admitted = self.regions.admit(copies, direction, peer)?;
        let progress = Progress::new(Order {
            id: self.next.fetch_add(1, Ordering::Relaxed),
            direction,
            asked: copies.len(),
            copies: admitted.copies,
            holds: admitted.holds,
            notification,
            deadline,
            began,
            interrupt,
            counters: self.counters.clone(),
            rate: rate.clone(),
        });
        self.keeper.watch(&progress);
        Ok(progress)
    }

    fn post(
        &self,
        direction: Direction,
        peer: &TcpPeer,
        copies: &[ByteCopy],
        notification: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<Transfer, Error> {
        let link = &peer.0;
        let interrupt: Weak<dyn Interrupt> = Arc::downgrade(link) as _;
        let progress = self.order(
            direction,
            copies,
            // The peer checks its own side.
            &Spans::everything(),
            notification,
            deadline,
            interrupt,
            &link.rate,
        )?;
        link.post(progress.clone());
        progress.posted();
        Ok(Transfer(progress))
    }
}

pub(crate) fn check_notification(notification: Option<&[u8]>) -> Result<(), Error> {
    match notification {
        Some(message) if message.len() > MAX_NOTIFICATION_BYTES => {
            Err(Error::Unsupported(format!(
                "a notification of {} bytes; the longest is {MAX_NOTIFICATION_BYTES}",
                message.len()
            )))
        }
        _ => Ok(()),
    }
}

/// Refuses regions that are not in ordinary memory.
pub(crate) fn check_host(name: &str, region: Region) -> Result<(), Error> {
    match region.place {
        Place::Host => Ok(()),
        Place::Gpu(n) => Err(Error::Unsupported(format!(
            "the {name} transport moves host memory only, not that of GPU {n}: use nixl"
        ))),
    }
}

impl Transport for Tcp {
    type Peer = TcpPeer;
    type Operation = Transfer;

    fn name(&self) -> &'static str {
        "tcp"
    }

    unsafe fn register(&self, region: Region) -> Result<RegionId, Error> {
        check_host(self.name(), region)?;
        self.regions.insert(region)
    }

    fn deregister(&self, region: RegionId, deadline: Instant) -> Result<(), Error> {
        self.regions.remove(region, deadline, || (), || self.server.cut_all()).map(|_| ())
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
        out.extend(self.instance.0);
        out.extend(self.token);
        put_block(&mut out, address.to_string().as_bytes());
        Ok(out)
    }

    fn connect(&self, description: &[u8], deadline: Instant) -> Result<TcpPeer, Error> {
        let address = parse(description)?;
        let known = |peers: &[Arc<Link>]| {
            peers.iter().find(|link| link.instance == address.instance).cloned()
        };
        if let Some(link) = known(&self.peers()) {
            return Ok(TcpPeer(link));
        }
        let loopback = address.addresses.iter().all(|a| a.ip().is_loopback());
        let medium =
            if loopback { Medium::Memory } else { Medium::Network(Medium::fastest_card()) };
        let link = Link::open(
            address,
            self.instance,
            random()?,
            self.options.connections,
            RateWatch::new(medium),
            deadline,
        )?;
        self.peers().push(link.clone());
        Ok(TcpPeer(link))
    }

    fn disconnect(&self, peer: &TcpPeer) {
        self.peers().retain(|link| !Arc::ptr_eq(link, &peer.0));
        peer.0.close();
    }

    fn price(&self, _: &TcpPeer) -> Price {
        // Half a microsecond a copy, 8 GB/s.
        Price { launch: 0.0, copy: 512.0, byte: 0.125 }
    }

    fn read(
        &self,
        peer: &TcpPeer,
        copies: &[ByteCopy],
        notification: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<Transfer, Error> {
        self.post(Direction::Read, peer, copies, notification, deadline)
    }

    fn write(
        &self,
        peer: &TcpPeer,
        copies: &[ByteCopy],
        notification: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<Transfer, Error> {
        self.post(Direction::Write, peer, copies, notification, deadline)
    }

    fn notifications(&self, until: Instant) -> Result<Vec<Notification>, Error> {
        Ok(self.server.notifications(until))
    }

    fn statistics(&self) -> Statistics {
        self.counters.read()
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        let peers = std::mem::take(&mut *self.peers());
        for link in peers {
            link.close();
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
        let address = std::str::from_utf8(fields.block()?).ok()?.parse().ok()?;
        fields.0.is_empty().then_some(Address { instance, token, addresses: vec![address] })
    };
    parse().ok_or_else(|| Error::BadDescription("it is not one of the tcp transport".to_owned()))
}
