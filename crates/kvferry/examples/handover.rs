//! Two engines in one program: the first has read a prompt, the second takes it over.
//!
//! ```text
//! cargo run -p kvferry --example handover
//! ```
//!
//! The prefill engine has one rank and blocks of 4 tokens. The decode engine has two ranks, which share
//! the heads, and blocks of 8 tokens. Nothing in the program says how one layout maps to the other: each
//! rank describes its own memory, and that is enough.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use kvferry::manifest::{
    Axis, Draft, Format, Group, Kind, Law, Phase, Piece, StateBox, View, Window,
};
use kvferry::{
    BlockTable, Grant, Load, Manifest, Notice, Outcome, Region, Scheduler, SchedulerOptions,
    TransportOptions, Worker, WorkerOptions,
};

/// The model: one layer with four heads, whose keys and values take 32 bytes a head and token.
const HEADS: u64 = 4;
const WIDTH: u64 = 32;
/// Blocks in every rank's pool.
const BLOCKS: u32 = 10;
/// Long enough for anything here; nothing waits without a limit.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    let prefill = Engine::start("prefill", 1, 4)?;
    let decode = Engine::start("decode", 2, 8)?;

    // Prefill reads a prompt of 6 tokens, which ends up in its blocks 7 and 2.
    let tokens = 6;
    prefill.write(tokens, &[7, 2]);

    // It promises to keep them. A router would carry the ticket and what it grants to decode.
    let tables = vec![BlockTable { first: 0, blocks: vec![7, 2] }];
    let grant = Grant { epoch: 0, tokens, tables };
    let ticket = prefill.scheduler.grant("request-1", grant.clone())?;

    // Decode keeps the promise alive while the request waits, and gives it block 3.
    decode.scheduler.hold(&ticket, PATIENCE);
    for rank in &decode.ranks {
        let destination = vec![BlockTable { first: 0, blocks: vec![3] }];
        let load = Load::new("request-1", ticket.clone(), tokens, destination);
        rank.worker.load(load.granted(grant.clone()).within(PATIENCE, PATIENCE))?;
    }
    for (number, rank) in decode.ranks.iter().enumerate() {
        for notice in rank.worker.wait(Instant::now() + PATIENCE) {
            let Notice::Ended(ending) = notice else { continue };
            if ending.outcome != Outcome::Done {
                return Err(format!("rank {number}: {:?}", ending.outcome).into());
            }
            println!("decode rank {number}: {} bytes in {} copies", ending.bytes, ending.copies);
        }
    }
    decode.scheduler.settle(&ticket);

    // All ranks have confirmed, so the blocks are prefill's own again.
    for released in prefill.scheduler.wait_released(Instant::now() + PATIENCE) {
        println!("prefill: blocks of {} are free, {:?}", released.request, released.why);
    }
    let wrong = decode.wrong(tokens, &[3]);
    println!("{wrong} wrong bytes");
    if wrong == 0 { Ok(()) } else { Err("bytes are wrong".into()) }
}

/// An engine: one scheduler, and a worker with its memory for each rank.
struct Engine {
    scheduler: Scheduler,
    ranks: Vec<Rank>,
    tokens_per_block: u64,
}

struct Rank {
    worker: Worker,
    memory: Arc<Vec<AtomicU8>>,
    heads: std::ops::Range<u64>,
}

impl Engine {
    fn start(name: &str, ranks: u64, tokens_per_block: u64) -> Result<Self, Box<dyn Error>> {
        let scheduler = Scheduler::start(SchedulerOptions::new(name))?;
        let share = HEADS / ranks;
        let mut started = vec![];
        for rank in 0..ranks {
            let heads = rank * share..(rank + 1) * share;
            let block = tokens_per_block * share * WIDTH;
            let mut memory = vec![];
            memory.resize_with((u64::from(BLOCKS) * block) as usize, || AtomicU8::new(0xEE));
            let region = Region::host(memory.as_ptr() as u64, memory.len() as u64);

            let memory = Arc::new(memory);
            // SAFETY: the transport keeps the memory alive; nothing but atomics refers to it.
            let carrier =
                unsafe { TransportOptions::new("local").register(&[region], memory.clone()) }?;

            let manifest = Manifest::new(Draft {
                identity: [("model".to_owned(), "example".to_owned())].into(),
                engine: name.to_owned(),
                rank: rank as u32,
                label: format!("tp{rank}"),
                regions: vec![region],
                kinds: vec![Kind {
                    format: Format::new("opaque", WIDTH as u32),
                    axes: vec![Axis::new("head", HEADS)],
                    law: Law::PER_TOKEN,
                }],
                writers: Default::default(),
                groups: vec![Group {
                    name: "attention".to_owned(),
                    blocks: BLOCKS,
                    null_block: Some(0),
                    tokens_per_block: Some(tokens_per_block),
                    window: Window::FULL,
                    pieces: vec![Piece {
                        state: "layers.0/kv".to_owned(),
                        kind: 0,
                        bounds: StateBox::new([heads.clone()]),
                        phase: Phase::ALL,
                        need: None,
                        view: View {
                            region: 0,
                            offset: 0,
                            block,
                            kernel: None,
                            entry: share * WIDTH,
                            axes: vec![WIDTH],
                        },
                    }],
                    scratch: vec![],
                }],
            })?;
            let options = WorkerOptions::new(ranks as u32);
            let worker = Worker::start(options, manifest, carrier)?;
            started.push(Rank { worker, memory, heads });
        }
        let cards = started.iter().map(|rank| rank.worker.card()).collect::<Result<_, _>>()?;
        scheduler.publish(cards)?;
        Ok(Self { scheduler, ranks: started, tokens_per_block })
    }

    /// Writes what a prompt leaves behind: a byte for every token, head and place that tells where it
    /// belongs.
    fn write(&self, tokens: u64, blocks: &[u64]) {
        self.bytes(tokens, blocks, |byte, value| byte.store(value, Ordering::Relaxed));
    }

    /// How many bytes are not what was written, those around the request's own included.
    fn wrong(&self, tokens: u64, blocks: &[u64]) -> usize {
        let mut wrong = 0;
        self.bytes(tokens, blocks, |byte, value| {
            wrong += usize::from(byte.swap(0xEE, Ordering::Relaxed) != value);
        });
        let all = self.ranks.iter().flat_map(|rank| rank.memory.iter());
        wrong + all.filter(|byte| byte.load(Ordering::Relaxed) != 0xEE).count()
    }

    fn bytes(&self, tokens: u64, blocks: &[u64], mut each: impl FnMut(&AtomicU8, u8)) {
        for rank in &self.ranks {
            let share = rank.heads.end - rank.heads.start;
            for token in 0..tokens {
                let block = blocks[(token / self.tokens_per_block) as usize];
                let slot = block * self.tokens_per_block + token % self.tokens_per_block;
                for head in rank.heads.clone() {
                    for place in 0..WIDTH {
                        let at = (slot * share + head - rank.heads.start) * WIDTH + place;
                        let value = (token * 37 + head * 11 + place) % 200;
                        each(&rank.memory[at as usize], value as u8);
                    }
                }
            }
        }
    }
}

#[test]
fn no_byte_is_wrong() {
    main().unwrap();
}
