//! A small engine for tests: real memory, real agents, one state whose every byte is known.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part of it")]

use std::collections::VecDeque;
use std::fmt;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use kvferry_agent::{
    BlockTable, Carrier, Ending, Load, Notice, Outcome, Released, Scheduler, SchedulerOptions,
    Source, Ticket, Worker, WorkerOptions, carry,
};
use kvferry_layout::{
    Axis, Draft, Format, Group, Kind, Law, Manifest, Phase, Piece, Place, Region, StateBox, View,
    Window,
};
use kvferry_transport::local::{Local, LocalOptions};
use kvferry_transport::tcp::{Tcp, TcpOptions};
use kvferry_transport::{ByteCopy, Error, Operation, Price, Report, Status, Transport};

pub const HEADS: u64 = 4;
pub const DIM: u64 = 64;
pub const TOKENS_PER_BLOCK: u64 = 4;
pub const BLOCKS: u32 = 64;
/// What memory holds that nobody has written.
pub const UNTOUCHED: u8 = 0xEE;
/// Long enough for whatever must happen; a test that gets here has failed.
pub const LONG: Duration = Duration::from_secs(60);

/// A pool of one rank.
pub struct Memory {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: a plain span of memory, accessed by volatile reads and writes alone; tests and transports
// write it from several threads on purpose.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new(bytes: usize) -> Arc<Self> {
        let base = Box::leak(vec![UNTOUCHED; bytes].into_boxed_slice()).as_mut_ptr();
        Arc::new(Self { base, bytes })
    }

    pub fn base(&self) -> u64 {
        self.base as u64
    }

    pub fn read(&self, offset: usize) -> u8 {
        assert!(offset < self.bytes);
        // SAFETY: inside the span, which is never freed.
        unsafe { self.base.add(offset).read_volatile() }
    }

    pub fn write(&self, offset: usize, value: u8) {
        assert!(offset < self.bytes);
        // SAFETY: inside the span, which is never freed.
        unsafe { self.base.add(offset).write_volatile(value) }
    }

    pub fn fill(&self, value: u8) {
        (0..self.bytes).for_each(|offset| self.write(offset, value));
    }
}

/// One rank of an engine.
pub struct Rank {
    pub worker: Worker,
    pub memory: Arc<Memory>,
    pub heads: std::ops::Range<u64>,
    pub held: Option<Arc<Held>>,
}

/// An engine.
pub struct Engine {
    pub scheduler: Scheduler,
    pub ranks: Vec<Rank>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum By {
    Tcp,
    Local,
    /// Reads that do what the test says.
    Held,
}

/// How a test engine is made.
pub struct Recipe {
    pub name: &'static str,
    pub tp: u64,
    pub by: By,
    pub model: &'static str,
    pub scheduler: SchedulerOptions,
    pub worker: WorkerOptions,
    /// The manifest claims this much more memory than there is.
    pub lie: u64,
}

impl Recipe {
    pub fn new(name: &'static str, tp: u64) -> Self {
        Self {
            name,
            tp,
            by: By::Tcp,
            model: "tiny",
            scheduler: SchedulerOptions::new(name),
            worker: WorkerOptions::new(tp as u32),
            lie: 0,
        }
    }

    pub fn by(mut self, by: By) -> Self {
        self.by = by;
        self
    }

    pub fn term(mut self, term: Duration) -> Self {
        self.scheduler.term = term;
        self
    }

    pub fn trust(mut self, trust: kvferry_agent::Trust) -> Self {
        self.scheduler.trust = trust.clone();
        self.worker.trust = trust;
        self
    }

