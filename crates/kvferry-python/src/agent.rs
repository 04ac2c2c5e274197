//! `kvferry.Scheduler` and `kvferry.Worker`: the two halves of an agent.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use kvferry_agent::{
    self as agent, Audit, Card, Error, Following, Grant, InFlight, Key, Load, Loss, LostWhy,
    Lowerings, Moments, Notice, Origin, Outcome, Progress, SchedulerOptions, Timings, Tls,
    TlsFiles, Trust, WorkerOptions,
};
use kvferry_layout::{self as layout, Place};
use kvferry_transport::tcp::TcpOptions;
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::convert::{json, read_ticket, seconds, ticket};
use crate::errors;
use crate::manifest::Manifest;
use crate::plan::{Asked, array, granted_tables, words};
use crate::transports::{by_name, site_packages};

/// The scheduler half of an agent.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Scheduler(Half<agent::Scheduler>);

/// The worker half of an agent.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Worker {
    /// Its carrier owns what keeps the registered memory alive, and gives it up last: whoever shares
    /// this half, a thread that waits for instance, may touch the memory.
    pub(crate) half: Half<agent::Worker>,
    /// What of the memory this process can write.
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
    moments: Option<Box<Moments>>,
    lowerings: Lowerings,
    rest: Vec<u8>,
}

/// What is counted and measured, by section and name, with what it means.
#[pyfunction]
pub(crate) fn metrics(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let sections = PyDict::new(py);
    for (section, described) in agent::catalogue() {
        let names = PyDict::new(py);
        for (name, meaning) in described {
            names.set_item(name, meaning)?;
        }
        sections.set_item(section, names)?;
    }
    Ok(sections)
}

/// Half an agent, until it is closed. A thread inside one of its methods shares it meanwhile.
pub(crate) struct Half<T>(Mutex<Option<Arc<T>>>);

pub(crate) trait Waits {
    fn end_waits(&self);
}

impl Waits for agent::Scheduler {
    fn end_waits(&self) {
        self.end_waits();
    }
}

impl Waits for agent::Worker {
    fn end_waits(&self) {
        self.end_waits();
    }
}

impl<T: Waits> Half<T> {
    fn new(half: T) -> Self {
        Self(Mutex::new(Some(Arc::new(half))))
    }

    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<Arc<T>> {
        self.0.lock().clone().ok_or_else(|| errors::agent(py, &Error::Stopped))
    }

