//! Rust's errors as Python's exceptions.
//!
//! The classes are written in Python (`kvferry._errors`): a class with fields of its own that extends
//! `Exception` is beyond the stable ABI of the Python versions that the package serves.

use kvferry_layout::{Axis, ManifestError};
use kvferry_plan::{Incompatible, RequestError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// `kvferry.ManifestError`, from the error's name and text.
pub(crate) fn manifest(py: Python<'_>, error: &ManifestError) -> PyErr {
    raise(py, "ManifestError", &error.to_string(), |fields| fields.set_item("kind", error.kind()))
}

/// `kvferry.RequestError`, from the error's name and text.
pub(crate) fn request(py: Python<'_>, error: &RequestError) -> PyErr {
    raise(py, "RequestError", &error.to_string(), |fields| fields.set_item("kind", error.kind()))
}

/// `kvferry.AgentError`, from the error's name and text.
pub(crate) fn agent(py: Python<'_>, error: &kvferry_agent::Error) -> PyErr {
    let kind = agent_kind(error);
    raise(py, "AgentError", &error.to_string(), |fields| fields.set_item("kind", kind))
}

/// `kvferry.Incompatible`, with what differs as fields.
pub(crate) fn incompatible(py: Python<'_>, error: &Incompatible) -> PyErr {
    let (mut fact, mut rank) = (None, None);
    let (mut source, mut destination) = (None, None);
    match error {
        Incompatible::Identity { fact: name, source_rank, source_value, destination_value } => {
            (fact, rank) = (Some(name), Some(source_rank));
            (source, destination) = (source_value.clone(), destination_value.clone());
        }
        Incompatible::Format { source_rank, source_format, destination_format, .. } => {
            rank = Some(source_rank);
            source = Some(source_format.to_string());
            destination = Some(destination_format.to_string());
        }
        Incompatible::Writer { source_rank, source_writer, destination_writer, .. } => {
            rank = Some(source_rank);
            source = source_writer.as_ref().map(ToString::to_string);
            destination = destination_writer.as_ref().map(ToString::to_string);
        }
        Incompatible::Axes { source_rank, source_axes, destination_axes, .. } => {
            rank = Some(source_rank);
            (source, destination) = (Some(axes(source_axes)), Some(axes(destination_axes)));
        }
        Incompatible::Law { source_rank, source_law, destination_law, .. } => {
            rank = Some(source_rank);
            source = Some(source_law.to_string());
            destination = Some(destination_law.to_string());
        }
        Incompatible::Window { source_rank, kept, needed, .. } => {
            rank = Some(source_rank);
            (source, destination) = (Some(kept.to_string()), Some(needed.to_string()));
        }
        Incompatible::Phase { destination_phase, .. } => {
            destination = Some(destination_phase.to_string());
        }
        Incompatible::Uncovered { part, phase, .. } => {
            destination = Some(format!("{part} of entries {phase}"));
        }
        // These have no values to compare.
        _ => {}
    }
    raise(py, "Incompatible", &error.to_string(), |fields| {
        fields.set_item("kind", error.kind())?;
        fields.set_item("state", error.state())?;
        fields.set_item("fact", fact)?;
        fields.set_item("source_rank", rank)?;
        fields.set_item("source_value", source)?;
        fields.set_item("destination_value", destination)
    })
}

fn raise(
    py: Python<'_>,
    class: &str,
    message: &str,
    fill: impl FnOnce(&Bound<'_, PyDict>) -> PyResult<()>,
) -> PyErr {
    let make = || -> PyResult<PyErr> {
        let fields = PyDict::new(py);
        fill(&fields)?;
        let class = py.import("kvferry._errors")?.getattr(class)?;
        Ok(PyErr::from_value(class.call((message,), Some(&fields))?))
    };
    make().unwrap_or_else(|failure| failure)
}

fn agent_kind(error: &kvferry_agent::Error) -> &'static str {
    use kvferry_agent::Error;
    use kvferry_agent::lease::NotGrown;
    match error {
        Error::Options(_) => "options",
        Error::Key(_) => "key",
        Error::NeedsKey(_) => "needs_key",
        Error::Io { .. } => "io",
        Error::Transport(_) => "transport",
        Error::Duplicate(_) => "duplicate",
        Error::AlreadyGranted(_) => "already_granted",
        Error::NotGrown(NotGrown::GivenUp(_)) => "given_up",
        Error::NotGrown(NotGrown::Changed { .. }) => "changed",
        Error::NotGrown(NotGrown::StepsDoNotRise { .. }) => "steps_do_not_rise",
        Error::NotGrown(NotGrown::TooMuchEnclosed { .. }) => "too_much_enclosed",
        Error::NotGrown(_) => "no_lease",
        Error::TableTooLong { .. } => "table_too_long",
        Error::Draining(_) => "draining",
        Error::Unsealed { .. } => "unsealed",
        Error::Forged { .. } => "forged",
        Error::Stopped => "stopped",
        Error::Peer(_) => "peer",
        Error::Cards(_) => "cards",
        _ => "other",
    }
}

fn axes(axes: &[Axis]) -> String {
    let axes: Vec<String> = axes.iter().map(Axis::to_string).collect();
    axes.join(", ")
}
