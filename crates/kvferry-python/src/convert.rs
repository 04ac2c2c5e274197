//! Rust's data as Python's objects, and tickets, times and addresses the other way, without a detour through text.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, SystemTime};

use kvferry_agent::{Incarnation, Origin, Seal, Ticket};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use serde_json::Value;

/// A ticket as a dictionary in the shape of its JSON: a router passes it on as such.
pub(crate) fn ticket<'py>(py: Python<'py>, ticket: &Ticket) -> PyResult<Bound<'py, PyDict>> {
    // By name: a field that is added to tickets does not compile until it is here.
    let Ticket { engine, address, incarnation, request, nonce, term_ms } = ticket;
    let fields = PyDict::new(py);
    fields.set_item("engine", engine)?;
    fields.set_item("address", address)?;
    fields.set_item("incarnation", incarnation.to_string())?;
    fields.set_item("request", request)?;
    fields.set_item("nonce", format!("{nonce:016x}"))?;
    fields.set_item("term_ms", term_ms)?;
    Ok(fields)
}

/// The ticket in a dictionary. What a router has added to it does not matter.
pub(crate) fn read_ticket(fields: &Bound<'_, PyDict>) -> PyResult<Ticket> {
    Ok(Ticket {
        engine: field(fields, "engine", "text")?,
        address: field(fields, "address", "text")?,
        incarnation: Incarnation(hex(fields, "incarnation")?),
        request: field(fields, "request", "text")?,
        nonce: hex(fields, "nonce")?,
        term_ms: field(fields, "term_ms", "a number of milliseconds")?,
    })
}

/// The epoch that goes with a ticket whose request could be followed; 0 for others.
pub(crate) fn read_epoch(fields: &Bound<'_, PyDict>) -> PyResult<u32> {
    match fields.get_item("epoch")? {
        Some(epoch) => epoch.extract().map_err(|_| wrong("epoch", &epoch, "a number")),
        None => Ok(0),
    }
}

/// The seal that goes with a ticket, if there is one.
pub(crate) fn read_seal(fields: &Bound<'_, PyDict>) -> PyResult<Option<Seal>> {
    match fields.get_item("seal")? {
        Some(_) => seal(&field::<String>(fields, "seal", "text")?).map(Some),
        None => Ok(None),
    }
}

/// A seal in text.
pub(crate) fn seal(text: &str) -> PyResult<Seal> {
    text.parse().map_err(|_| PyValueError::new_err("a seal is 32 hexadecimal digits"))
}

fn field<'py, T>(fields: &Bound<'py, PyDict>, name: &str, wanted: &str) -> PyResult<T>
where
    for<'a> T: FromPyObject<'a, 'py>,
{
    let Some(value) = fields.get_item(name)? else {
        return Err(no_ticket(&format!("'{name}' is missing")));
    };
    value.extract().map_err(|_| wrong(name, &value, wanted))
}

/// A number of 64 bits, which is text in JSON: many readers of JSON cut such numbers.
fn hex(fields: &Bound<'_, PyDict>, name: &str) -> PyResult<u64> {
    const WANTED: &str = "16 hexadecimal digits";
    let text: String = field(fields, name, WANTED)?;
    u64::from_str_radix(&text, 16).map_err(|_| match fields.get_item(name) {
        Ok(Some(value)) => wrong(name, &value, WANTED),
        _ => no_ticket(&format!("'{name}' is missing")),
    })
}

fn wrong(name: &str, value: &Bound<'_, PyAny>, wanted: &str) -> PyErr {
    // It may come from a client, and be long, or nested too deeply to be written.
    let shown = value.repr().map_or_else(|_| "?".to_owned(), |repr| repr.to_string());
    let shown: String = shown.chars().take(60).collect();
    no_ticket(&format!("'{name}' is {shown}, which should be {wanted}"))
}

fn no_ticket(why: &str) -> PyErr {
    PyValueError::new_err(format!("this is not a ticket: {why}"))
}

/// Plain data in the shape of its JSON.
pub(crate) fn json<'py>(
    py: Python<'py>,
    value: &impl serde::Serialize,
) -> PyResult<Bound<'py, PyAny>> {
    let value = serde_json::to_value(value)
        .map_err(|error| PyValueError::new_err(format!("it has no form in JSON: {error}")))?;
    object(py, value)
}

fn object(py: Python<'_>, value: Value) -> PyResult<Bound<'_, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
        Value::String(text) => text.into_pyobject(py)?.into_any(),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => number.into_pyobject(py)?.into_any(),
            (None, Some(number)) => number.into_pyobject(py)?.into_any(),
            (None, None) => number.as_f64().into_pyobject(py)?.into_any(),
        },
        Value::Array(values) => {
            let list = PyList::empty(py);
            for value in values {
                list.append(object(py, value)?)?;
            }
            list.into_any()
        }
        Value::Object(values) => {
            let fields = PyDict::new(py);
            for (name, value) in values {
                fields.set_item(name, object(py, value)?)?;
            }
            fields.into_any()
        }
    })
}

/// A time that Python gives in seconds; `name` is the argument that it came as.
pub(crate) fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    let wrong = |_| PyValueError::new_err(format!("{name}: {value} is not a number of seconds"));
    // A century is for ever, and far from where clocks overflow.
    Duration::try_from_secs_f64(value.min(3.2e9)).map_err(wrong)
}

/// An address, or the first of those that a name stands for. `purpose` is what it is wanted for: how
/// the option is called depends on who asks.
pub(crate) fn address(
    purpose: &str,
    host: impl ToSocketAddrs + fmt::Debug,
) -> PyResult<SocketAddr> {
    let wrong = |why: String| {
        PyValueError::new_err(format!("{host:?} is not an address to {purpose}: {why}"))
    };
    let mut found = host.to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
    found.next().ok_or_else(|| wrong("the name does not stand for any".to_owned()))
}

/// What a cache was computed from, as the engine says.
pub(crate) fn read_origin(bytes: &[u8]) -> PyResult<Origin> {
    let wrong = |_| {
        let message = format!("origin has {} bytes, but must have 16", bytes.len());
        PyValueError::new_err(message)
    };
    Ok(Origin(bytes.try_into().map_err(wrong)?))
}

/// Seconds, by the wall clock.
pub(crate) fn since_1970(at: SystemTime) -> f64 {
    at.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
