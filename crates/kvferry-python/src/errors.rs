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
    raise(py, "ManifestError", &error.to_string(), |fields| fields.set_item("kind", variant(error)))
}

/// `kvferry.RequestError`, from the error's name and text.
pub(crate) fn request(py: Python<'_>, error: &RequestError) -> PyErr {
    raise(py, "RequestError", &error.to_string(), |fields| fields.set_item("kind", variant(error)))
}

/// `kvferry.AgentError`, from the error's name and text.
pub(crate) fn agent(py: Python<'_>, error: &kvferry_agent::Error) -> PyErr {
    raise(py, "AgentError", &error.to_string(), |fields| fields.set_item("kind", variant(error)))
}

/// `kvferry.Incompatible`, with what differs as fields.
pub(crate) fn incompatible(py: Python<'_>, error: &Incompatible) -> PyErr {
    let mut state = None;
    let mut fact = None;
    let mut rank = None;
    let (mut source, mut destination) = (None, None);
    match error {
        Incompatible::Identity { fact: name, source_rank, source_value, destination_value } => {
            fact = Some(name.clone());
            rank = Some(source_rank.clone());
            (source, destination) = (source_value.clone(), destination_value.clone());
        }
        Incompatible::Format { state: name, source_rank, source_format, destination_format } => {
            (state, rank) = (Some(name.clone()), Some(source_rank.clone()));
            source = Some(source_format.to_string());
            destination = Some(destination_format.to_string());
        }
        Incompatible::Axes { state: name, source_rank, source_axes, destination_axes } => {
            (state, rank) = (Some(name.clone()), Some(source_rank.clone()));
            (source, destination) = (Some(axes(source_axes)), Some(axes(destination_axes)));
        }
        Incompatible::Law { state: name, source_rank, source_law, destination_law } => {
            (state, rank) = (Some(name.clone()), Some(source_rank.clone()));
            source = Some(source_law.to_string());
            destination = Some(destination_law.to_string());
        }
        Incompatible::Window { state: name, source_rank, kept, needed } => {
            (state, rank) = (Some(name.clone()), Some(source_rank.clone()));
            (source, destination) = (Some(kept.to_string()), Some(needed.to_string()));
        }
        Incompatible::Phase { state: name, destination_phase, .. } => {
            state = Some(name.clone());
            destination = Some(destination_phase.to_string());
        }
        Incompatible::Uncovered { state: name, part, phase } => {
            state = Some(name.clone());
            destination = Some(format!("{part} of entries {phase}"));
        }
        Incompatible::Missing { state: name, .. } | Incompatible::Unproven { state: name, .. } => {
            state = Some(name.clone());
        }
        _ => {}
    }
    raise(py, "Incompatible", &error.to_string(), |fields| {
        fields.set_item("kind", variant(error))?;
        fields.set_item("state", state)?;
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

/// A variant's name in the way of Python: `RegionsOverlap` is `regions_overlap`.
fn variant(error: &impl std::fmt::Debug) -> String {
    let text = format!("{error:?}");
    let mut name = String::new();
    for letter in text.chars().take_while(char::is_ascii_alphanumeric) {
        if letter.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_lowercase());
    }
    name
}

fn axes(axes: &[Axis]) -> String {
    let axes: Vec<String> = axes.iter().map(Axis::to_string).collect();
    axes.join(", ")
}
