//! Two processes on one host whose memory is on GPUs: one kernel launch carries out a request.
//!
//! Regions are opened in the reading process (`share.rs`), so a kernel there reads the peer's memory
//! like its own, on the same card or over NVLink or PCIe. A request comes as loops
//! ([`Transport::read_loops`]): strides and tables of blocks, a few KB, which the kernel walks by
//! itself; no list of copies exists anywhere. `program.rs` writes what the kernel reads, `loops.h` is
//! the kernel's body, which the tests run on the CPU too.
//!
//! Launches go to a stream of their own, of the lowest priority, and occupy at most
//! [`CudaOptions::sms`] multiprocessors. A kernel that runs cannot be called back: an operation whose
//! deadline passes, that is cancelled or whose peer is disconnected is quarantined until the kernel
//! has ended, which is soon. A peer that dies does no harm: its memory stays valid as long as it is
//! open here, until [`Transport::disconnect`].
//!
//! Nothing here needs CUDA to build. The driver is loaded when a [`Cuda`] is made, and NVRTC with it:
//! the kernel is compiled for the card at hand, once per process and architecture. Where NVRTC is not
//! wanted, [`CudaOptions::kernel`] names what `nvcc` made of `copy.cu` beforehand: PTX (`nvcc -ptx
//! -arch=compute_80`, for sm_80 and newer) or machine code (`nvcc -cubin -arch=sm_90`).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::c_void;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvferry_layout::{BlockPair, ByteCopy, Loops, Place, Price, Region};

use crate::counters::Counters;
use crate::error::{Error, Side};
use crate::merge::Direction;
use crate::random::random;
use crate::region::{RegionId, Regions, Spans};
use crate::transport::{Instance, Notification, Statistics, Transport};

pub mod driver;
mod flight;
pub mod nvrtc;
mod program;
mod share;
mod staging;
mod twin;

use driver::{Card, Event, Kernel, Module, Stream};
use flight::{Flight, Order};
use program::{Program, TILE_BYTES};
use share::{Description, Export, Opened};
use staging::Staging;

pub use flight::CudaTransfer;
pub use share::mappings;
pub use twin::carry_out;

/// The kernel, in CUDA C.
pub const KERNEL: &str = include_str!("copy.cu");
/// What it includes.
pub const KERNEL_HEADER: (&str, &str) = ("loops.h", include_str!("loops.h"));

/// Threads of a CTA, as in copy.cu: one CTA fills a multiprocessor.
const THREADS: u32 = 1024;
const WARPS: u64 = THREADS as u64 / 32;
/// Programs up to the last of these sizes travel with the launch; as in copy.cu.
const INLINE: [usize; 4] = [4000, 8000, 16_000, 32_000];

/// How a [`Cuda`] transport is set up.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// The card whose memory is registered, and whose kernels read.
    pub gpu: u32,
    /// How many multiprocessors a transfer may occupy; `None` for all of them.
    pub sms: Option<u32>,
    /// The kernel, compiled beforehand (PTX or machine code); `None` to compile it with NVRTC.
    pub kernel: Option<PathBuf>,
}

/// The `cuda` back end.
pub struct Cuda {
    shared: Arc<Shared>,
    watcher: Option<JoinHandle<()>>,
}

struct Shared {
    card: Card,
    instance: [u8; 16],
    regions: Regions,
    exports: Mutex<BTreeMap<RegionId, Arc<Export>>>,
    peers: Mutex<Vec<CudaPeer>>,
    counters: Arc<Counters>,
    /// Multiprocessors of the card, and how many of them to use.
    all_sms: u32,
    sms: AtomicU32,
    line: Mutex<Line>,
    watched: Mutex<Watched>,
    changed: Condvar,
}

/// What launches need; one at a time.
struct Line {
    stream: Stream,
    copy: Kernel,
    /// For each of [`INLINE`].
    copy_inline: Vec<Kernel>,
    /// A program that travels with a launch, as many times 16 bytes as the longest may have.
    inline: Box<[u128]>,
    staging: Staging,
    events: Arc<Mutex<Vec<Event>>>,
    /// Keeps the kernels loaded.
    _module: Module,
}

#[derive(Default)]
struct Watched {
    flights: Vec<Arc<Flight>>,
    closing: bool,
}

/// A peer of a [`Cuda`] transport.
#[derive(Clone)]
pub struct CudaPeer(Arc<Inner>);

