//! `kvferry.Scheduler` and `kvferry.Worker`: the two halves of an agent.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kvferry_agent::{
    self as agent, BlockTable, Card, Carrier, Error, Key, Load, Notice, Outcome, SchedulerOptions,
    Ticket, Timings, Trust, WorkerOptions, carry,
};
use kvferry_layout::{self as layout, Place};
use kvferry_transport::Transport;
use kvferry_transport::local::{Local, LocalOptions};
use kvferry_transport::nixl::{Nixl, NixlOptions};
use kvferry_transport::tcp::{Tcp, TcpOptions};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors;
use crate::manifest::Manifest;
use crate::plan::{Asked, Tables, array, words};
use crate::seconds;

/// The scheduler half of an agent.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Scheduler(Half<agent::Scheduler>);

/// The worker half of an agent.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Worker {
    half: Half<agent::Worker>,
    /// Keeps the registered memory alive for as long as peers may touch it.
    memory: Mutex<Option<Py<PyAny>>>,
    /// What of it this process can write.
    host: Vec<layout::Region>,
}

/// How a request's load ended on one rank.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Ending {
    #[pyo3(get)]
    request: String,
    #[pyo3(get)]
    outcome: &'static str,
    #[pyo3(get)]
    kind: &'static str,
    #[pyo3(get)]
    reason: String,
    #[pyo3(get)]
    quarantined: bool,
    #[pyo3(get)]
    bytes: u64,
    #[pyo3(get)]
    copies: u64,
    timings: Timings,
    rest: Vec<u8>,
}

/// Half an agent, until it is closed.
struct Half<T>(Mutex<Option<Arc<T>>>);

impl<T> Half<T> {
    fn new(half: T) -> Self {
        Self(Mutex::new(Some(Arc::new(half))))
    }

    fn get(&self, py: Python<'_>) -> PyResult<Arc<T>> {
        lock(&self.0).clone().ok_or_else(|| errors::agent(py, &Error::Stopped))
    }

