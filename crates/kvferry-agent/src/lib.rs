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
//! The rules of the game are in two state machines without clock, thread or socket: [`lease`] (what P
//! promises) and [`life`] (what D does), which are checked exhaustively. Everything that waits has a
//! deadline; nothing that a peer sends makes this process panic.

#![forbid(unsafe_code)]

mod background;
mod carrier;
mod channel;
mod error;
pub mod follow;
mod grant;
pub mod lease;
pub mod life;
mod link;
mod message;
mod metrics;
mod mover;
mod random;
mod scheduler;
mod server;
mod trust;
mod worker;

pub use carrier::{Carrier, Source, carry};
pub use error::{Error, Failure, Misbehaviour, PeerError};
pub use grant::{Fingerprint, Grant};
pub use kvferry_plan::BlockTable;
pub use lease::{Ended, Loss, Released};
pub use message::{Card, Incarnation, Ticket, Version};
pub use metrics::Phases;
pub use scheduler::{
    GuestStatus, HoldStatus, LeaseStatus, Lost, LostWhy, Scheduler, SchedulerOptions, Status,
    ask_status,
};
pub use server::Limits;
pub use trust::{KEY_VARIABLE, Key, Tls, TlsFiles, Trust};
pub use worker::{Ending, Load, Notice, Outcome, Worker, WorkerOptions};
