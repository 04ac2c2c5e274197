//! Packed reads over NIXL: the peer gathers into memory that is registered with NIXL, NIXL moves it in one
//! piece, and this side scatters it.
//!
//! NIXL moves bytes and asks nobody; who gathers must be asked. So every transport has a small server (the
//! one of [`tcp`](crate::tcp), which proves and checks) beside it, and tells of it in its description,
//! behind NIXL's own metadata, where older versions do not look. A slot of the peer's is kept for us until
//! we say that we have read it, and only its answer to that makes the bytes good: if the connection broke
//! meanwhile, the slot may have been used for something else, and the part is read again.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvferry_layout::{ByteCopy, Price, Rates, Region};

use super::peer::NixlPeer;
use super::state::State;
use crate::contract::{Error, Instance, Operation, Status};
use crate::shared::bytes::{Fields, put_block};
use crate::shared::random::random;
use crate::shared::rate::RateWatch;
use crate::tcp::{Address, Client, Delivery, Fetch, Fetched, Secret, Server, gather};

/// Connections to each peer, so that one part is scattered while the next is fetched.
const LANES: usize = 2;
/// How long to wait for the peer's server: without it, reads are direct.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long to wait for memory to fetch into.
const SLOT_PATIENCE: Duration = Duration::from_millis(50);
/// Marks the end of a description that tells of a server.
const MARK: &[u8; 8] = b"kvfy-pck";

/// The server of one transport.
#[derive(Debug)]
pub(super) struct Control {
    server: Server,
    secret: Secret,
    advertise: Option<IpAddr>,
    staging: Region,
}

impl Control {
    /// Starts it. `None` where there is no memory to pack into.
    pub(super) fn start(
        state: &State,
        bind: SocketAddr,
        advertise: Option<IpAddr>,
    ) -> Result<Option<Self>, Error> {
        let Some(staging) = state.staging.region() else { return Ok(None) };
        let secret = Secret { instance: state.instance, token: random()? };
        let (regions, generation) = (state.desk.regions.clone(), Arc::new(AtomicU64::new(0)));
        let pool = state.staging.clone();
        let server = Server::start(bind, secret, regions, generation, pool, Delivery::Fetched)?;
        Ok(Some(Self { server, secret, advertise, staging }))
    }

    /// What peers must know, to be put behind NIXL's metadata.
    pub(super) fn describe(&self) -> Result<Vec<u8>, Error> {
        let mut address = self.server.address()?;
        match self.advertise {
            Some(ip) => address.set_ip(ip),
            None if address.ip().is_unspecified() => return Ok(vec![]),
            None => {}
        }
        let mut out = self.secret.token.to_vec();
        out.extend(self.staging.base.to_le_bytes());
        out.extend(self.staging.bytes.to_le_bytes());
        put_block(&mut out, address.to_string().as_bytes());
        out.extend((out.len() as u32).to_le_bytes());
        out.extend(MARK);
        Ok(out)
    }
}

/// What a description tells of a peer's server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told {
    address: Address,
    /// Its memory to pack into.
    staging: Region,
}

impl Told {
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
            let staging = Region::host(fields.u64()?, fields.u64()?);
            let at = std::str::from_utf8(fields.block()?).ok()?.parse().ok()?;
            fields.0.is_empty().then_some((nixl, Self { address: Address { secret, at }, staging }))
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
}

impl Packer {
    /// Gets to know the peer's server, and measures. `None` where it cannot be reached or does not pack:
    /// its reads are direct then.
    pub(super) fn meet(
        state: &Arc<State>,
        peer: &NixlPeer,
        told: &Told,
        deadline: Instant,
    ) -> Option<Self> {
        let fetch = Fetcher { state: Arc::downgrade(state), peer: peer.clone() };
        let rate = RateWatch::new(peer.0.rate.medium());
        let until = deadline.min(Instant::now() + PATIENCE);
        let opened = Client::open(told.address, LANES, rate, Some(Arc::new(fetch)), until);
        let client = match opened {
            Ok(client) => client,
            Err(error) => {
                let at = told.address.at;
                tracing::info!(
                    "short runs of {peer:?} are read one by one, because its server for packing at \
                     {at} cannot be reached: {error}"
                );
                return None;
            }
        };
        let Some(measured) = client.measured().filter(|measured| measured.packs) else {
            client.close();
            return None;
        };
        let direct = measure(state, peer, told, deadline).unwrap_or_else(|| peer.price(false));
        // What gathering and scattering adds to a byte does not depend on who moves it.
        let added = match (measured.direct, measured.packed) {
            (Some(tcp), Some(packed)) => (packed.byte - tcp.byte).max(0.05),
            _ => 0.2,
        };
        let launch = measured.round_trip + direct.launch;
        // Every part is asked for and fetched, a few of them at a time.
        let part = launch / (4.0 * gather::LIMITS.bytes as f64);
        let copy = measured.packed.map_or(20.0, |packed| packed.copy);
        let packed = Price { launch, copy, byte: direct.byte + added + part };
        let rates = Rates { direct, packed: Some(packed) };
        Some(Self { client, rates })
    }
}

