//! Agents that hand requests over to each other: real memory, real connections.
//!
//! One program for all of these: each on its own would compile the agent's generic parts again. Those that
//! change the process, its environment or its log, are programs of their own beside this folder.

#[path = "../common/mod.rs"]
mod common;

mod drain;
mod faults;
mod following;
mod forged;
mod frontier;
mod growth;
mod handover;
mod interrupted;
mod introduced;
mod lowering;
mod named;
mod nat;
mod not_an_agent;
mod panics;
mod restarts;
mod silent;
mod soak;
mod trust;
mod users;