    pub fn start(self) -> Engine {
        let scheduler = Scheduler::start(self.scheduler).unwrap();
        let heads = HEADS / self.tp;
        let ranks = (0..self.tp).map(|rank| {
            let block = TOKENS_PER_BLOCK * heads * DIM;
            let memory = Memory::new((block * u64::from(BLOCKS)) as usize);
            let mut draft = draft(self.name, self.model, rank, heads, &memory);
            let region = Region::host(memory.base(), memory.bytes as u64);
            let mut held = None;
            let carrier = match self.by {
                By::Tcp => {
                    let transport = Tcp::new(TcpOptions::default()).unwrap();
                    // SAFETY: test memory is never freed, and accessed without references.
                    unsafe { transport.register(region) }.unwrap();
                    carry(Arc::new(transport))
                }
                By::Local => {
                    let transport = Local::new(LocalOptions::default()).unwrap();
                    // SAFETY: as above.
                    unsafe { transport.register(region) }.unwrap();
                    carry(Arc::new(transport))
                }
                By::Held => {
                    held = Some(Arc::new(Held::default()));
                    held.clone().unwrap() as Arc<dyn Carrier>
                }
            };
            draft.regions[0].bytes += self.lie;
            draft.groups[0].blocks += (self.lie / block) as u32;
            let manifest = Manifest::new(draft).unwrap();
            let worker = Worker::start(self.worker.clone(), manifest, carrier).unwrap();
            Rank { worker, memory, heads: rank * heads..(rank + 1) * heads, held }
        });
        let ranks: Vec<Rank> = ranks.collect();
        let engine = Engine { scheduler, ranks };
        engine.publish();
        engine
    }
}

fn draft(engine: &str, model: &str, rank: u64, heads: u64, memory: &Memory) -> Draft {
    Draft {
        identity: [("model".to_owned(), model.to_owned())].into(),
        engine: engine.to_owned(),
        rank: rank as u32,
        label: format!("tp{rank}"),
        regions: vec![Region {
            base: memory.base(),
            bytes: memory.bytes as u64,
            place: Place::Host,
        }],
        kinds: vec![Kind {
            format: Format::new("u8", 1),
            axes: vec![Axis::new("head", HEADS), Axis::new("dim", DIM)],
            law: Law::PER_TOKEN,
        }],
        groups: vec![Group {
            name: "attention".to_owned(),
            blocks: BLOCKS,
            null_block: None,
            tokens_per_block: Some(TOKENS_PER_BLOCK),
            window: Window::FULL,
            pieces: vec![Piece {
                state: "layers.0/kv".to_owned(),
                kind: 0,
                bounds: StateBox::new([rank * heads..(rank + 1) * heads, 0..DIM]),
                phase: Phase::ALL,
                need: None,
                view: View {
                    region: 0,
                    offset: 0,
                    block: TOKENS_PER_BLOCK * heads * DIM,
                    kernel: None,
                    entry: heads * DIM,
                    axes: vec![DIM, 1],
                },
            }],
            scratch: vec![],
        }],
    }
}

/// The byte of a request at a place, free of any parallelism; never [`UNTOUCHED`].
pub fn value(request: u64, token: u64, head: u64, dim: u64) -> u8 {
    let mixed = request
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .wrapping_add(token * 0x1_0003 + head * 0x101 + dim)
        .wrapping_mul(0xD6E8_FEB8_6659_FD93);
    ((mixed >> 40) % 200) as u8
}

impl Rank {
    fn offset(&self, blocks: &[u32], token: u64, head: u64, dim: u64) -> usize {
        let heads = self.heads.end - self.heads.start;
        let block = u64::from(blocks[(token / TOKENS_PER_BLOCK) as usize]);
        let place = (block * TOKENS_PER_BLOCK + token % TOKENS_PER_BLOCK) * heads;
        ((place + head - self.heads.start) * DIM + dim) as usize
    }

    fn places(&self, tokens: u64) -> impl Iterator<Item = (u64, u64, u64)> + use<> {
        let heads = self.heads.clone();
        (0..tokens).flat_map(move |token| {
            heads.clone().flat_map(move |head| (0..DIM).map(move |dim| (token, head, dim)))
        })
    }

    /// Bytes of a request that are not what they should be.
    pub fn wrong(&self, request: u64, blocks: &[u32], tokens: u64) -> usize {
        let wrong = |(token, head, dim): &(u64, u64, u64)| {
            self.memory.read(self.offset(blocks, *token, *head, *dim))
                != value(request, *token, *head, *dim)
        };
        self.places(tokens).filter(wrong).count()
    }

    /// Bytes that were ever written.
    pub fn touched(&self) -> usize {
        (0..self.memory.bytes).filter(|offset| self.memory.read(*offset) != UNTOUCHED).count()
    }

