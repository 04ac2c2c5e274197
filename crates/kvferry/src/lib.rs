//! KV cache transfer for engines that serve language models: one engine reads a prompt (prefill, P), another answers
//! (decode, D), and their parallelism, block sizes and layouts may differ.
//!
//! An engine embeds two things. A [`Scheduler`] lives where the engine owns its blocks: it listens on the engine's one
//! address, and promises blocks to others by leases. A [`Worker`] lives with the memory of each rank, which a
//! [`Manifest`] describes, and reads what requests need through a transport ([`TransportOptions`]). P never writes to D:
//! D reads, and nothing of what it has read counts until P has confirmed that the lease still held.
//!
//! ```text
//! P: Scheduler::grant ──ticket──▶ router ──▶ D: Scheduler::hold, Worker::load on every rank
//! P: Scheduler::released ◀──confirmed── D's workers, when each has read its part
//! ```
//!
//! A rank of an engine, from its memory to a worker:
//!
//! ```
//! use kvferry::manifest::{Axis, Draft, Format, Group, Kind, Law, Phase, Piece, StateBox, View, Window};
//! use kvferry::{Manifest, Region, Scheduler, SchedulerOptions, TransportOptions, Worker, WorkerOptions};
//!
//! // A pool of 10 blocks of 4 tokens; a token has one entry of 128 bytes, for 4 heads.
//! let (blocks, tokens, heads, width) = (10, 4, 4, 32);
//! let memory: &'static [u8] = Vec::leak(vec![0; (blocks * tokens * heads * width) as usize]);
//! let region = Region::host(memory.as_ptr() as u64, memory.len() as u64);
//! // What it is, in the words of the model: the same on P and D, however each of them lays it out.
//! let kv = Kind {
//!     format: Format::new("opaque", width as u32),
//!     axes: vec![Axis::new("head", heads)],
//!     law: Law::PER_TOKEN,
//! };
//! // Where this rank has it.
//! let piece = Piece {
//!     state: "layers.0/kv".to_owned(),
//!     kind: 0,
//!     bounds: StateBox::new([0..heads]),
//!     phase: Phase::ALL,
//!     need: None,
//!     view: View {
//!         region: 0,
//!         offset: 0,
//!         block: tokens * heads * width,
//!         kernel: None,
//!         entry: heads * width,
//!         axes: vec![width],
//!     },
//! };
//! let manifest = Manifest::new(Draft {
//!     identity: [("model".to_owned(), "example".to_owned())].into(),
//!     engine: "prefill".to_owned(),
//!     rank: 0,
//!     label: "tp0".to_owned(),
//!     regions: vec![region],
//!     kinds: vec![kv],
//!     writers: Default::default(),
//!     groups: vec![Group {
//!         name: "attention".to_owned(),
//!         blocks: blocks as u32,
//!         null_block: Some(0),
//!         tokens_per_block: Some(tokens),
//!         window: Window::FULL,
//!         pieces: vec![piece],
//!         scratch: vec![],
//!     }],
//! })?;
//!
//! // SAFETY: the memory is never given back, and what is in it may change at any time.
//! let carrier = unsafe { TransportOptions::new("tcp").register(manifest.regions(), ()) }?;
//! let worker = Worker::start(WorkerOptions::new(1), manifest, carrier)?;
//! let scheduler = Scheduler::start(SchedulerOptions::new("prefill"))?;
//! scheduler.publish(vec![worker.card()?])?;
//! println!("others find this engine at {}", scheduler.address());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A request is handed over by [`Scheduler::grant`] on P, whose [`Ticket`] and [`Grant`] go with the request, and by
//! [`Worker::load`] with a [`Load`] on every rank of D: the example `handover` has all of it, from the memory of two engines to
//! the bytes that are compared in the end.
//!
//! This crate is the front. What is behind it (`kvferry-layout`, `kvferry-plan`, `kvferry-transport`, `kvferry-agent`, and a
//! crate for each transport that wants a library) may be used directly, and promises less.

mod transports;

pub use kvferry_agent::{
    Audit, BlockTable, Carrier, Ended, Ending, Error, Grant, Key, Load, Notice, Outcome, Released,
    Scheduler, SchedulerOptions, Ticket, Tls, TlsFiles, Trust, Worker, WorkerOptions,
};
pub use kvferry_layout::{Manifest, Place, Region};
pub use transports::TransportOptions;

/// What a rank's memory is described with, for [`Manifest::new`].
pub mod manifest {
    pub use kvferry_layout::{
        Axis, Draft, Format, Group, Kernel, Kind, Law, ManifestError, Phase, Piece, Scratch,
        StateBox, View, Window,
    };
}
