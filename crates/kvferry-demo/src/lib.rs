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
mod options;
pub mod own_output;
mod pool;
mod report;
mod shape;
mod show;
mod words;

pub use child::run as run_process;
pub use options::Options;
pub use report::Report;
pub use show::run;
pub use words::{PROCESS, TransportKind};
