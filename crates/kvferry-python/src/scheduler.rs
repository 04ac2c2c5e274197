//! `kvferry.Scheduler`: the half of an agent that promises and hears.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use kvferry_agent::{
    self as agent, Card, Error, Following, Grant, InFlight, Loss, LostWhy, Progress,
    SchedulerOptions, Sealed,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::convert::{
    self, address, json, read_epoch, read_origin, read_seal, read_ticket, seconds, since_1970,
    ticket,
};
use crate::errors;
use crate::half::Half;
use crate::plan::granted_tables;
use crate::trust::{networks, trust};

/// The scheduler half of an agent.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Scheduler(Half<agent::Scheduler>);

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(signature = (engine, *, bind="127.0.0.1:0", advertise=None, key=None, key_file=None, tls=None, insecure=false, peers=vec![], lease=30.0, longest=1800.0))]
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
        peers: Vec<String>,
        lease: f64,
        longest: f64,
    ) -> PyResult<Self> {
        let mut options = SchedulerOptions::new(engine);
        options.bind = address("listen on", bind)?;
        options.advertise = advertise;
        options.trust = trust(key, key_file, tls, insecure).map_err(|e| errors::agent(py, &e))?;
        options.peers = networks(&peers).map_err(|e| errors::agent(py, &e))?;
        options.term = seconds("lease", lease)?;
        options.longest = seconds("longest", longest)?;
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
            let grant = half.granted(request).unwrap_or_default();
            let seal = half.seal(Sealed::Ticket(&ticket, &grant));
            Ok((ticket, grant.epoch, seal))
        });
        let (granted, epoch, seal) = granted.map_err(|error| errors::agent(py, &error))?;
        let fields = ticket(py, &granted)?;
        if epoch > 0 {
            // Part of what is granted; whoever loads by these tables needs it.
            fields.set_item("epoch", epoch)?;
        }
        if let Some(seal) = seal {
            fields.set_item("seal", seal.to_string())?;
        }
        Ok(fields)
    }

    #[pyo3(signature = (ticket, *, tokens, blocks, first=None))]
    fn check(
        &self,
        ticket: &Bound<'_, PyDict>,
        tokens: u64,
        blocks: &Bound<'_, PyAny>,
        first: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let py = ticket.py();
        let (half, epoch, seal) = (self.0.get(py)?, read_epoch(ticket)?, read_seal(ticket)?);
        let grant = Grant { epoch, tokens, tables: granted_tables(blocks, first)? };
        let ticket = read_ticket(ticket)?;
        let checked = py.detach(|| half.check(Sealed::Ticket(&ticket, &grant), seal));
        checked.map_err(|error| errors::agent(py, &error))
    }

    #[getter]
    fn engine_seal(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let half = self.0.get(py)?;
        let seal = half.seal(Sealed::Engine { engine: half.engine(), address: half.address() });
        Ok(seal.map(|seal| seal.to_string()))
    }

    #[pyo3(signature = (engine, address, seal=None))]
    fn check_engine(
        &self,
        py: Python<'_>,
        engine: &str,
        address: &str,
        seal: Option<&str>,
    ) -> PyResult<()> {
        let half = self.0.get(py)?;
        let checked =
            half.check(Sealed::Engine { engine, address }, seal.map(convert::seal).transpose()?);
        checked.map_err(|error| errors::agent(py, &error))
    }

    fn foreign(&self, py: Python<'_>, address: &str) -> PyResult<Vec<String>> {
        let half = self.0.get(py)?;
        let found = py.detach(|| half.foreign(address));
        let found = found.map_err(|error| errors::agent(py, &error))?;
        Ok(found.iter().map(ToString::to_string).collect())
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

    fn enclose(&self, py: Python<'_>, request: &str, enclosed: Vec<u8>) -> PyResult<()> {
        let half = self.0.get(py)?;
        py.detach(|| half.enclose(request, enclosed)).map_err(|error| errors::agent(py, &error))
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

    fn leave(&self, py: Python<'_>, request: &str) -> PyResult<()> {
        let half = self.0.get(py)?;
        py.detach(|| half.leave(request));
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
