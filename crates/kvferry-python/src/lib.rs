//! `kvferry._core`: manifests and plans for Python. The stubs beside the Python sources
//! (`python/kvferry/_core.pyi`) document it for its users.

mod agent;
mod convert;
mod errors;
mod facts;
mod log;
mod manifest;
mod plan;
mod stock;
mod transports;

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::agent::{Ending, Scheduler, Worker, metrics};
    #[pymodule_export]
    use super::facts::{facts, solve, states};
    #[pymodule_export]
    use super::log::{log_level, log_lines};
    #[pymodule_export]
    use super::manifest::Manifest;
    #[pymodule_export]
    use super::plan::{Plan, Summary, compile};
    #[pymodule_export]
    use super::stock::{Bell, introduce};
    #[pymodule_export]
    use super::version;
}

/// The version of this build.
#[pyfunction]
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