    pub fn wait_end(&self, request: &str) -> Ending {
        let until = Instant::now() + LONG;
        while Instant::now() < until {
            for notice in self.worker.wait(until) {
                match notice {
                    Notice::Ended(ending) if ending.request == request => return ending,
                    // Of a request before.
                    Notice::Settled { .. } => {}
                    other => panic!("unexpected: {other:?}"),
                }
            }
        }
        panic!("request '{request}' never ended");
    }
}

pub fn blocks_for(tokens: u64, first: u32) -> Vec<u32> {
    (first..first + tokens.div_ceil(TOKENS_PER_BLOCK) as u32).collect()
}

pub fn table(blocks: &[u32]) -> Vec<BlockTable> {
    vec![BlockTable { first: 0, blocks: blocks.to_vec() }]
}

impl Engine {
    pub fn publish(&self) {
        let cards = self.ranks.iter().map(|rank| rank.worker.card().unwrap()).collect();
        self.scheduler.publish(cards).unwrap();
    }

    /// What prefill leaves in the blocks of a request.
    pub fn prefill(&self, request: u64, blocks: &[u32], tokens: u64) {
        for rank in &self.ranks {
            for (token, head, dim) in rank.places(tokens) {
                let offset = rank.offset(blocks, token, head, dim);
                rank.memory.write(offset, value(request, token, head, dim));
            }
        }
    }

    pub fn start_load(
        &self,
        name: &str,
        ticket: &Ticket,
        source: &[u32],
        destination: &[u32],
        tokens: u64,
        patience: Duration,
    ) {
        for rank in &self.ranks {
            rank.worker
                .load(Load {
                    request: name.to_owned(),
                    ticket: ticket.clone(),
                    tokens,
                    cached: vec![0],
                    source: table(source),
                    destination: table(destination),
                    patience,
                    rest: false,
                })
                .unwrap();
        }
    }

    /// How a request ended on each rank.
    pub fn wait_ends(&self, name: &str) -> Vec<Outcome> {
        self.ranks.iter().map(|rank| rank.wait_end(name).outcome).collect()
    }

    pub fn wait_released(&self) -> Released {
        let released = self.scheduler.wait_released(Instant::now() + LONG);
        assert_eq!(released.len(), 1, "{released:?}");
        released[0].clone()
    }
}

/// Waits for something to become so.
pub fn eventually(what: &str, so: impl Fn() -> bool) {
    let until = Instant::now() + LONG;
    while !so() {
        assert!(Instant::now() < until, "never happened: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// A transport in one process whose reads do what a test says.
#[derive(Debug, Default)]
pub struct Held {
    /// Reads in the order in which they were asked for.
    pub reads: Arc<Mutex<VecDeque<Arc<HeldRead>>>>,
}

/// A read under a test's control.
#[derive(Debug)]
pub struct HeldRead {
    pub copies: Vec<ByteCopy>,
    pub cancelled: AtomicBool,
    status: Mutex<Status>,
}

impl Held {
    pub fn next(&self) -> Arc<HeldRead> {
        let taken = Mutex::new(None);
        eventually("a read", || {
            let mut taken = taken.lock().unwrap();
            *taken = self.reads.lock().unwrap().pop_front();
            taken.is_some()
        });
        taken.into_inner().unwrap().unwrap()
    }
}

impl HeldRead {
    /// Part of the bytes land: `from` to `to` of the copies.
    pub fn land(&self, from: usize, to: usize) {
        for copy in &self.copies[from..to] {
            // SAFETY: plans name only addresses of test memory, which is never freed and accessed
            // without references.
            unsafe {
                std::ptr::copy(
                    copy.source as *const u8,
                    copy.destination as *mut u8,
                    copy.bytes as usize,
                );
            }
        }
    }

    pub fn finish(&self) {
        *self.status.lock().unwrap() = Status::Done(Report::default());
    }

    pub fn settle(&self, error: Error) {
        *self.status.lock().unwrap() = Status::Failed(error);
    }
}

impl Carrier for Held {
    fn name(&self) -> &'static str {
        "held"
    }

    fn describe(&self) -> Result<Vec<u8>, Error> {
        Ok(vec![])
    }

    fn connect(&self, _: &[u8], _: Instant) -> Result<Box<dyn Source>, Error> {
        Ok(Box::new(HeldSource(self.reads.clone())))
    }
}

#[derive(Debug)]
struct HeldSource(Arc<Mutex<VecDeque<Arc<HeldRead>>>>);

impl Source for HeldSource {
    fn price(&self) -> Price {
        Price { launch: 0.0, copy: 512.0, byte: 0.125 }
    }

    fn read(&self, copies: &[ByteCopy], _: Instant) -> Result<Box<dyn Operation>, Error> {
        let read = Arc::new(HeldRead {
            copies: copies.to_vec(),
            cancelled: AtomicBool::new(false),
            status: Mutex::new(Status::InProgress),
        });
        self.0.lock().unwrap().push_back(read.clone());
        Ok(Box::new(HeldOperation(read)))
    }

    fn disconnect(&self) {}
}

struct HeldOperation(Arc<HeldRead>);

impl fmt::Debug for HeldOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HeldOperation")
    }
}

impl Operation for HeldOperation {
    fn poll(&self) -> Status {
        self.0.status.lock().unwrap().clone()
    }