struct Inner {
    instance: [u8; 16],
    pid: u32,
    /// `None` once disconnected.
    table: Mutex<Option<Arc<Table>>>,
}

/// A peer's regions, open here.
#[derive(Debug)]
pub(crate) struct Table {
    spans: Spans,
    /// For each of them: what to add to the peer's addresses.
    shifts: Vec<u64>,
    opened: Vec<Arc<Opened>>,
}

impl CudaPeer {
    /// Who it is.
    pub fn instance(&self) -> Instance {
        Instance(self.0.instance)
    }

    fn table(&self) -> Option<Arc<Table>> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl fmt::Debug for CudaPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaPeer")
            .field("instance", &self.instance())
            .field("pid", &self.0.pid)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("gpu", &self.shared.card.ordinal()).finish_non_exhaustive()
    }
}

/// The transports of this process: their memory needs no opening.
fn own_instances() -> &'static Mutex<HashSet<[u8; 16]>> {
    static OWN: OnceLock<Mutex<HashSet<[u8; 16]>>> = OnceLock::new();
    OWN.get_or_init(Mutex::default)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The kernel for an architecture, compiled once per process.
fn compiled(capability: u32) -> Result<Arc<Vec<u8>>, Error> {
    static KNOWN: OnceLock<Mutex<HashMap<u32, Arc<Vec<u8>>>>> = OnceLock::new();
    let mut known = lock(KNOWN.get_or_init(Mutex::default));
    if let Some(image) = known.get(&capability) {
        return Ok(image.clone());
    }
    let image = Arc::new(nvrtc::compile("copy.cu", KERNEL, &[KERNEL_HEADER], capability)?);
    known.insert(capability, image.clone());
    Ok(image)
}

impl Cuda {
    /// Opens the card and loads the kernel.
    pub fn new(options: &CudaOptions) -> Result<Self, Error> {
        let card = Card::open(options.gpu)?;
        let all_sms = card.multiprocessors()?;
        let image = match &options.kernel {
            None => compiled(card.capability()?)?,
            Some(path) => Arc::new(std::fs::read(path).map_err(|error| {
                Error::system(format!("reading the kernel {}", path.display()), &error)
            })?),
        };
        let module = card.module(&image)?;
        let tiles = TILE_BYTES as u32 * WARPS as u32;
        let line = Line {
            stream: card.stream(true)?,
            copy: module.kernel("kvferry_copy", tiles)?,
            copy_inline: INLINE
                .iter()
                .map(|bytes| module.kernel(&format!("kvferry_copy_{bytes}"), tiles))
                .collect::<Result<_, _>>()?,
            inline: vec![0; INLINE[INLINE.len() - 1] / 16].into(),
            staging: Staging::new(&card)?,
            events: Arc::default(),
            _module: module,
        };
        let instance = random()?;
        let shared = Arc::new(Shared {
            card,
            instance,
            regions: Regions::default(),
            exports: Mutex::default(),
            peers: Mutex::default(),
            counters: Arc::default(),
            all_sms,
            sms: AtomicU32::new(options.sms.unwrap_or(all_sms).clamp(1, all_sms)),
            line: Mutex::new(line),
            watched: Mutex::default(),
            changed: Condvar::new(),
        });
        lock(own_instances()).insert(instance);
        let watcher = std::thread::Builder::new().name("kvferry-cuda".to_owned()).spawn({
            let shared = shared.clone();
            move || shared.watch()
        });
        let watcher = watcher.map_err(|error| Error::system("starting a thread", &error))?;
        Ok(Self { shared, watcher: Some(watcher) })
    }

    /// Who this is.
    pub fn instance(&self) -> Instance {
        Instance(self.shared.instance)
    }

    /// How many multiprocessors transfers may occupy from now on; `None` for all of them.
    pub fn set_sms(&self, sms: Option<u32>) {
        let all = self.shared.all_sms;
        self.shared.sms.store(sms.unwrap_or(all).clamp(1, all), Ordering::Relaxed);
    }

    /// Where this process sees an address of a peer's region, for measurements.
    pub fn address_here(&self, peer: &CudaPeer, address: u64) -> Option<u64> {
        let table = peer.table()?;
        let at = table.spans.find(address, 1, 0)?;
        Some(address.wrapping_add(table.shifts[at]))
    }

    /// Marks this point of the stream that kernels run in, for measurements.
    pub fn mark(&self, event: &Event) -> Result<(), Error> {
        lock(&self.shared.line).stream.record(event)
    }

