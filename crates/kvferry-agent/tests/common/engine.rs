//! An engine of a few ranks, and what it does with a request.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_agent::{
    Audit, Carrier, Ending, Grant, Load, Notice, Outcome, Released, Scheduler, SchedulerOptions,
    Ticket, Worker, WorkerOptions, carry,
};
use kvferry_layout::{
    Axis, Draft, Format, Group, Kind, Law, Manifest, Phase, Piece, Place, Region, StateBox, View,
    Window,
};
use kvferry_nixl::{Nixl, NixlOptions};
use kvferry_transport::Transport;
use kvferry_transport::local::{Local, LocalOptions};
use kvferry_transport::tcp::{Tcp, TcpOptions};

use super::faulty::{Faulty, Switch};
use super::held::{Held, Refusal};
use super::looping::Looping;
use super::memory::{Memory, UNTOUCHED};
use super::{BLOCKS, DIM, HEADS, LONG, TOKENS_PER_BLOCK, blocks_for, granted, table, value};

/// One rank of an engine.
pub struct Rank {
    pub worker: Worker,
    pub memory: Arc<Memory>,
    pub heads: Range<u64>,
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
    Nixl,
    /// Loops, and never lists.
    Looping,
    /// Reads that do what the test says.
    Held,
}

/// How a test engine is made.
pub struct Recipe {
    pub name: &'static str,
    pub tp: u64,
    pub by: By,
    pub tcp: TcpOptions,
    pub model: &'static str,
    pub scheduler: SchedulerOptions,
    pub worker: WorkerOptions,
    /// The manifest claims this much more memory than there is.
    pub lie: u64,
    /// Within a block all tokens of a head lie together, not all heads of a token.
    pub by_head: bool,
    /// Every rank holds all heads.
    pub replicated: bool,
    /// Whether its transport can be made to do wrong, by the switch.
    pub faulty: bool,
    pub switch: Switch,
    /// Which ranks cannot be connected to, where they are [`By::Held`].
    pub refuses: fn(u64) -> Option<Refusal>,
}

impl Recipe {
    pub fn new(name: &'static str, tp: u64) -> Self {
        let mut scheduler = SchedulerOptions::new(name);
        scheduler.term = LONG * 2;
        // Audits are what some tests are about; the others are about what comes before and after. What is tiny takes no
        // time, and is read all the same.
        let mut worker = WorkerOptions::new(tp as u32);
        (worker.audit, worker.least_ahead, worker.handshake) = (Audit::OFF, Duration::ZERO, LONG);
        Self {
            name,
            tp,
            by: By::Tcp,
            tcp: TcpOptions::default(),
            model: "tiny",
            scheduler,
            worker,
            lie: 0,
            by_head: false,
            replicated: false,
            faulty: false,
            switch: Switch::default(),
            refuses: |_| None,
        }
    }

    pub fn audit(mut self, audit: Audit) -> Self {
        self.worker.audit = audit;
        self
    }

    pub fn by(mut self, by: By) -> Self {
        self.by = by;
        self
    }

    pub fn term(mut self, term: Duration) -> Self {
        self.scheduler.term = term;
        self
    }

    /// Listens there.
    pub fn at(mut self, address: SocketAddr) -> Self {
        self.scheduler.bind = address;
        self
    }

    pub fn trust(mut self, trust: kvferry_agent::Trust) -> Self {
        self.scheduler.trust = trust.clone();
        self.worker.trust = trust;
        self
    }

