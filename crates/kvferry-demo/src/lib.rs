//! Prefill and decode engines as real processes that hand requests over, with every byte checked.
//!
//! [`run`] starts the processes, plays router and supervisor, and reports; with [`Options::chaos`] it
//! also kills and stops processes. Each process is the same program again, started with [`PROCESS`] as
//! its only argument: it calls [`run_process`], which plays a rank or an engine's scheduler as it is told
//! over its standard input.
//!
//! | module | what is inside |
//! |---|---|
//! | `show` | what happens: requests, the router, the supervisors, chaos |
//! | `crew` | the processes: started, spoken to, signalled, none left behind |
//! | `words` | what is said to a process, and what it answers |
//! | `child` | one process: a rank, or a scheduler |
//! | `pool` | a rank's memory, whose every byte is known |
//! | `shape` | the engines' manifests: a released model with fewer layers |
//! | `report` | what the demo has shown |

mod child;
mod crew;
pub mod own_output;
mod pool;
mod report;
mod shape;
mod show;
mod words;

use kvferry_models::Topology;

pub use child::run as run_process;
pub use report::Report;
pub use show::run;
pub use words::TransportKind;

/// The argument with which a process of a demo is started.
pub const PROCESS: &str = "demo-process";

/// What to show.
#[derive(Clone, Debug)]
pub struct Options {
    /// The model: a preset's name, or a part of it that no other has.
    pub model: String,
    /// The prefill engine.
    pub prefill: Topology,
    /// The decode engines, at least one.
    pub decode: Vec<Topology>,
    /// How many requests to hand over.
    pub requests: usize,
    /// How bytes are moved.
    pub transport: TransportKind,
    /// Kill and stop ranks at random, abort requests, let leases expire.
    pub chaos: bool,
    /// At least so many of the model's layers.
    pub layers: u32,
    /// The same seed draws the same requests.
    pub seed: u64,
    /// Show a progress bar on standard error.
    pub progress: bool,
}