    fn table(&self, description: &Description, before: Option<&Table>) -> Result<Table, Error> {
        let own = lock(own_instances()).contains(&description.instance);
        let place = Place::Gpu(self.shared.card.ordinal());
        let mut opened: Vec<Arc<Opened>> =
            before.map(|table| table.opened.clone()).unwrap_or_default();
        let mut regions = vec![];
        for foreign in &description.regions {
            let region = Region { base: foreign.base, bytes: foreign.bytes, place };
            let shift = if own {
                0
            } else {
                let known = before.and_then(|table| table.shift(&region));
                match known {
                    Some(shift) => shift,
                    None => {
                        share::open(&self.shared.card, description.pid, foreign, &mut opened)?.1
                    }
                }
            };
            regions.push((region, shift));
        }
        regions.sort_unstable_by_key(|(region, _)| region.base);
        let spans = Spans::from_peer(regions.iter().map(|(region, _)| *region).collect())?;
        let shifts = regions.into_iter().map(|(_, shift)| shift).collect();
        Ok(Table { spans, shifts, opened })
    }

    /// Checks loops against the regions of both sides, by their extents, and starts them.
    fn post(
        &self,
        peer: &CudaPeer,
        loops: &Loops,
        asked: u64,
        began: Instant,
        deadline: Instant,
    ) -> Result<CudaTransfer, Error> {
        let table = peer.table().ok_or(Error::Disconnected)?;
        let mut shifts = Vec::with_capacity(loops.nests().len());
        let mut written = Vec::with_capacity(shifts.capacity());
        let mut hint = 0;
        for nest in loops.nests() {
            let (read, write) = nest.extents().ok_or(Error::OutsideRegion {
                side: Side::Peer,
                address: nest.source,
                bytes: u64::MAX,
            })?;
            let bytes = read.end - read.start;
            let outside = Error::OutsideRegion { side: Side::Peer, address: read.start, bytes };
            hint = table.spans.find(read.start, bytes, hint).ok_or(outside)?;
            shifts.push(table.shifts[hint]);
            written.push((write.start, write.end - write.start));
        }
        let holds = self.shared.regions.hold(&written)?;
        let sms = self.shared.sms.load(Ordering::Relaxed);
        let program = Program::new(loops, u64::from(sms) * WARPS, |nest| shifts[nest]);
        let shared = &self.shared;
        let flight = {
            let mut line = lock(&shared.line);
            let event = lock(&line.events).pop();
            let event = event.map_or_else(|| shared.card.event(false), Ok)?;
            // A sum of work that was checked; nothing can fail from the launch on but the card itself.
            let flight = Flight::new(Order {
                peer: peer.clone(),
                table,
                event,
                events: line.events.clone(),
                deadline,
                began,
                asked,
                bytes: loops.bytes(),
                holds,
                counters: shared.counters.clone(),
            });
            let started = if program.batches() == 0 {
                Ok(())
            } else {
                // SAFETY: every address lies in regions of this process, which `holds` keeps
                // registered, or in memory of the peer, which `table` keeps open; the flight has both
                // until its event has passed.
                unsafe { line.start(&program, sms, &flight) }
            };
            let started = started.and_then(|()| line.stream.record(flight.event()));
            flight.posted(started);
            flight
        };
        let mut watched = lock(&shared.watched);
        watched.flights.push(flight.clone());
        if watched.flights.len() == 1 {
            shared.changed.notify_one();
        }
        drop(watched);
        Ok(CudaTransfer(flight))
    }
}

impl Line {
    /// Launches the kernel for a program.
    ///
    /// # Safety
    ///
    /// All addresses in the program must stay valid until the stream has passed it.
    unsafe fn start(
        &mut self,
        program: &Program<'_>,
        sms: u32,
        flight: &Arc<Flight>,
    ) -> Result<(), Error> {
        let ctas = u64::from(sms).min(program.batches()) as u32;
        let shared = if program.uses_tiles() { TILE_BYTES as u32 * WARPS as u32 } else { 0 };
        let fits = std::iter::zip(INLINE, &self.copy_inline).find(|fit| program.bytes() <= fit.0);
        if let Some((_, kernel)) = fits {
            let inline = self.inline.as_mut_ptr();
            let mut arguments = [inline.cast::<c_void>()];
            // SAFETY: there is room; the kernel takes one argument, not longer than that, which CUDA
            // copies during the call; the caller vouches for the addresses.
            return unsafe {
                program.write(inline.cast());
                self.stream.launch(kernel, (ctas, THREADS), shared, &mut arguments)
            };
        }
        let mut address = self.staging.put(program, &self.stream, flight)?;
        let mut arguments = [(&raw mut address).cast::<c_void>()];
        // SAFETY: the kernel takes one address, of the program that the stream has uploaded by then;
        // the caller vouches for the addresses in it.
        unsafe { self.stream.launch(&self.copy, (ctas, THREADS), shared, &mut arguments) }
    }
}