    /// Gives up this share. Whoever waits at another one returns at once, and the last share ends it.
    fn close(&self) {
        let half = self.0.lock().take();
        if let Some(half) = half {
            half.end_waits();
        }
    }
}

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(signature = (engine, *, bind="127.0.0.1:0", advertise=None, key=None, key_file=None, tls=None, insecure=false, lease=30.0, longest=1800.0))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        py: Python<'_>,
        engine: &str,
        bind: &str,
        advertise: Option<String>,
        key: Option<&str>,
        key_file: Option<PathBuf>,
        tls: Option<(PathBuf, PathBuf, PathBuf)>,
        insecure: bool,
        lease: f64,
        longest: f64,
    ) -> PyResult<Self> {
        let options = SchedulerOptions {
            bind: address("listen on", bind)?,
            advertise,
            trust: trust(key, key_file, tls, insecure).map_err(|e| errors::agent(py, &e))?,
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

    #[pyo3(signature = (request, *, tokens, blocks, first=None, origin=None))]
    fn grant<'py>(
        &self,
        request: &str,
        tokens: u64,
        blocks: &Bound<'py, PyAny>,
        first: Option<&Bound<'py, PyAny>>,
        origin: Option<&[u8]>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let py = blocks.py();
        let half = self.0.get(py)?;
        let origin = origin.map(read_origin).transpose()?;
        let grant = Grant { epoch: 0, tokens, tables: granted_tables(blocks, first)? };
        let granted = py.detach(|| {
            let ticket = match origin {
                Some(origin) => half.grant_from(request, grant, origin)?,
                None => half.grant(request, grant)?,
            };
            Ok((ticket, half.granted(request).map_or(0, |grant| grant.epoch)))
        });
        let (granted, epoch) = granted.map_err(|error| errors::agent(py, &error))?;
        let fields = ticket(py, &granted)?;
        if epoch > 0 {
            // Part of what is granted; whoever loads by these tables needs it.
            fields.set_item("epoch", epoch)?;
        }
        Ok(fields)
    }

    #[pyo3(signature = (request, *, name=None))]
    fn open<'py>(
        &self,
        py: Python<'py>,
        request: &str,
        name: Option<&str>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let half = self.0.get(py)?;
        let opened = py.detach(|| half.open(request, name));
        ticket(py, &opened.map_err(|error| errors::agent(py, &error))?)
    }

    #[pyo3(signature = (request, *, tokens, blocks, first=None, in_flight=vec![]))]
    fn advance(
        &self,
        request: &str,
        tokens: u64,
        blocks: &Bound<'_, PyAny>,
        first: Option<&Bound<'_, PyAny>>,
        in_flight: Vec<(u64, u64)>,
    ) -> PyResult<()> {
        let py = blocks.py();
        let half = self.0.get(py)?;
        let tables = granted_tables(blocks, first)?;
        let in_flight = in_flight.into_iter().map(|(step, tokens)| InFlight { step, tokens });
        let in_flight: Vec<InFlight> = in_flight.collect();
        let advanced = py.detach(|| half.advance_with(request, tokens, tables, &in_flight));
        advanced.map_err(|error| errors::agent(py, &error))
    }

    fn restart(&self, py: Python<'_>, request: &str) -> PyResult<()> {
        let half = self.0.get(py)?;
        py.detach(|| half.restart(request)).map_err(|error| errors::agent(py, &error))
    }

    fn revoke(&self, py: Python<'_>, request: &str) -> PyResult<bool> {
        let half = self.0.get(py)?;
        Ok(py.detach(|| half.revoke(request)))
    }

    #[pyo3(signature = (timeout=0.0))]
    fn released(&self, py: Python<'_>, timeout: f64) -> PyResult<Vec<(String, String)>> {
        let half = self.0.get(py)?;
        let until = Instant::now() + seconds("timeout", timeout)?;
        // Given up without the interpreter: if it was closed meanwhile, this share is the last.
        let released = py.detach(move || half.wait_released(until));
        Ok(released.into_iter().map(|one| (one.request, one.why.to_string())).collect())
    }

    #[pyo3(signature = (ticket, *, patience))]
    fn hold(&self, py: Python<'_>, ticket: &Bound<'_, PyDict>, patience: f64) -> PyResult<()> {
        let (half, ticket) = (self.0.get(py)?, read_ticket(ticket)?);
        let patience = seconds("patience", patience)?;
        py.detach(|| half.hold(&ticket, patience));
        Ok(())
    }

    #[pyo3(signature = (request, *, ticket=None, engine=None, address=None, name=None, patience))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn follow(
        &self,
        py: Python<'_>,
        request: &str,
        ticket: Option<&Bound<'_, PyDict>>,
        engine: Option<String>,
        address: Option<String>,
        name: Option<String>,
        patience: f64,
    ) -> PyResult<()> {
        let following = match (ticket, engine, address, name) {
            (Some(ticket), None, None, None) => Following::Ticket(read_ticket(ticket)?),
            (None, Some(engine), Some(address), Some(name)) => {
                Following::Name { engine, address, name }
            }
            _ => {
                let message = "give either ticket, or engine, address and name";
                return Err(PyValueError::new_err(message));
            }
        };
        let half = self.0.get(py)?;
        let patience = seconds("patience", patience)?;
        let followed = py.detach(|| half.follow(request, following, patience));
        followed.map_err(|error| errors::agent(py, &error))
    }

    fn frontier<'py>(
        &self,
        py: Python<'py>,
        request: &str,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        // A look into two tables: not worth letting go of the interpreter.
        let Some(progress) = self.0.get(py)?.frontier(request) else { return Ok(None) };
        let Progress { ticket: known, epoch, tokens, begun, sealed, speed } = progress;
        let fields = PyDict::new(py);
        fields.set_item("ticket", ticket(py, &known)?)?;
        fields.set_item("epoch", epoch)?;
        fields.set_item("tokens", tokens)?;
        fields.set_item("begun", begun)?;
        fields.set_item("sealed", sealed)?;
        fields.set_item("speed", speed)?;
        Ok(Some(fields))
    }

    fn unfollow(&self, py: Python<'_>, request: &str) -> PyResult<()> {
        let half = self.0.get(py)?;
        py.detach(|| half.unfollow(request));
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

    fn lost<'py>(&self, py: Python<'py>) -> PyResult<Vec<(Bound<'py, PyDict>, String)>> {
        let half = self.0.get(py)?;
        let lost = py.detach(|| half.lost());
        let told = lost.iter().map(|one| {
            let fields = match &one.ticket {
                Some(known) => ticket(py, known)?,
                None => PyDict::new(py),
            };
            if let Some(request) = &one.follows {
                fields.set_item("follows", request)?;
            }
            if one.why == LostWhy::NotHeld(Loss::Draining) {
                fields.set_item("draining", true)?;
            }
            Ok((fields, one.why.to_string()))
        });
        told.collect()
    }

    fn drain(&self, py: Python<'_>) -> PyResult<bool> {
        let half = self.0.get(py)?;
        Ok(py.detach(|| half.drain()))
    }

    fn resume(&self, py: Python<'_>) -> PyResult<bool> {
        let half = self.0.get(py)?;
        Ok(py.detach(|| half.resume()))
    }

    fn drain_on(&self, py: Python<'_>, signal: i32) -> PyResult<()> {
        let half = self.0.get(py)?;
        py.detach(|| half.drain_on(signal)).map_err(|error| errors::agent(py, &error))
    }

    fn left(&self, py: Python<'_>) -> PyResult<(u32, u32)> {
        let half = self.0.get(py)?;
        let left = py.detach(|| half.left());
        Ok((left.leases, left.holds))
    }

    fn watch(&self, py: Python<'_>) -> PyResult<()> {
        self.0.get(py)?.watch();
        Ok(())
    }

    fn notes(&self, py: Python<'_>) -> PyResult<Vec<(String, &'static str, String, f64)>> {
        let notes = self.0.get(py)?.notes().into_iter();
        Ok(notes
            .map(|note| (note.request, note.did.name(), note.who, since_1970(note.at)))
            .collect())
    }

    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let half = self.0.get(py)?;
        json(py, &py.detach(|| half.status()))
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
    #[pyo3(signature = (manifest, *, ranks, memory, transport="local", bind="127.0.0.1:0", advertise=None, key=None, key_file=None, tls=None, insecure=false, handshake=10.0, concurrent=64, least_ahead=0.002, lowering="auto", audit=0.01))]
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
        handshake: f64,
        concurrent: usize,
        least_ahead: f64,
        lowering: &str,
        audit: f64,
    ) -> PyResult<Self> {
        let py = manifest.py();
        let failed = |error: Error| errors::agent(py, &error);
        let bound = address("listen on", bind)?;
        let audit = Audit::fraction(audit).map_err(|e| PyValueError::new_err(e.to_string()))?;
        let options = WorkerOptions {
            // A port that was named is the transport's.
            bind: SocketAddr::new(bound.ip(), 0),
            advertise: advertise.map(str::to_owned),
            audit,
            trust: trust(key, key_file, tls, insecure).map_err(failed)?,
            handshake: seconds("handshake", handshake)?,
            concurrent,
            least_ahead: seconds("least_ahead", least_ahead)?,
            lowering: lowering.parse().map_err(PyValueError::new_err::<String>)?,
            ..WorkerOptions::new(ranks)
        };
        let advertise = advertise.map(|host| address("advertise", (host, 0))).transpose()?;
        let advertise = advertise.map(|address| address.ip());
        let tcp = TcpOptions { bind: bound, advertise, ..TcpOptions::default() };
        let site_packages = site_packages(py)?;
        let manifest = Arc::clone(&manifest.get().0);
        let memory = Arc::new(memory);
        let made = py.detach(|| {
            let carrier = by_name(transport, tcp, site_packages, manifest.regions(), memory)?;
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
                let epoch = ticket.get_item("epoch")?.map(|epoch| epoch.extract()).transpose();
                let epoch = epoch.map_err(|_| {
                    PyValueError::new_err("this is not a ticket: 'epoch' is not a number")
                })?;
                let tokens = granted.unwrap_or(asked.tokens);
                Some(Grant { epoch: epoch.unwrap_or(0), tokens, tables })
            }
            None if granted.is_some() => {
                let message =
                    "granted says how many tokens the source_blocks hold, which are missing";
                return Err(PyValueError::new_err(message));
            }
            // Asked for where they are.
            None => None,
        };
        let load = Load {
            request,
            ticket: read_ticket(ticket)?,
            grant,
            origin: origin.map(read_origin).transpose()?,
            tokens: asked.tokens,
            cached: asked.cached.unwrap_or_else(|| vec![0; asked.destination.len()]),
            destination: asked.destination,
            deadline: seconds("deadline", deadline)?,
            patience: seconds("patience", patience)?,
            rest,
        };
        py.detach(|| half.load(load)).map_err(|error| errors::agent(py, &error))
    }

    fn begin_step(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        // These three only leave a word behind: not worth letting go of the interpreter.
        self.half.get(py)?.begin_step(step);
        Ok(())
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

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.half.close());
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
    fn moments(&self) -> BTreeMap<&'static str, f64> {
        let Some(moments) = &self.moments else { return BTreeMap::new() };
        let began = since_1970(moments.began);
        let over = moments.named().into_iter();
        let over = over.filter_map(|(name, at)| Some((name, began + at?.as_secs_f64())));
        std::iter::once(("began", began)).chain(over).collect()
    }

    #[getter]
    fn lowerings(&self) -> Vec<&'static str> {
        self.lowerings.names().collect()
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
                    moments: None,
                    lowerings: Lowerings::default(),
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
            moments: Some(ending.moments),
            lowerings: ending.lowerings,
            rest: words(ending.rest.iter().map(|area| [area.address, area.bytes])),
        }
    }
}

