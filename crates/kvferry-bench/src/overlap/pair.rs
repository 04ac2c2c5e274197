//! A prefill and a decode engine of one rank each, in this process, and a request between them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use kvferry_agent::{
    BlockTable, Carrier, Grant, InFlight, Load, Notice, Outcome, Scheduler, SchedulerOptions,
    Ticket, Worker, WorkerOptions, carry,
};
use kvferry_layout::{
    Draft, Format, Group, Kind, Law, Manifest, Phase, Piece, StateBox, View, Window,
};
use kvferry_transport::Transport;
use kvferry_transport::memory::HostMemory;
use kvferry_transport::tcp::{Tcp, TcpOptions};

use super::link::{Limited, Link};
use crate::Failure;
use crate::memory::{fill, zeros};

const LAYERS: u64 = 32;
/// Of one layer.
const ENTRY: u64 = 256;
const BLOCK: u64 = 16;
pub(super) const BYTES_PER_TOKEN: u64 = LAYERS * ENTRY;
const PATIENCE: Duration = Duration::from_secs(120);

/// What prefill does with a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prefill {
    pub(super) tokens: u64,
    /// In a second.
    pub(super) speed: u64,
    /// Tokens of a chunk.
    pub(super) chunk: u64,
}

/// How a request is handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Decode reads when prefill has ended.
    Sequential,
    /// It reads what is complete while prefill computes the rest.
    Following,
    /// And, of the chunk that is computed, the layers that are written.
    ByLayer,
}

/// How long a request took.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    /// From prefill's last token to decode's last byte, confirmed.
    pub(super) exposed: Duration,
    /// From prefill's start to that.
    pub(super) total: Duration,
}

pub(super) struct Pair {
    prefill: Engine,
    decode: Engine,
    /// The last step that prefill has begun.
    step: AtomicU64,
    link: Arc<Link>,
    /// For a request of the longest length.
    source: Vec<u32>,
    destination: Vec<u32>,
}

/// Dropped in this order.
struct Engine {
    scheduler: Scheduler,
    worker: Worker,
    memory: HostMemory,
}

impl Pair {
    /// Engines with room for one request of so many tokens.
    pub(super) fn start(longest: u64) -> Result<Self, Failure> {
        let blocks = u32::try_from(longest.div_ceil(BLOCK))?;
        let link = Link::new();
        let prefill = Engine::start("prefill", blocks, &link)?;
        let decode = Engine::start("decode", blocks, &link)?;
        fill(&prefill.memory, 7);
        // Neighbours on one side are none on the other: every block is a copy of its own.
        let (source, destination) = ((0..blocks).collect(), (0..blocks).rev().collect());
        Ok(Self { prefill, decode, step: AtomicU64::new(0), link, source, destination })
    }

    /// Hands one request over, and compares every byte.
    pub(super) fn hand_over(
        &self,
        work: &Prefill,
        way: Way,
        rate: Option<f64>,
    ) -> Result<Times, Failure> {
        fill(&self.decode.memory, 0);
        self.link.limit(rate);
        let began = Instant::now();
        let scheduler = &self.prefill.scheduler;
        let ticket = scheduler.open("request", None)?;
        if way != Way::Sequential {
            self.load(&ticket, None, work.tokens)?;
        }
        let mut tokens = 0;
        while tokens < work.tokens {
            let before = tokens;
            tokens = (tokens + work.chunk).min(work.tokens);
            let at = |tokens: f64| began + Duration::from_secs_f64(tokens / work.speed as f64);
            if way == Way::ByLayer {
                let step = self.step.fetch_add(1, Ordering::Relaxed) + 1;
                let (tables, in_flight) = (self.granted(tokens).tables, InFlight { step, tokens });
                scheduler.advance_with("request", before, tables, &[in_flight])?;
                self.prefill.worker.begin_step(step);
                for layer in 1..=LAYERS {
                    let share = layer as f64 / LAYERS as f64;
                    let written = at(before as f64 + (tokens - before) as f64 * share);
                    sleep(written.saturating_duration_since(Instant::now()));
                    self.prefill.worker.wrote(step, [state(layer - 1)]);
                }
            } else {
                sleep(at(tokens as f64).saturating_duration_since(Instant::now()));
                if tokens < work.tokens {
                    scheduler.advance("request", tokens, self.granted(tokens).tables)?;
                }
            }
        }
        let last_token = Instant::now();
        scheduler.grant("request", self.granted(work.tokens))?;
        if way == Way::Sequential {
            let granted =
                scheduler.granted("request").ok_or("the lease ended before it was read")?;
            self.load(&ticket, Some(granted), work.tokens)?;
        }
        for notice in self.decode.worker.wait(Instant::now() + PATIENCE) {
            let now = Instant::now();
            let Notice::Ended(ending) = notice else { continue };
            if ending.outcome != Outcome::Done {
                return Err(format!("a request was not read: {:?}", ending.outcome).into());
            }
            self.compare(work.tokens)?;
            scheduler.wait_released(Instant::now() + PATIENCE);
            return Ok(Times { exposed: now - last_token, total: now - began });
        }
        Err("a request was never read".into())
    }

