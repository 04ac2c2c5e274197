//! Two processes on one host, with nothing installed.
//!
//! A few worker threads read and write the peer's memory through the kernel
//! (`process_vm_readv`, `process_vm_writev`), up to 1,023 copies a call, without a buffer between.
//! The peer's own threads take no part in it. Notifications, and questions for the peer's regions,
//! go over a [`tcp`] connection on loopback.
//!
//! Where the kernel does not let one process read the other (another user, a hardened container),
//! everything goes over that connection instead: [`LocalPeer::route`] says so, and a warning does.
//!
//! That a process number may be given out again is no danger: see `Identity` in the source.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::bytes::{Fields, put_block};
use crate::error::{Error, Side};
use crate::merge::Direction;
use crate::progress::{Chunk, Interrupt, Next, Progress, Transfer};
use crate::random::random;
use crate::region::{RegionId, Spans};
use crate::tcp::{self, Table, Tcp, TcpOptions, TcpPeer};
use crate::transport::{Instance, Notification, Statistics, Transport};

use kvferry_layout::{ByteCopy, Price, Region};

mod memory;

use memory::{Identity, MAX_ENTRIES, Process};

/// Bytes per call to the kernel: few enough to spread an operation over the workers and to be
/// cancelled soon.
const CHUNK_BYTES: u64 = 4 << 20;

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
    pool: Arc<Pool>,
    workers: Vec<JoinHandle<()>>,
    peers: Mutex<Vec<LocalPeer>>,
    tcp: Tcp,
}

/// A peer of a [`Local`] transport.
#[derive(Clone)]
pub struct LocalPeer(Arc<Inner>);

struct Inner {
    tcp: TcpPeer,
    direct: Option<Direct>,
    /// Why not directly.
    obstacle: Option<Error>,
    closed: AtomicBool,
}