impl Table {
    fn shift(&self, region: &Region) -> Option<u64> {
        let at = self.spans.0.iter().position(|span| span == region)?;
        Some(self.shifts[at])
    }
}

impl Shared {
    /// The life of the thread that ends operations nobody polls, and those whose deadline has passed.
    /// It is in no hurry: whoever waits asks the card, and should not find it busy with answering here.
    fn watch(&self) {
        loop {
            let mut watched = lock(&self.watched);
            while watched.flights.is_empty() && !watched.closing {
                watched = self.changed.wait(watched).unwrap_or_else(PoisonError::into_inner);
            }
            if watched.closing && watched.flights.is_empty() {
                return;
            }
            drop(watched);
            std::thread::sleep(Duration::from_millis(1));
            let flights = lock(&self.watched).flights.clone();
            let ended: Vec<bool> = flights.iter().map(|flight| flight.look().is_safe()).collect();
            let mut watched = lock(&self.watched);
            let mut ended = ended.into_iter();
            // New ones were added at the end.
            watched.flights.retain(|_| !ended.next().unwrap_or(false));
        }
    }
}

impl Transport for Cuda {
    type Peer = CudaPeer;
    type Operation = CudaTransfer;

    fn name(&self) -> &'static str {
        "cuda"
    }

    unsafe fn register(&self, region: Region) -> Result<RegionId, Error> {
        let export = Export::new(&self.shared.card, region)?;
        let id = self.shared.regions.insert(region)?;
        lock(&self.shared.exports).insert(id, Arc::new(export));
        Ok(id)
    }

    fn deregister(&self, region: RegionId, deadline: Instant) -> Result<(), Error> {
        let gone = || {
            lock(&self.shared.exports).remove(&region);
        };
        self.shared.regions.remove(region, deadline, gone, || ()).map(|_| ())
    }

    fn describe(&self) -> Result<Vec<u8>, Error> {
        let exports: Vec<Arc<Export>> = lock(&self.shared.exports).values().cloned().collect();
        let card = self.shared.card.uuid();
        Ok(Description::write(self.shared.instance, card, exports.into_iter()))
    }

    fn connect(&self, description: &[u8], _: Instant) -> Result<CudaPeer, Error> {
        let description = Description::read(description)?;
        if !description.is_here() {
            return Err(Error::Unsupported(
                "the peer's GPU memory is on another host: the cuda transport works inside of one; \
                 use nixl"
                    .to_owned(),
            ));
        }
        let mut peers = lock(&self.shared.peers);
        let known = peers.iter().find(|peer| peer.0.instance == description.instance).cloned();
        if let Some(peer) = known {
            let before = peer.table();
            let table = self.table(&description, before.as_deref())?;
            *lock(&peer.0.table) = Some(Arc::new(table));
            return Ok(peer);
        }
        let table = self.table(&description, None)?;
        let peer = CudaPeer(Arc::new(Inner {
            instance: description.instance,
            pid: description.pid,
            table: Mutex::new(Some(Arc::new(table))),
        }));
        peers.push(peer.clone());
        Ok(peer)
    }

    fn disconnect(&self, peer: &CudaPeer) {
        lock(&self.shared.peers).retain(|other| !Arc::ptr_eq(&other.0, &peer.0));
        let flights = lock(&self.shared.watched).flights.clone();
        for flight in flights.iter().filter(|flight| flight.is_of(&peer.0)) {
            flight.stop(Error::Disconnected);
        }
        // Closes the peer's memory, unless a kernel still reads it: then when that has ended.
        drop(lock(&peer.0.table).take());
    }

    fn price(&self, _: &CudaPeer) -> Price {
        // A launch and its upload take 10 µs; then 1,500 GB/s; a run costs next to nothing.
        Price { launch: 10_000.0, copy: 0.1, byte: 1.0 / 1500.0 }
    }

    fn read(
        &self,
        peer: &CudaPeer,
        copies: &[ByteCopy],
        notification: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<CudaTransfer, Error> {
        let began = Instant::now();
        if notification.is_some() {
            return Err(unsupported("carries no notifications"));
        }
        let table = peer.table().ok_or(Error::Disconnected)?;
        let admitted = self.shared.regions.admit(copies, Direction::Read, &table.spans)?;
        let loops = grouped(&admitted.copies, &self.shared.regions.spans(), &table.spans)?;
        self.post(peer, &loops, copies.len() as u64, began, deadline)
    }

    fn read_loops(
        &self,
        peer: &CudaPeer,
        loops: &Loops,
        deadline: Instant,
    ) -> Result<CudaTransfer, Error> {
        self.post(peer, loops, loops.runs(), Instant::now(), deadline)
    }

    fn write(
        &self,
        _: &CudaPeer,
        _: &[ByteCopy],
        _: Option<&[u8]>,
        _: Instant,
    ) -> Result<CudaTransfer, Error> {
        Err(unsupported("only reads"))
    }

    fn notifications(&self, _: Instant) -> Result<Vec<Notification>, Error> {
        Err(unsupported("carries no notifications"))
    }

    fn statistics(&self) -> Statistics {
        self.shared.counters.read()
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        let flights = {
            let mut watched = lock(&self.shared.watched);
            watched.closing = true;
            watched.flights.clone()
        };
        for flight in &flights {
            flight.stop(Error::Disconnected);
        }
        // Kernels end by themselves; nothing lands after this.
        if let Err(error) = lock(&self.shared.line).stream.synchronize() {
            tracing::warn!("the GPU does not say whether copies have ended: {error}");
        }
        self.shared.changed.notify_one();
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
        lock(own_instances()).remove(&self.shared.instance);
        let peers = std::mem::take(&mut *lock(&self.shared.peers));
        for peer in peers {
            drop(lock(&peer.0.table).take());
        }
    }
}

