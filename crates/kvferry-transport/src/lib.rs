//! Carries out loops from the registered memory of other processes into one's own.
//!
//! [`Transport`] says what every back end promises. Two are here, and need nothing installed:
//!
//! * [`local`]: two processes on one host; reads the peer's memory directly.
//! * [`tcp`]: anything with a network.
//!
//! `kvferry-cuda` (GPUs of one host; one kernel carries out a request) and `kvferry-nixl` (NVIDIA's transfer library, for
//! RDMA, NVLink and GPU memory) are crates of their own.
//!
//! A transport knows addresses and bytes, and nothing of models. It only ever reads from a peer:
//! nobody can write into another process's memory.
//!
//! # Rooms
//!
//! | room | what is in it |
//! |---|---|
//! | `contract` | what callers see: the traits, what an operation reports, what can go wrong |
//! | `shared` | what back ends are built from. `admission` is where an operation begins: what it reads and writes is checked against the registered memory (`region`, `spans`), made a list of where a back end knows nothing else (`merge`), and put into `custody`, the one state machine for progress, cancellation and quarantine. `deadlines` ends what is late, `chunks` cuts an operation into parts for several threads, `rate` warns of absurdly slow transfers, `counters` sums up |
//! | [`local`], [`tcp`] | the back ends: how bytes actually get across. They know the two rooms above; `local` also uses `tcp`, as its way round where the kernel forbids the direct one |
//! | [`strangers`] | who has proven nothing yet at a port: how many there may be, and how often the log speaks of them; the agent's port uses it, too |
//! | [`ports`] | the ports that a process may listen at; the agent uses it, too |
//! | [`memory`] | a block of host memory to register, for examples, benchmarks and tests |
//!
//! Whether runs are packed is a constant of each back end (`Transport::packs_below`); `kvferry-bench lowering` measures both
//! ways.
//!
//! A new back end implements [`Transport`] with an admission and custody from `shared`, which promises nothing to crates from
//! elsewhere yet, and joins the conformance suite (`kvferry-conformance`).

#[cfg(not(target_os = "linux"))]
compile_error!(
    "kvferry runs on Linux only: it reads other processes' memory, and asks the kernel who they are"
);

mod contract;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod local;
pub mod memory;
pub mod ports;
#[doc(hidden)]
pub mod shared;
pub mod strangers;
pub mod tcp;

pub use contract::{
    Error, Instance, InvalidFrame, Operation, RegionId, Report, Side, StagingStatistics,
    Statistics, Status, Transport,
};
pub use kvferry_layout::{ByteCopy, Loops, Place, Region};
pub use shared::{Transfer, carry_out};