struct Direct {
    process: Process,
    table: Mutex<Arc<Table>>,
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
        match &self.0.obstacle {
            None => Route::Direct,
            Some(obstacle) => Route::Tcp { obstacle: obstacle.clone() },
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

impl Local {
    /// Starts the workers, and listens on loopback.
    pub fn new(options: LocalOptions) -> Result<Self, Error> {
        let nonce = random()?;
        let identity = Arc::new(Identity::new(nonce));
        let tcp = Tcp::with_table(
            TcpOptions { connections: 1, ..TcpOptions::default() },
            Arc::default(),
            identity.clone(),
        )?;
        let mut local = Self {
            identity,
            nonce,
            pool: Arc::default(),
            workers: Vec::new(),
            peers: Mutex::default(),
            tcp,
        };
        for number in 0..options.workers.max(1) {
            let pool = local.pool.clone();
            let worker = std::thread::Builder::new()
                .name(format!("kvferry-copy{number}"))
                .spawn(move || pool.work())
                .map_err(|error| Error::system("starting a thread", &error))?;
            local.workers.push(worker);
        }
        Ok(local)
    }

    /// Who this is.
    pub fn instance(&self) -> Instance {
        self.tcp.instance()
    }

    fn peers(&self) -> MutexGuard<'_, Vec<LocalPeer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn post(
        &self,
        direction: Direction,
        peer: &LocalPeer,
        copies: &[ByteCopy],
        notification: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<Transfer, Error> {
        let link = &peer.0.tcp.0;
        let Some(direct) = &peer.0.direct else {
            let tcp = &peer.0.tcp;
            return match direction {
                Direction::Read => self.tcp.read(tcp, copies, notification, deadline),
                Direction::Write => self.tcp.write(tcp, copies, notification, deadline),
            };
        };
        let interrupt: Weak<dyn Interrupt> = Arc::downgrade(link) as _;
        let table = direct.table();
        let progress = self.tcp.order(
            direction,
            copies,
            &table.spans,
            notification,
            deadline,
            interrupt,
            &link.rate,
        )?;
        if progress.is_empty() {
            link.notify(progress.clone());
        } else {
            self.pool.push(Job { progress: progress.clone(), peer: peer.clone() });
        }
        progress.posted();
        Ok(Transfer(progress))
    }
}

impl Transport for Local {
    type Peer = LocalPeer;
    type Operation = Transfer;

    fn name(&self) -> &'static str {
        "local"
    }

    unsafe fn register(&self, region: Region) -> Result<RegionId, Error> {
        tcp::check_host(self.name(), region)?;
        let id = self.tcp.regions().insert(region)?;
        self.identity.advance();
        Ok(id)
    }

    fn deregister(&self, region: RegionId, deadline: Instant) -> Result<(), Error> {
        let gone = || self.identity.advance();
        let evict = || self.tcp.cut_all();
        self.tcp.regions().remove(region, deadline, gone, evict).map(|_| ())
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
        let known = self.peers().iter().find(|peer| Arc::ptr_eq(&peer.0.tcp.0, &tcp.0)).cloned();
        if let Some(peer) = known {
            if let Some(direct) = &peer.0.direct {
                direct.set_table(tcp.0.table(deadline)?);
            }
            return Ok(peer);
        }
        let found = Process::find(description.pid, description.identity, description.nonce);
        let (direct, obstacle) = match found {
            Ok(process) => {
                let table = Mutex::new(Arc::new(tcp.0.table(deadline)?));
                (Some(Direct { process, table }), None)
            }
            Err(obstacle) => {
                tracing::warn!(
                    "bytes to and from process {} go over TCP on loopback, which is slower, \
                     because the direct way is closed: {obstacle}. Run both processes as the same \
                     user; in containers, share the PID namespace and allow ptrace \
                     (CAP_SYS_PTRACE)",
                    description.pid
                );
                (None, Some(obstacle))
            }
        };
        let peer =
            LocalPeer(Arc::new(Inner { tcp, direct, obstacle, closed: AtomicBool::new(false) }));
        self.peers().push(peer.clone());
        Ok(peer)
    }

    fn disconnect(&self, peer: &LocalPeer) {
        peer.0.closed.store(true, Ordering::SeqCst);
        self.peers().retain(|other| !Arc::ptr_eq(&other.0, &peer.0));
        self.pool.forget(peer);
        self.tcp.disconnect(&peer.0.tcp);
    }

    fn price(&self, _: &LocalPeer) -> Price {
        // Half a microsecond a copy, 8 GB/s.
        Price { launch: 0.0, copy: 512.0, byte: 0.125 }
    }

    fn read(
        &self,
        peer: &LocalPeer,
        copies: &[ByteCopy],
        notification: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<Transfer, Error> {
        self.post(Direction::Read, peer, copies, notification, deadline)
    }

    fn write(
        &self,
        peer: &LocalPeer,
        copies: &[ByteCopy],
        notification: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<Transfer, Error> {
        self.post(Direction::Write, peer, copies, notification, deadline)
    }

    fn notifications(&self, until: Instant) -> Result<Vec<Notification>, Error> {
        self.tcp.notifications(until)
    }

    fn statistics(&self) -> Statistics {
        self.tcp.statistics()
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        // The connections first: a worker may be waiting for an answer on one.
        let peers = std::mem::take(&mut *self.peers());
        for peer in &peers {
            self.disconnect(peer);
        }
        self.pool.close();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
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

/// The workers' queue.
#[derive(Debug, Default)]
struct Pool {
    queue: Mutex<Queue>,
    work: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    closing: bool,
}

#[derive(Debug)]
struct Job {
    progress: Arc<Progress>,
    peer: LocalPeer,
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, job: Job) {
        let mut queue = self.lock();
        if queue.closing || job.peer.0.closed.load(Ordering::SeqCst) {
            drop(queue);
            job.progress.stop(Error::Disconnected);
            return;
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.work.notify_one();
    }

    /// Ends the operations of one peer that wait in line.
    fn forget(&self, peer: &LocalPeer) {
        let mut gone = Vec::new();
        self.lock().jobs.retain(|job| {
            let keep = !Arc::ptr_eq(&job.peer.0, &peer.0);
            if !keep {
                gone.push(job.progress.clone());
            }
            keep
        });
        for progress in gone {
            progress.stop(Error::Disconnected);
        }
    }

    fn close(&self) {
        let jobs = {
            let mut queue = self.lock();
            queue.closing = true;
            std::mem::take(&mut queue.jobs)
        };
        self.work.notify_all();
        for job in jobs {
            job.progress.stop(Error::Disconnected);
        }
    }

    /// A worker's life.
    fn work(&self) {
        let mut ours = Vec::with_capacity(MAX_ENTRIES);
        let mut theirs = Vec::with_capacity(MAX_ENTRIES);
        while let Some(job) = self.next() {
            let Some(direct) = &job.peer.0.direct else {
                continue;
            };
            // One entry is left for the proof of identity.
            let Some((chunk, more)) = job.progress.take(MAX_ENTRIES - 1, CHUNK_BYTES) else {
                continue;
            };
            if more {
                self.push(Job { progress: job.progress.clone(), peer: job.peer.clone() });
            }
            let link = &job.peer.0.tcp.0;
            let refresh = || link.table(job.progress.deadline);
            match direct.carry(&job.progress, &chunk, &mut ours, &mut theirs, refresh) {
                Ok(()) => {
                    if job.progress.settle_done(chunk.bytes) == Next::Notify {
                        link.notify(job.progress);
                    }
                }
                Err(error) => job.progress.settle_failed(error),
            }
        }
    }

    fn next(&self) -> Option<Job> {
        let mut queue = self.lock();
        loop {
            if queue.closing {
                return None;
            }
            if let Some(job) = queue.jobs.pop_front() {
                return Some(job);
            }
            queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Direct {
    fn table(&self) -> Arc<Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_table(&self, table: Table) {
        *self.table.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(table);
    }

    /// Carries out a chunk, again where the peer's regions changed under it.
    fn carry(
        &self,
        progress: &Progress,
        chunk: &Chunk,
        ours: &mut Vec<libc::iovec>,
        theirs: &mut Vec<libc::iovec>,
        refresh: impl Fn() -> Result<Table, Error>,
    ) -> Result<(), Error> {
        let direction = progress.direction;
        loop {
            let known = self.table().generation;
            let seen = match direction {
                Direction::Read => {
                    entries(direction, chunk, ours, theirs);
                    // SAFETY: the destinations lie in registered regions (`Regions::admit`), which
                    // may be written at any time and which the operation holds until its chunks
                    // are settled.
                    unsafe { self.process.read(ours, theirs, chunk.bytes)? }
                }
                Direction::Write => self.process.generation()?,
            };
            if seen != known {
                // Others may have asked already.
                let mut table = self.table();
                if table.generation != seen {
                    self.set_table(refresh()?);
                    table = self.table();
                }
                check(direction, chunk, &table.spans)?;
                if progress.is_stopped() {
                    return Err(Error::Cancelled);
                }
                continue;
            }
            if direction == Direction::Write {
                entries(direction, chunk, ours, theirs);
                // SAFETY: the sources lie in registered regions (`Regions::admit`), which may be
                // read at any time and which the operation holds; the destinations lie in regions
                // that the peer, whose identity was just proven, has registered.
                unsafe { self.process.write(ours, theirs, chunk.bytes)? };
            }
            return Ok(());
        }
    }
}

fn entries(
    direction: Direction,
    chunk: &Chunk,
    ours: &mut Vec<libc::iovec>,
    theirs: &mut Vec<libc::iovec>,
) {
    ours.clear();
    theirs.clear();
    for copy in &chunk.copies {
        let (here, there) = match direction {
            Direction::Read => (copy.destination, copy.source),
            Direction::Write => (copy.source, copy.destination),
        };
        ours.push(tcp::entry(here, copy.bytes));
        theirs.push(tcp::entry(there, copy.bytes));
    }
}

fn check(direction: Direction, chunk: &Chunk, spans: &Spans) -> Result<(), Error> {
    for copy in &chunk.copies {
        let address = match direction {
            Direction::Read => copy.source,
            Direction::Write => copy.destination,
        };
        if spans.find(address, copy.bytes, 0).is_none() {
            return Err(Error::OutsideRegion { side: Side::Peer, address, bytes: copy.bytes });
        }
    }
    Ok(())
}