fn unsupported(what: &str) -> Error {
    Error::Unsupported(format!("the cuda transport {what}"))
}

/// A list of copies as loops: those of one length between the same two regions share a nest, whose
/// "blocks" are places in the regions. Copies must lie in regions of both sides.
fn grouped(copies: &[ByteCopy], local: &Spans, peer: &Spans) -> Result<Loops, Error> {
    let mut groups: BTreeMap<(usize, usize, u64, u32), Vec<&ByteCopy>> = BTreeMap::new();
    let (mut ours, mut theirs) = (0, 0);
    for copy in copies {
        let find = |spans: &Spans, side, address, hint| {
            let outside = Error::OutsideRegion { side, address, bytes: copy.bytes };
            spans.find(address, copy.bytes, hint).ok_or(outside)
        };
        ours = find(local, Side::Local, copy.destination, ours)?;
        theirs = find(peer, Side::Peer, copy.source, theirs)?;
        // In units that are as large as alignment allows, counted from the regions' starts.
        let offsets = (copy.source - peer.0[theirs].base) | (copy.destination - local.0[ours].base);
        let unit = offsets.trailing_zeros().min(12);
        groups.entry((ours, theirs, copy.bytes, unit)).or_default().push(copy);
    }
    let mut loops = Loops::default();
    for ((ours, theirs, bytes, unit), group) in groups {
        // Where a place has too large a number, the copies go one by one.
        let (from, to) = (peer.0[theirs].base, local.0[ours].base);
        let number = |address: u64, base: u64| u32::try_from((address - base) >> unit).ok();
        let pairs: Option<Vec<BlockPair>> = group
            .iter()
            .map(|copy| {
                Some(BlockPair {
                    source: number(copy.source, from)?,
                    destination: number(copy.destination, to)?,
                })
            })
            .collect();
        let failed = |error: kvferry_layout::LoopsError| Error::Unsupported(error.to_string());
        if let Some(pairs) = pairs {
            let table = loops.add_table(pairs);
            loops
                .add_nest((from, to), bytes, (1 << unit, 1 << unit), &[], table)
                .map_err(failed)?;
            continue;
        }
        let table = loops.add_table([BlockPair::default()]);
        for copy in group {
            let start = (copy.source, copy.destination);
            loops.add_nest(start, bytes, (0, 0), &[], table).map_err(failed)?;
        }
    }
    Ok(loops)
}

#[cfg(test)]
mod tests;
