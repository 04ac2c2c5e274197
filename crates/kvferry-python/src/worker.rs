//! `kvferry.Worker`: the half of an agent that reads.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use kvferry::TransportOptions;
use kvferry_agent::{self as agent, Audit, Error, Grant, Load, Trust, WorkerOptions};
use kvferry_layout::{self as layout, Place};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::convert::{address, read_epoch, read_origin, read_ticket, seconds};
use crate::ending::Ending;
use crate::errors;
use crate::half::Half;
use crate::manifest::Manifest;
use crate::packages::site_packages;
use crate::plan::Asked;
use crate::trust::{networks, trust};

/// Bytes to pack into, of MiB; refuses what is neither nothing nor enough.
fn staging(mib: u32) -> Result<u64, String> {
    let (mib, least) = (u64::from(mib), TransportOptions::LEAST_STAGING.div_ceil(1 << 20));
    if mib != 0 && mib < least {
        return Err(format!(
            "gpu_staging is {mib} (MiB), but must be 0, for nothing to be packed, or {least} or more: \
             there is no room to pack into otherwise"
        ));
    }
    Ok(mib << 20)
}

/// The worker half of an agent.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Worker {
    /// Its carrier owns what keeps the registered memory alive, and gives it up last: whoever shares
    /// this half, a thread that waits for instance, may touch the memory.
    pub(crate) half: Half<agent::Worker>,
    /// What of the memory this process can write.
    host: Vec<layout::Region>,
}

