//! What a demo is asked to show.

use std::ffi::OsString;

use kvferry_models::Topology;

#[cfg(doc)]
use crate::words::PROCESS;
use crate::words::TransportKind;

/// What to show.
#[derive(Clone, Debug)]
pub struct Options {
    /// What starts this program again: each process of the demo is one, told so by one more argument, [`PROCESS`].
    pub program: Vec<OsString>,
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
    /// The fraction of loads that are audited; 0 is none, 1 is all.
    pub audit: f64,
    /// At least so many of the model's layers.
    pub layers: u32,
    /// The same seed draws the same requests.
    pub seed: u64,
    /// Show a progress bar on standard error.
    pub progress: bool,
}
