//! What an engine embeds to hand requests over to another.
//!
//! An agent has two halves. The [`Scheduler`] lives where the engine owns its blocks: it listens on
//! the engine's one address, makes known what its ranks hold, and keeps the leases. A [`Worker`] lives
//! with the memory of each rank: it makes the rank's [`Card`], and reads what requests need.
//!
//! ```text
//!   P: Scheduler::grant ──ticket──▶ router ──▶ D: Scheduler::hold, Worker::load on every rank
//!   P: Scheduler::released ◀──confirmed── D's workers, when each has read its part
//! ```
//!
//! D need not wait until P has finished: between [`Scheduler::open`] and [`Scheduler::grant`] the lease
//! grows with what is computed, and a [`Load`] without a grant follows it and reads it part by part.
//!
//! The rooms, from the ground up. Each knows only those above it, but for `wire/version`, which errors
//! name:
//!
//! | room | what is in it |
//! |---|---|
//! | `rules/` | state machines without clock, thread or socket, checked exhaustively: [`lease`] (what P promises, and what may be read: `grant`), [`life`] (what D does) and [`follow`] (what D has read while P computes); which requests are audited; why a request can fail |
//! | `error`, `metrics`, `mailbox`, `background`, `carrier`, `several` | what can go wrong; what is counted; what one side leaves for another; the thread that connections live on; one type for all transports; several of them as one |
//! | `wire/` | what passes between agents: `version` and `message`, `trust`, `channel` (one connection), `reach` (which addresses are connected to), `link` (the side that asks), `listener` (the side that answers), `places` (how many may come in), `conversation` (between programs that are no engines) |
//! | `source/` | what the ranks of a source do for readers: `relay` (a scheduler hands tasks to its ranks), `service` (a rank takes them) |
//! | `scheduler/` | `core` (what the ranks hold, and the leases), `server` (what peers are told), `watchers` (wakes those who follow a lease), `holds` (leases of others that are kept alive), `follows` (how far others are with requests of this engine), `notes` (what readers do, for who traces it), `drain` (an engine that is about to go), `status`, `options` |
//! | `worker/` | `load` (what an engine gives and gets), `drive` (lives one load by the rules), `growth` (what a load reads next while the source computes), `peers` (the engines to read from), `source_engine` (one of them), `mover` (reads; `mover/lowering` chooses how), `audit` (compares), `introduced` (engines that run no agent), `core`, `options` |
//!
//! Everything that waits has a deadline; nothing that a peer sends makes this process panic.

#![forbid(unsafe_code)]

mod background;
mod carrier;
mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod mailbox;
mod metrics;
mod panics;
mod rules;
mod scheduler;
mod several;
mod source;
mod wire;
mod worker;

pub use carrier::{Carrier, Chosen, Source, carry, carry_with};
pub use error::{Error, Misbehaviour, PeerError};
pub use kvferry_plan::BlockTable;
pub use kvferry_plan::lowering::{Choice, Way};
pub use metrics::{Described, Timings, catalogue};
pub use rules::audit::{Audit, NotAFraction};
pub use rules::failure::Failure;
pub use rules::grant::{Claim, Fingerprint, Grant, InFlight, Origin};
pub use rules::lease::{Ended, Loss, Released};
pub use rules::{follow, lease, life};
pub use scheduler::{
    Did, Following, GrowingStatus, GuestStatus, HoldStatus, LeaseStatus, LeftOut, Lost, LostWhy,
    Note, Progress, Scheduler, SchedulerOptions, Status, ask_drain, ask_status,
};
pub use several::carry_several;
pub use wire::conversation::{Conversation, Listening};
pub use wire::message::{Card, Left};
pub use wire::places::Limits;
pub use wire::reach::Network;
pub use wire::seal::{Seal, Sealed};
pub use wire::ticket::{Incarnation, Ticket};
pub use wire::trust::{KEY_VARIABLE, Key, Tls, TlsFiles, Trust};
pub use wire::version::Version;
pub use worker::{
    Ending, IntroducedRank, Load, Lowerings, Moments, Notice, Outcome, ReadBy, Worker,
    WorkerOptions,
};