/// What reads from the peer take, from its memory to pack into to ours.
fn measure(state: &Arc<State>, peer: &NixlPeer, told: &Told, deadline: Instant) -> Option<Price> {
    const SHORT: u64 = 64;
    const COUNT: u64 = 256;
    const LONG: u64 = 128 << 10;
    /// A small read that took so many nanoseconds says more about the machine than about reads.
    const ABSURD: f64 = 5e6;
    let slot = state.staging.take(SLOT_PATIENCE)?;
    if told.staging.bytes < LONG || slot.bytes() < LONG {
        return None;
    }
    let copies = |count: u64, bytes: u64| -> Vec<ByteCopy> {
        let at = |number| number * 2 * bytes;
        let copy = |number| ByteCopy {
            source: told.staging.base + at(number),
            destination: slot.address() + at(number),
            bytes,
        };
        (0..count).map(copy).collect()
    };
    // The first read connects, which takes far longer than any other: it is not counted.
    let mut best = [f64::INFINITY; 4];
    let tries = [copies(1, SHORT), copies(1, SHORT), copies(1, LONG), copies(COUNT, SHORT)];
    let mut began = Instant::now();
    for (number, (copies, best)) in tries.iter().zip(&mut best).enumerate() {
        if number == 1 {
            began = Instant::now();
        }
        for _ in 0..4 {
            let over = number == 0 || began.elapsed() > Duration::from_millis(10);
            if over && best.is_finite() {
                break;
            }
            let began = Instant::now();
            let operation = state.read_uncounted(peer, copies, deadline).ok()?;
            match operation.wait(deadline) {
                Status::Done(_) => *best = best.min(began.elapsed().as_nanos() as f64),
                Status::Failed(_) => return None,
                Status::InProgress | Status::Quarantined(_) => {
                    operation.cancel();
                    state.forsaken.lock().push(Fetched { operation, slot });
                    return None;
                }
            }
        }
    }
    let [_, launch, long, short] = best;
    if launch > ABSURD {
        return None;
    }
    let byte = (long - launch).max(0.0) / LONG as f64;
    let copy = (short - launch) / COUNT as f64 - SHORT as f64 * byte;
    Some(Price { launch, copy: copy.max(1.0), byte: byte.max(0.001) })
}

/// Fetches by NIXL what a peer has gathered.
struct Fetcher {
    /// The transport has the peers, and so this: it must not keep the transport alive.
    state: Weak<State>,
    peer: NixlPeer,
}

impl std::fmt::Debug for Fetcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Fetcher").field(&self.peer).finish()
    }
}

impl Fetch for Fetcher {
    fn begin(&self, address: u64, bytes: u64, deadline: Instant) -> Result<Option<Fetched>, Error> {
        let state = self.state.upgrade().ok_or(Error::Disconnected)?;
        state.settle_forsaken();
        let Some(slot) = state.staging.take(SLOT_PATIENCE) else { return Ok(None) };
        if bytes > slot.bytes() {
            return Err(Error::PeerMisbehaved(crate::contract::InvalidFrame::Length(bytes)));
        }
        let copy = ByteCopy { source: address, destination: slot.address(), bytes };
        let operation = state.read_uncounted(&self.peer, &[copy], deadline)?;
        Ok(Some(Fetched { operation, slot }))
    }

    fn forsake(&self, fetched: Fetched) {
        fetched.operation.cancel();
        match self.state.upgrade() {
            Some(state) => state.forsaken.lock().push(fetched),
            // The transport is gone, and NIXL's agent with it: nothing lands any more.
            None => drop(fetched),
        }
    }
}