    fn granted(&self, tokens: u64) -> Grant {
        let blocks = self.source[..tokens.div_ceil(BLOCK) as usize].to_vec();
        Grant { epoch: 0, tokens, tables: vec![BlockTable { first: 0, blocks }] }
    }

    fn load(&self, ticket: &Ticket, grant: Option<Grant>, tokens: u64) -> Result<(), Failure> {
        let blocks = self.destination[..tokens.div_ceil(BLOCK) as usize].to_vec();
        let tables = vec![BlockTable { first: 0, blocks }];
        let load = Load::new("request", ticket.clone(), tokens, tables).granted(grant);
        Ok(self.decode.worker.load(load.within(PATIENCE, PATIENCE))?)
    }

    fn compare(&self, tokens: u64) -> Result<(), Failure> {
        let blocks = self.source.len() as u64;
        for layer in 0..LAYERS {
            for (at, (from, to)) in self.source.iter().zip(&self.destination).enumerate() {
                let left = tokens.saturating_sub(at as u64 * BLOCK).min(BLOCK);
                let place = |id: u32| ((layer * blocks + u64::from(id)) * BLOCK * ENTRY) as usize;
                let bytes = (left * ENTRY) as usize;
                let there = self.prefill.memory.read(place(*from), bytes);
                if self.decode.memory.read(place(*to), bytes) != there {
                    return Err(format!("wrong bytes in block {at} of layer {layer}").into());
                }
            }
        }
        Ok(())
    }
}

impl Engine {
    fn start(name: &str, blocks: u32, link: &Arc<Link>) -> Result<Self, Failure> {
        let memory = zeros((u64::from(blocks) * BLOCK * BYTES_PER_TOKEN) as usize)?;
        let transport = Tcp::new(TcpOptions::default())?;
        // SAFETY: the memory is dropped after the worker, which ends the transport.
        unsafe { transport.register(memory.region()) }?;
        let inner: Arc<dyn Carrier> = carry(Arc::new(transport));
        let carrier = Arc::new(Limited { inner, link: link.clone() });
        let manifest = Manifest::new(draft(name, blocks, &memory))?;
        let worker = Worker::start(WorkerOptions::new(1), manifest, carrier)?;
        let scheduler = Scheduler::start(SchedulerOptions::new(name))?;
        scheduler.publish(vec![worker.card()?])?;
        Ok(Self { scheduler, worker, memory })
    }
}

fn state(layer: u64) -> String {
    format!("layers.{layer}/kv")
}

fn draft(engine: &str, blocks: u32, memory: &HostMemory) -> Draft {
    let block = BLOCK * ENTRY;
    let pieces = (0..LAYERS).map(|layer| Piece {
        state: state(layer),
        kind: 0,
        bounds: StateBox::default(),
        phase: Phase::ALL,
        need: None,
        view: View {
            region: 0,
            offset: layer * u64::from(blocks) * block,
            block,
            kernel: None,
            entry: ENTRY,
            axes: vec![],
        },
    });
    Draft {
        engine: engine.to_owned(),
        regions: vec![memory.region()],
        kinds: vec![Kind {
            format: Format::new("opaque", ENTRY as u32),
            axes: vec![],
            law: Law::PER_TOKEN,
        }],
        groups: vec![Group {
            name: "attention".to_owned(),
            blocks,
            null_block: None,
            tokens_per_block: Some(BLOCK),
            window: Window::FULL,
            pieces: pieces.collect(),
            scratch: vec![],
        }],
        ..Draft::default()
    }
}