    fn wait(&self, until: Instant) -> Status {
        while !self.poll().is_safe() && Instant::now() < until {
            thread::sleep(Duration::from_micros(100));
        }
        self.poll()
    }

    /// As NIXL does it: asked to stop, it may still land.
    fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::SeqCst);
        let mut status = self.0.status.lock().unwrap();
        if !status.is_safe() {
            *status = Status::Quarantined(Error::Cancelled);
        }
    }
}

/// A wire between two agents that a test can cut, stop, listen to and tamper with.
pub struct Wire {
    pub address: String,
    state: Arc<WireState>,
}

#[derive(Default)]
struct WireState {
    stopped: AtomicBool,
    ended: AtomicBool,
    /// The client's bytes after this many are altered by one bit; 0: none.
    flip: AtomicU64,
    open: Mutex<Vec<TcpStream>>,
    /// What clients said, one record for each connection.
    heard: Mutex<Vec<Arc<Mutex<Vec<u8>>>>>,
}

impl Wire {
    pub fn to(address: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = listener.local_addr().unwrap().to_string();
        let state = Arc::new(WireState::default());
        let (there, shared) = (address.to_owned(), state.clone());
        thread::spawn(move || {
            for client in listener.incoming() {
                if shared.ended.load(Ordering::SeqCst) {
                    return;
                }
                let client = client.unwrap();
                let Ok(server) = TcpStream::connect(&there) else { continue };
                let heard: Arc<Mutex<Vec<u8>>> = Arc::default();
                shared.heard.lock().unwrap().push(heard.clone());
                let mut open = shared.open.lock().unwrap();
                open.push(client.try_clone().unwrap());
                open.push(server.try_clone().unwrap());
                let (a, b) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let state = shared.clone();
                thread::spawn(move || pump(a, b, &state, Some(&heard)));
                let state = shared.clone();
                thread::spawn(move || pump(server, client, &state, None));
            }
        });
        Self { address: own, state }
    }

    /// Bytes are held back, in both directions, until [`go`](Self::go).
    pub fn stop(&self) {
        self.state.stopped.store(true, Ordering::SeqCst);
    }

    pub fn go(&self) {
        self.state.stopped.store(false, Ordering::SeqCst);
    }

    /// Ends the connections of this moment.
    pub fn cut(&self) {
        for stream in self.state.open.lock().unwrap().drain(..) {
            _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// One bit of what the next client says is altered after so many bytes.
    pub fn flip_after(&self, bytes: u64) {
        self.state.flip.store(bytes, Ordering::SeqCst);
    }

    pub fn heard(&self) -> Vec<Vec<u8>> {
        let heard = self.state.heard.lock().unwrap();
        heard.iter().map(|one| one.lock().unwrap().clone()).collect()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::SeqCst);
        self.go();
        self.cut();
        _ = TcpStream::connect(&self.address);
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, state: &WireState, heard: Option<&Mutex<Vec<u8>>>) {
    let mut buffer = [0; 4096];
    let mut passed = 0;
    loop {
        let n = match from.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(n) => n,
        };
        while state.stopped.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        if let Some(heard) = heard {
            heard.lock().unwrap().extend(&buffer[..n]);
            let flip = state.flip.load(Ordering::SeqCst);
            if flip > 0 && (passed..passed + n as u64).contains(&flip) {
                buffer[(flip - passed) as usize] ^= 1;
                state.flip.store(0, Ordering::SeqCst);
            }
        }
        passed += n as u64;
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    _ = from.shutdown(Shutdown::Both);
    _ = to.shutdown(Shutdown::Both);
}
