//! Two processes on one host, with nothing installed.
//!
//! A few worker threads read the peer's memory through the kernel (`process_vm_readv`), up to 1,023
//! copies a call, without a buffer between. The peer's own threads take no part in it. Questions for
//! the peer's regions go over [`tcp`](crate::tcp) connections on loopback.
//!
//! Short runs cost the kernel as much as long ones: where that is more than what packing takes, the peer packs
//! them, and they come over those connections.
//!
//! Where the kernel does not let one process read the other (another user, a hardened container),
//! everything goes over those instead: [`LocalPeer::route`] says so, and a warning does.
//!
//! That a process number may be given out again is no danger: see `Identity` in the source.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use kvferry_digest::{Digest, Program};
use kvferry_layout::{Loops, Region};
use parking_lot::Mutex;

use crate::contract::{Error, Instance, RegionId, StagingStatistics, Statistics, Transport};
use crate::shared::Transfer;
use crate::shared::bytes::{Fields, put_block};
use crate::shared::chunks::Chunked;
use crate::shared::digests;
use crate::shared::random::random;
use crate::tcp::{Bounds, Tcp, TcpOptions, TcpPeer};

mod direct;
mod process;
mod workers;

use direct::Direct;
use process::{Identity, Process};
use workers::Workers;

/// How a [`Local`] transport is set up.
#[derive(Clone, Debug)]
pub struct LocalOptions {
    /// Threads that copy.
    pub workers: usize,
}

impl Default for LocalOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self { workers: cores.clamp(1, 4) }
    }
}

/// The `local` back end.
#[derive(Debug)]
pub struct Local {
    identity: Arc<Identity>,
    nonce: [u8; 16],
    peers: Mutex<Vec<LocalPeer>>,
    workers: Workers,
    tcp: Tcp,
}

/// A peer of a [`Local`] transport.
#[derive(Clone)]
pub struct LocalPeer(Arc<Inner>);

struct Inner {
    tcp: TcpPeer,
    /// Or why not directly.
    direct: Result<Arc<Direct>, Error>,
}

/// How bytes get to a peer of a [`Local`] transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// From memory to memory.
    Direct,
    /// Over TCP on loopback, because the kernel does not allow the direct way.
    Tcp {
        /// What it said.
        obstacle: Error,
    },
}

impl LocalPeer {
    /// Who it is.
    pub fn instance(&self) -> Instance {
        self.0.tcp.instance()
    }

    /// How bytes get there.
    pub fn route(&self) -> Route {
        match &self.0.direct {
            Ok(_) => Route::Direct,
            Err(obstacle) => Route::Tcp { obstacle: obstacle.clone() },
        }
    }
}

impl fmt::Debug for LocalPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalPeer")
            .field("instance", &self.instance())
            .field("route", &self.route())
            .finish_non_exhaustive()
    }
}

const DESCRIPTION: &[u8; 8] = b"kvfy-loc";

/// The kernel copies runs of so many bytes as fast as packing does, in `docs/measured/lowering-2026-11-1*.json`:
/// those of 512 bytes and less were packed in 0.05 to 0.56 of the time, and of those of 7,859 and more none.
pub const PACKS_BELOW: u64 = 1 << 10;

/// Connections to each peer: one part of what is packed is scattered while the next is gathered.
const LANES: usize = 2;

impl Local {
    /// Starts the workers, and listens on loopback.
    pub fn new(options: LocalOptions) -> Result<Self, Error> {
        let nonce = random()?;
        let identity = Arc::new(Identity::new(nonce));
        let tcp = Tcp::with(
            TcpOptions { connections: LANES, ..TcpOptions::default() },
            Bounds::of_this_process(),
            identity.clone(),
        )?;
        let workers = Workers::start(options.workers)?;
        Ok(Self { identity, nonce, peers: Mutex::default(), workers, tcp })
    }

    /// Who this is.
    pub fn instance(&self) -> Instance {
        self.tcp.instance()
    }
}

impl Transport for Local {
    type Peer = LocalPeer;
    type Operation = Transfer;