    fn close(&self) {
        let half = lock(&self.0).take();
        drop(half);
    }
}

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(signature = (engine, *, bind="127.0.0.1:0", advertise=None, key=None, key_file=None, insecure=false, lease=30.0, longest=1800.0))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        py: Python<'_>,
        engine: &str,
        bind: &str,
        advertise: Option<String>,
        key: Option<&str>,
        key_file: Option<&str>,
        insecure: bool,
        lease: f64,
        longest: f64,
    ) -> PyResult<Self> {
        let options = SchedulerOptions {
            bind: address("bind", bind)?,
            advertise,
            trust: trust(key, key_file, insecure).map_err(|error| errors::agent(py, &error))?,
            term: seconds("lease", lease)?,
            longest: seconds("longest", longest)?,
            ..SchedulerOptions::new(engine)
        };
        let made = py.detach(|| agent::Scheduler::start(options));
        made.map(|half| Self(Half::new(half))).map_err(|error| errors::agent(py, &error))
    }

    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.0.get(py)?.address().to_owned())
    }

    fn publish(&self, py: Python<'_>, cards: Vec<Vec<u8>>) -> PyResult<()> {
        let half = self.0.get(py)?;
        let made = py.detach(|| {
            let cards = cards.iter().map(|card| Card::from_bytes(card).map_err(Error::from));
            half.publish(cards.collect::<Result<_, _>>()?)
        });
        made.map_err(|error| errors::agent(py, &error))
    }

    fn grant<'py>(&self, py: Python<'py>, request: &str) -> PyResult<Bound<'py, PyAny>> {
        let half = self.0.get(py)?;
        let ticket = py.detach(|| half.grant(request)).map_err(|e| errors::agent(py, &e))?;
        to_python(py, &ticket)
    }

    fn revoke(&self, py: Python<'_>, request: &str) -> PyResult<bool> {
        let half = self.0.get(py)?;
        Ok(py.detach(|| half.revoke(request)))
    }

    #[pyo3(signature = (timeout=0.0))]
    fn released(&self, py: Python<'_>, timeout: f64) -> PyResult<Vec<(String, String)>> {
        let half = self.0.get(py)?;
        let until = Instant::now() + seconds("timeout", timeout)?;
        let released = py.detach(|| half.wait_released(until));
        Ok(released.into_iter().map(|one| (one.request, one.why.to_string())).collect())
    }

    #[pyo3(signature = (ticket, *, patience))]
    fn hold(&self, py: Python<'_>, ticket: &Bound<'_, PyDict>, patience: f64) -> PyResult<()> {
        let (half, ticket) = (self.0.get(py)?, read_ticket(ticket)?);
        let patience = seconds("patience", patience)?;
        py.detach(|| half.hold(&ticket, patience));
        Ok(())
    }

    fn reading(&self, py: Python<'_>, ticket: &Bound<'_, PyDict>) -> PyResult<()> {
        let (half, ticket) = (self.0.get(py)?, read_ticket(ticket)?);
        py.detach(|| half.reading(&ticket));
        Ok(())
    }

    fn settle(&self, py: Python<'_>, ticket: &Bound<'_, PyDict>) -> PyResult<()> {
        let (half, ticket) = (self.0.get(py)?, read_ticket(ticket)?);
        py.detach(|| half.settle(&ticket));
        Ok(())
    }

    fn abandon(&self, py: Python<'_>, ticket: &Bound<'_, PyDict>) -> PyResult<()> {
        let (half, ticket) = (self.0.get(py)?, read_ticket(ticket)?);
        py.detach(|| half.abandon(&ticket));
        Ok(())
    }

    fn lost<'py>(&self, py: Python<'py>) -> PyResult<Vec<(Bound<'py, PyAny>, String)>> {
        let half = self.0.get(py)?;
        let lost = py.detach(|| half.lost());
        let lost = lost.iter().map(|one| Ok((to_python(py, &one.ticket)?, one.why.to_string())));
        lost.collect()
    }

    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let half = self.0.get(py)?;
        to_python(py, &py.detach(|| half.status()))
    }

    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        let half = self.0.get(py)?;
        Ok(py.detach(|| half.metrics()))
    }

    fn counts(&self, py: Python<'_>) -> PyResult<BTreeMap<String, u64>> {
        // A few atomic reads: not worth letting go of the interpreter.
        Ok(self.0.get(py)?.counts().into_iter().collect())
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

#[pymethods]
impl Worker {
    #[new]
    #[pyo3(signature = (manifest, *, ranks, memory, transport="local", bind="127.0.0.1:0", advertise=None, key=None, key_file=None, insecure=false, handshake=10.0, concurrent=64))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        manifest: &Bound<'_, Manifest>,
        ranks: u32,
        memory: Py<PyAny>,
        transport: &str,
        bind: &str,
        advertise: Option<&str>,
        key: Option<&str>,
        key_file: Option<&str>,
        insecure: bool,
        handshake: f64,
        concurrent: usize,
    ) -> PyResult<Self> {
        let py = manifest.py();
        let failed = |error: Error| errors::agent(py, &error);
        let options = WorkerOptions {
            trust: trust(key, key_file, insecure).map_err(failed)?,
            handshake: seconds("handshake", handshake)?,
            concurrent,
            ..WorkerOptions::new(ranks)
        };
        let advertise = advertise.map(|host| address("advertise", (host, 0))).transpose()?;
        let advertise = advertise.map(|address| address.ip());
        let tcp = TcpOptions { bind: address("bind", bind)?, advertise, ..TcpOptions::default() };
        let manifest = Arc::clone(&manifest.get().0);
        let made = py.detach(|| {
            let regions = manifest.regions();
            let carrier = match transport {
                "local" => registered(Local::new(LocalOptions::default())?, regions)?,
                "tcp" => registered(Tcp::new(tcp)?, regions)?,
                "nixl" => registered(Nixl::new(&NixlOptions::default())?, regions)?,
                other => {
                    let message = format!("no transport '{other}': it is local, tcp or nixl");
                    return Err(Error::Options(message));
                }
            };
            agent::Worker::start(options, layout::Manifest::clone(&manifest), carrier)
        });
        let half = Half::new(made.map_err(failed)?);
        let host = manifest.regions().iter().filter(|region| region.place == Place::Host);
        Ok(Self { half, memory: Mutex::new(Some(memory)), host: host.copied().collect() })
    }

    fn card<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let half = self.half.get(py)?;
        let card = py.detach(|| half.card()).map_err(|error| errors::agent(py, &error))?;
        Ok(PyBytes::new(py, &card.to_bytes()))
    }

    #[pyo3(
        signature = (request, ticket, *, patience=60.0, rest=true, **tables),
        text_signature = "($self, request, ticket, *, patience=60.0, rest=True, tokens, \
                          source_blocks, destination_blocks, cached=None, source_first=None, \
                          destination_first=None)"
    )]
    fn load(
        &self,
        request: String,
        ticket: &Bound<'_, PyDict>,
        patience: f64,
        rest: bool,
        tables: Option<Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let py = ticket.py();
        let half = self.half.get(py)?;
        let asked = Asked::read(tables)?;
        let destination = block_tables(asked.destination);
        let load = Load {
            request,
            ticket: read_ticket(ticket)?,
            tokens: asked.tokens,
            cached: asked.cached.unwrap_or_else(|| vec![0; destination.len()]),
            source: block_tables(asked.source),
            destination,
            patience: seconds("patience", patience)?,
            rest,
        };
        py.detach(|| half.load(load)).map_err(|error| errors::agent(py, &error))
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
        let notices = py.detach(|| half.wait(until));
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
        let zeroed = py.detach(|| {
            // Held throughout: nobody frees the memory meanwhile.
            let memory = lock(&self.memory);
            for &[at, bytes] in areas.iter().filter(|_| memory.is_some()) {
                // SAFETY: inside registered memory of this process, which is kept alive and which nobody
                // has a Rust reference to. The engine has not yet been told that the blocks are its own.
                unsafe { std::ptr::write_bytes(at as *mut u8, 0, bytes as usize) };
            }
            memory.is_some()
        });
        if zeroed { Ok(()) } else { Err(errors::agent(py, &Error::Stopped)) }
    }

    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        let half = self.half.get(py)?;
        Ok(py.detach(|| half.metrics()))
    }

    fn close(&self, py: Python<'_>) {
        // The agent first: it is what touches the memory.
        py.detach(|| self.half.close());
        let memory = lock(&self.memory).take();
        drop(memory);
    }
}