#[pymethods]
impl Worker {
    #[new]
    #[pyo3(signature = (manifest, *, ranks, memory, transport="local", bind="127.0.0.1:0", advertise=None, key=None, key_file=None, tls=None, insecure=false, peers=vec![], handshake=10.0, concurrent=64, least_ahead=0.002, lowering="auto", audit=0.01, gpu_sms=None, gpu_kernel=None, gpu_staging=None, ports=None, encrypt=true))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        manifest: &Bound<'_, Manifest>,
        ranks: u32,
        memory: Py<PyAny>,
        transport: &str,
        bind: &str,
        advertise: Option<&str>,
        key: Option<&str>,
        key_file: Option<PathBuf>,
        tls: Option<(PathBuf, PathBuf, PathBuf)>,
        insecure: bool,
        peers: Vec<String>,
        handshake: f64,
        concurrent: usize,
        least_ahead: f64,
        lowering: &str,
        audit: f64,
        gpu_sms: Option<u32>,
        gpu_kernel: Option<PathBuf>,
        gpu_staging: Option<u32>,
        ports: Option<(u16, u16)>,
        encrypt: bool,
    ) -> PyResult<Self> {
        let py = manifest.py();
        let failed = |error: Error| errors::agent(py, &error);
        let bound = address("listen on", bind)?;
        let audit = Audit::fraction(audit).map_err(|e| PyValueError::new_err(e.to_string()))?;
        let mut options = WorkerOptions::new(ranks);
        // A port that was named is the transport's.
        options.bind = SocketAddr::new(bound.ip(), 0);
        options.ports = ports.map(|(first, last)| first..=last);
        options.advertise = advertise.map(str::to_owned);
        options.audit = audit;
        options.trust = trust(key, key_file, tls, insecure).map_err(failed)?;
        options.peers = networks(&peers).map_err(failed)?;
        options.handshake = seconds("handshake", handshake)?;
        options.concurrent = concurrent;
        options.least_ahead = seconds("least_ahead", least_ahead)?;
        options.lowering = lowering.parse().map_err(PyValueError::new_err::<String>)?;
        let advertise = advertise.map(|host| address("advertise", (host, 0))).transpose()?;
        let mut moved_by = TransportOptions::new(transport);
        moved_by.bind = bound;
        moved_by.ports.clone_from(&options.ports);
        moved_by.advertise = advertise.map(|address| address.ip());
        // Without a secret of theirs, peers are told openly what all of it rests on.
        moved_by.encrypt = encrypt && matches!(options.trust, Trust::Key(_) | Trust::Tls(_));
        (moved_by.sms, moved_by.kernel) = (gpu_sms, gpu_kernel);
        moved_by.staging = gpu_staging.map(staging).transpose().map_err(PyValueError::new_err)?;
        moved_by.site_packages = site_packages(py)?;
        let manifest = Arc::clone(&manifest.get().0);
        let memory = Arc::new(memory);
        let made = py.detach(|| {
            // SAFETY: `memory` keeps the regions alive. Rust has no reference to them; Python's views assume nothing about
            // their content.
            let carrier = unsafe { moved_by.register(manifest.regions(), memory) }?;
            agent::Worker::start(options, layout::Manifest::clone(&manifest), carrier)
        });
        let half = Half::new(made.map_err(failed)?);
        let host = manifest.regions().iter().filter(|region| region.place == Place::Host);
        Ok(Self { half, host: host.copied().collect() })
    }

    fn card<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let half = self.half.get(py)?;
        let card = py.detach(|| half.card()).map_err(|error| errors::agent(py, &error))?;
        Ok(PyBytes::new(py, &card.to_bytes()))
    }

    #[pyo3(
        signature = (request, ticket, *, deadline=60.0, patience=60.0, rest=true, granted=None, origin=None, **tables),
        text_signature = "($self, request, ticket, *, deadline=60.0, patience=60.0, rest=True, \
                          granted=None, origin=None, tokens, source_blocks=None, destination_blocks, cached=None, \
                          source_first=None, destination_first=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn load(
        &self,
        request: String,
        ticket: &Bound<'_, PyDict>,
        deadline: f64,
        patience: f64,
        rest: bool,
        granted: Option<u64>,
        origin: Option<&[u8]>,
        tables: Option<Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let py = ticket.py();
        let half = self.half.get(py)?;
        let asked = Asked::read(tables)?;
        let grant = match asked.source {
            Some(tables) => {
                let tokens = granted.unwrap_or(asked.tokens);
                Some(Grant { epoch: read_epoch(ticket)?, tokens, tables })
            }
            None if granted.is_some() => {
                let message =
                    "granted says how many tokens the source_blocks hold, which are missing";
                return Err(PyValueError::new_err(message));
            }
            // Asked for where they are.
            None => None,
        };
        let mut load = Load::new(request, read_ticket(ticket)?, asked.tokens, asked.destination)
            .granted(grant)
            .origin(origin.map(read_origin).transpose()?)
            .within(seconds("deadline", deadline)?, seconds("patience", patience)?);
        load.rest = rest;
        if let Some(cached) = asked.cached {
            load.cached = cached;
        }
        py.detach(|| half.load(load)).map_err(|error| errors::agent(py, &error))
    }

    fn begin_step(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        // These four only look or leave a word behind: not worth letting go of the interpreter.
        self.half.get(py)?.begin_step(step);
        Ok(())
    }

    fn is_heard(&self, py: Python<'_>, step: u64) -> PyResult<bool> {
        Ok(self.half.get(py)?.is_heard(step))
    }

    fn wrote(&self, py: Python<'_>, step: u64, states: Vec<String>) -> PyResult<()> {
        self.half.get(py)?.wrote(step, states);
        Ok(())
    }

    fn end_step(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        self.half.get(py)?.end_step(step);
        Ok(())
    }

    fn abort(&self, py: Python<'_>, request: &str) -> PyResult<()> {
        let half = self.half.get(py)?;
        py.detach(|| half.abort(request));
        Ok(())
    }

    #[pyo3(signature = (timeout=0.0))]
    fn endings(&self, py: Python<'_>, timeout: f64) -> PyResult<Vec<Ending>> {
        let half = self.half.get(py)?;
        let until = Instant::now() + seconds("timeout", timeout)?;
        // Given up without the interpreter: if it was closed meanwhile, this share is the last.
        let notices = py.detach(move || half.wait(until));
        Ok(notices.into_iter().map(Ending::new).collect())
    }

    fn zero(&self, py: Python<'_>, ending: &Ending) -> PyResult<()> {
        let inside = |at: u64, bytes: u64| {
            self.host.iter().any(|region| {
                at.checked_sub(region.base).and_then(|from| region.bytes.checked_sub(from))
                    >= Some(bytes)
            })
        };
        if !ending.areas().all(|[at, bytes]| inside(at, bytes)) {
            let message = "what is left of this request lies outside of this worker's host memory";
            return Err(PyValueError::new_err(message));
        }
        let areas: Vec<_> = ending.areas().collect();
        // Shared throughout: nobody frees the memory meanwhile.
        let half = self.half.get(py)?;
        py.detach(move || {
            for &[at, bytes] in &areas {
                // SAFETY: inside registered memory of this process, which `half` keeps alive and which
                // nobody has a Rust reference to. The engine has not yet been told that the blocks are
                // its own.
                unsafe { std::ptr::write_bytes(at as *mut u8, 0, bytes as usize) };
            }
            drop(half);
        });
        Ok(())
    }

    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        let half = self.half.get(py)?;
        Ok(py.detach(|| half.metrics()))
    }

    fn counts(&self, py: Python<'_>) -> PyResult<BTreeMap<String, u64>> {
        // A few atomic reads and locks that are held briefly: not worth letting go of the interpreter.
        Ok(self.half.get(py)?.counts().into_iter().collect())
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.half.close());
    }
}
