//! `kvferry._core`: manifests and plans for Python. The stubs beside the Python sources
//! (`python/kvferry/_core.pyi`) document it for its users.

mod convert;
mod ending;
mod errors;
mod facts;
mod half;
mod log;
mod manifest;
mod metrics;
mod packages;
mod plan;
mod scheduler;
mod stock;
mod trust;
mod worker;

use std::ffi::OsString;
use std::io::Write;
use std::time::Duration;

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::ending::Ending;
    #[pymodule_export]
    use super::facts::{facts, solve, states};
    #[pymodule_export]
    use super::log::{log_level, log_lines};
    #[pymodule_export]
    use super::manifest::Manifest;
    #[pymodule_export]
    use super::metrics::metrics;
    #[pymodule_export]
    use super::plan::{Plan, Summary, compile};
    #[pymodule_export]
    use super::scheduler::Scheduler;
    #[pymodule_export]
    use super::stock::{Bell, introduce};
    #[pymodule_export]
    use super::worker::Worker;
    #[pymodule_export]
    use super::{command, finish, version};
}

/// Does what the words of a command line say, and answers the exit code. `program` starts this program again.
#[pyfunction]
fn command(py: Python<'_>, words: Vec<OsString>, program: Vec<OsString>) -> u8 {
    py.detach(|| {
        let code = kvferry_cli::run(words, program);
        // What the standard library does at the end of a program, it does not do here.
        let _ = std::io::stdout().flush();
        code
    })
}

/// Waits until no kernel is compiled, and lets none be compiled any more.
#[pyfunction]
fn finish(py: Python<'_>) {
    py.detach(|| kvferry_cuda::nvrtc::finish(Duration::from_secs(20)));
}

/// The version of this build.
#[pyfunction]
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