    pub fn start(self) -> Engine {
        let scheduler = Scheduler::start(self.scheduler).unwrap();
        let heads = if self.replicated { HEADS } else { HEADS / self.tp };
        let ranks = (0..self.tp).map(|rank| {
            let block = TOKENS_PER_BLOCK * heads * DIM;
            let memory = Memory::new((block * u64::from(BLOCKS)) as usize);
            let first = if self.replicated { 0 } else { rank * heads };
            let mut draft = draft(self.name, self.model, rank, first..first + heads, &memory);
            let region = Region::host(memory.base(), memory.bytes as u64);
            let mut held = None;
            let carrier = match self.by {
                By::Tcp => {
                    let transport = Tcp::new(self.tcp.clone()).unwrap();
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
                By::Nixl => {
                    // On a fresh machine it is not there yet.
                    if std::env::var_os("KVFERRY_NIXL").is_none() {
                        kvferry_nixl::install(None).unwrap();
                    }
                    let transport = Nixl::new(&NixlOptions::default()).unwrap();
                    // SAFETY: as above.
                    unsafe { transport.register(region) }.unwrap();
                    carry(Arc::new(transport))
                }
                By::Looping => Arc::new(Looping),
                By::Held => {
                    held = Some(Arc::new(Held::new((self.refuses)(rank))));
                    held.clone().unwrap() as Arc<dyn Carrier>
                }
            };
            let carrier: Arc<dyn Carrier> = match self.by {
                By::Tcp | By::Local | By::Nixl if self.faulty => {
                    let (switch, older) = (self.switch.clone(), 30 * block);
                    Arc::new(Faulty { inner: carrier, switch, older })
                }
                _ => carrier,
            };
            if self.by_head {
                let view = &mut draft.groups[0].pieces[0].view;
                (view.entry, view.axes) = (DIM, vec![TOKENS_PER_BLOCK * DIM, 1]);
            }
            draft.regions[0].bytes += self.lie;
            draft.groups[0].blocks += (self.lie / block) as u32;
            let manifest = Manifest::new(draft).unwrap();
            let worker = Worker::start(self.worker.clone(), manifest, carrier).unwrap();
            Rank { worker, memory, heads: first..first + heads, held }
        });
        let ranks: Vec<Rank> = ranks.collect();
        let engine = Engine { scheduler, ranks };
        engine.publish();
        engine
    }
}

fn draft(engine: &str, model: &str, rank: u64, held: Range<u64>, memory: &Memory) -> Draft {
    let heads = held.end - held.start;
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
        writers: Default::default(),
        groups: vec![Group {
            name: "attention".to_owned(),
            blocks: BLOCKS,
            null_block: None,
            tokens_per_block: Some(TOKENS_PER_BLOCK),
            window: Window::FULL,
            pieces: vec![Piece {
                state: "layers.0/kv".to_owned(),
                kind: 0,
                bounds: StateBox::new([held, 0..DIM]),
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

/// A load of all that was granted.
pub fn load(name: &str, ticket: &Ticket, grant: Grant, destination: &[u32]) -> Load {
    let load = Load::new(name, ticket.clone(), grant.tokens, table(destination));
    load.granted(grant).within(LONG, LONG)
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

    /// Promises to keep so many tokens in these blocks.
    pub fn grant(&self, name: &str, blocks: &[u32], tokens: u64) -> Ticket {
        self.scheduler.grant(name, granted(blocks, tokens)).unwrap()
    }

    pub fn start_load(
        &self,
        name: &str,
        ticket: &Ticket,
        source: &[u32],
        destination: &[u32],
        tokens: u64,
        deadline: Duration,
    ) {
        let load = load(name, ticket, granted(source, tokens), destination);
        self.load(&load.within(deadline, LONG));
    }

    /// Starts a load on every rank.
    pub fn load(&self, load: &Load) {
        for rank in &self.ranks {
            rank.worker.load(load.clone()).unwrap();
        }
    }

    /// Hands a request over to `d` by the address that it is given. Where all goes well, every byte is
    /// right, and no other byte has changed that was [`UNTOUCHED`] before.
    pub fn hand_over(&self, d: &Self, name: &str, tokens: u64, address: &str) -> Vec<Outcome> {
        let (source, destination) = (blocks_for(tokens, 3), blocks_for(tokens, 9));
        self.prefill(7, &source, tokens);
        let mut ticket = self.grant(name, &source, tokens);
        ticket.address = address.to_owned();
        d.start_load(name, &ticket, &source, &destination, tokens, LONG);
        let outcomes = d.wait_ends(name);
        for (outcome, rank) in outcomes.iter().zip(&d.ranks) {
            if *outcome == Outcome::Done {
                assert_eq!(rank.wrong(7, &destination, tokens), 0);
                let written = tokens * (rank.heads.end - rank.heads.start) * DIM;
                assert_eq!(rank.touched() as u64, written, "nothing else changed");
            }
        }
        outcomes
    }

    /// A counter among the scheduler's metrics.
    pub fn counter(&self, name: &str) -> u64 {
        let counts = self.scheduler.counts();
        counts.into_iter().find(|(counter, _)| counter == name).unwrap().1
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