#[pymethods]
impl Ending {
    #[getter]
    fn seconds(&self) -> BTreeMap<&'static str, f64> {
        let times = self.timings.times();
        Timings::NAMES.iter().zip(times).map(|(name, time)| (*name, time.as_secs_f64())).collect()
    }

    #[getter]
    fn rest<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        array(py, &self.rest, 2)
    }

    fn __repr__(&self) -> String {
        format!("<kvferry.Ending {}: {} {}>", self.request, self.outcome, self.reason)
    }
}

impl Ending {
    /// Address and length of each part of the rest.
    fn areas(&self) -> impl Iterator<Item = [u64; 2]> + '_ {
        let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
        self.rest.chunks_exact(16).map(move |area| [word(&area[..8]), word(&area[8..])])
    }

    fn new(notice: Notice) -> Self {
        let ending = match notice {
            Notice::Ended(ending) => ending,
            Notice::Settled { request } => {
                return Self {
                    request,
                    outcome: "settled",
                    kind: "",
                    reason: String::new(),
                    quarantined: false,
                    bytes: 0,
                    copies: 0,
                    timings: Timings::default(),
                    rest: vec![],
                };
            }
        };
        let (outcome, kind, reason) = match &ending.outcome {
            Outcome::Done => ("done", "", String::new()),
            Outcome::Failed(failure) => ("failed", failure.kind(), failure.to_string()),
            Outcome::Aborted => ("aborted", "", String::new()),
            Outcome::Expired(loss) => ("expired", "", loss.to_string()),
        };
        Self {
            request: ending.request,
            outcome,
            kind,
            reason,
            quarantined: ending.quarantined,
            bytes: ending.bytes,
            copies: ending.copies,
            timings: ending.timings,
            rest: words(ending.rest.iter().map(|area| [area.address, area.bytes])),
        }
    }
}

/// A transport with a manifest's regions registered.
fn registered<T: Transport + fmt::Debug>(
    transport: T,
    regions: &[layout::Region],
) -> Result<Arc<dyn Carrier>, Error> {
    for region in regions {
        // SAFETY: `Worker` holds what keeps the memory alive, and drops the transport before it. Rust
        // has no reference to it; Python's views of it assume nothing about its content.
        unsafe { transport.register(*region) }?;
    }
    Ok(carry(Arc::new(transport)))
}

fn block_tables(tables: Tables) -> Vec<BlockTable> {
    let tables = tables.first.into_iter().zip(tables.blocks);
    tables.map(|(first, blocks)| BlockTable { first, blocks }).collect()
}

fn trust(key: Option<&str>, key_file: Option<&str>, insecure: bool) -> Result<Trust, Error> {
    match (key, key_file, insecure) {
        (Some(key), None, false) => Ok(Trust::Key(Key::new(key.as_bytes())?)),
        (None, Some(file), false) => Ok(Trust::Key(Key::from_file(Path::new(file))?)),
        (None, None, false) => Trust::from_environment(),
        (None, None, true) => Ok(Trust::Insecure),
        _ => Err(Error::Options("give one of key, key_file and insecure".to_owned())),
    }
}

/// An address, or the first of those that a name stands for.
fn address(name: &str, host: impl ToSocketAddrs + fmt::Debug) -> PyResult<SocketAddr> {
    let wrong =
        |why: String| PyValueError::new_err(format!("{name}: {host:?} is no address: {why}"));
    let mut found = host.to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
    found.next().ok_or_else(|| wrong("the name stands for none".to_owned()))
}

/// Through text: a ticket is a dictionary of the shape of its JSON, as a router passes it on.
fn read_ticket(ticket: &Bound<'_, PyDict>) -> PyResult<Ticket> {
    let text: String = ticket.py().import("json")?.call_method1("dumps", (ticket,))?.extract()?;
    serde_json::from_str(&text)
        .map_err(|error| PyValueError::new_err(format!("this is no ticket: {error}")))
}

fn to_python<'py>(py: Python<'py>, value: &impl serde::Serialize) -> PyResult<Bound<'py, PyAny>> {
    let text = serde_json::to_string(value).expect("plain data in memory always serialises");
    py.import("json")?.call_method1("loads", (text,))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