    fn name(&self) -> &'static str {
        "local"
    }

    unsafe fn register(&self, region: Region) -> Result<RegionId, Error> {
        let id = self.tcp.admission().insert_host(self.name(), region)?;
        self.identity.advance();
        Ok(id)
    }

    fn deregister(&self, region: RegionId, deadline: Instant) -> Result<(), Error> {
        let gone = || self.identity.advance();
        let evict = || self.tcp.cut_all();
        self.tcp.admission().regions.remove(region, deadline, gone, evict).map(|_| ())
    }

    fn describe(&self) -> Result<Vec<u8>, Error> {
        let mut out = DESCRIPTION.to_vec();
        out.extend(std::process::id().to_le_bytes());
        out.extend((Arc::as_ptr(&self.identity) as u64).to_le_bytes());
        out.extend(self.nonce);
        put_block(&mut out, &self.tcp.describe()?);
        Ok(out)
    }

    fn connect(&self, description: &[u8], deadline: Instant) -> Result<LocalPeer, Error> {
        let description = parse(description)?;
        let tcp = self.tcp.connect(description.tcp, deadline)?;
        let known =
            self.peers.lock().iter().find(|peer| Arc::ptr_eq(&peer.0.tcp.0, &tcp.0)).cloned();
        if let Some(peer) = known {
            if let Ok(direct) = &peer.0.direct {
                direct.refresh(deadline)?;
            }
            return Ok(peer);
        }
        let direct = match Process::find(description.pid, description.identity, description.nonce) {
            Ok(process) => Ok(Arc::new(Direct::new(process, tcp.0.clone(), deadline)?)),
            Err(obstacle) => {
                tracing::warn!(
                    "bytes from process {} come over TCP on loopback, which is slower, because the \
                     direct way is closed: {obstacle}. Run both processes as the same user; in \
                     containers, share the PID namespace and allow ptrace (CAP_SYS_PTRACE)",
                    description.pid
                );
                Err(obstacle)
            }
        };
        let peer = LocalPeer(Arc::new(Inner { tcp, direct }));
        self.peers.lock().push(peer.clone());
        Ok(peer)
    }

    fn endpoints(&self, description: &[u8]) -> Vec<SocketAddr> {
        parse(description).map_or_else(|_| vec![], |described| self.tcp.endpoints(described.tcp))
    }

    fn disconnect(&self, peer: &LocalPeer) {
        self.peers.lock().retain(|other| !Arc::ptr_eq(&other.0, &peer.0));
        if let Ok(direct) = &peer.0.direct {
            direct.close();
            self.workers.forget(direct);
        }
        self.tcp.disconnect(&peer.0.tcp);
    }

    fn read(&self, peer: &LocalPeer, loops: &Loops, deadline: Instant) -> Result<Transfer, Error> {
        let Ok(direct) = &peer.0.direct else {
            return self.tcp.read(&peer.0.tcp, loops, deadline);
        };
        let theirs = &direct.regions().spans;
        let admission = self.tcp.admission();
        let opened = admission.open(loops, theirs, deadline, None, &peer.0.tcp.0.rate)?;
        if !opened.custody.is_empty() {
            let operation = Chunked::new(opened.custody.clone(), opened.copies);
            self.workers.post(operation, direct.clone());
        }
        Ok(Transfer::posted(opened.custody))
    }

    fn digest(&self, program: &Program, deadline: Instant) -> Result<Vec<Digest>, Error> {
        digests::digest(self.tcp.admission(), None, program, deadline)
    }

    fn packs_below(&self, peer: &LocalPeer) -> u64 {
        let over_tcp = self.tcp.packs_below(&peer.0.tcp);
        if peer.0.direct.is_ok() { over_tcp.min(PACKS_BELOW) } else { over_tcp }
    }

    fn read_packed(
        &self,
        peer: &LocalPeer,
        loops: &Loops,
        deadline: Instant,
    ) -> Result<Transfer, Error> {
        if peer.0.direct.is_ok() && peer.0.tcp.0.packs().is_none() {
            return self.read(peer, loops, deadline);
        }
        self.tcp.read_packed(&peer.0.tcp, loops, deadline)
    }

    fn staging(&self) -> StagingStatistics {
        self.tcp.staging()
    }

    fn statistics(&self) -> Statistics {
        self.tcp.statistics()
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        // The connections first: a worker may be waiting for an answer on one.
        let peers = std::mem::take(&mut *self.peers.lock());
        for peer in &peers {
            self.disconnect(peer);
        }
    }
}

struct Description<'a> {
    pid: u32,
    identity: u64,
    nonce: [u8; 16],
    tcp: &'a [u8],
}

fn parse(description: &[u8]) -> Result<Description<'_>, Error> {
    let mut fields = Fields(description);
    let mut parse = || {
        if &fields.array::<8>()? != DESCRIPTION {
            return None;
        }
        let description = Description {
            pid: fields.u32()?,
            identity: fields.u64()?,
            nonce: fields.array()?,
            tcp: fields.block()?,
        };
        fields.0.is_empty().then_some(description)
    };
    parse().ok_or_else(|| Error::BadDescription("it is not one of the local transport".to_owned()))
}