/// Seconds, by the wall clock.
fn since_1970(at: SystemTime) -> f64 {
    at.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// What a cache was computed from, as the engine says.
fn read_origin(bytes: &[u8]) -> PyResult<Origin> {
    let wrong = |_| {
        let message = format!("origin has {} bytes, but must have 16", bytes.len());
        PyValueError::new_err(message)
    };
    Ok(Origin(bytes.try_into().map_err(wrong)?))
}

fn trust(
    key: Option<&str>,
    key_file: Option<PathBuf>,
    tls: Option<(PathBuf, PathBuf, PathBuf)>,
    insecure: bool,
) -> Result<Trust, Error> {
    match (key, key_file, tls, insecure) {
        (Some(key), None, None, false) => Ok(Trust::Key(Key::new(key.as_bytes())?)),
        (None, Some(file), None, false) => Ok(Trust::Key(Key::from_file(Path::new(&file))?)),
        (None, None, Some((certificate, private_key, authority)), false) => {
            let files = TlsFiles { certificate, private_key, authority };
            Ok(Trust::Tls(Tls::from_files(&files)?))
        }
        (None, None, None, false) => Trust::from_environment(),
        (None, None, None, true) => Ok(Trust::Insecure),
        _ => Err(Error::Options("give only one of key, key_file, tls and insecure".to_owned())),
    }
}

/// An address, or the first of those that a name stands for. `purpose` is what it is wanted for: how
/// the option is called depends on who asks.
fn address(purpose: &str, host: impl ToSocketAddrs + fmt::Debug) -> PyResult<SocketAddr> {
    let wrong = |why: String| {
        PyValueError::new_err(format!("{host:?} is not an address to {purpose}: {why}"))
    };
    let mut found = host.to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
    found.next().ok_or_else(|| wrong("the name does not stand for any".to_owned()))
}
