//! The facts that adapters share with kvferry's own rules.

use std::collections::BTreeMap;

use kvferry_layout::Format;
use kvferry_models::{Facts, Packing};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde_json::{Value, json};

/// Everything that is known of states and families, as plain data.
#[pyfunction]
pub(crate) fn facts(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    read(py, &Facts::shipped().to_json())
}

/// The tensors of a kind and what one rank holds of them.
#[pyfunction]
#[pyo3(signature = (kind, sizes, formats, *, rank, ranks))]
pub(crate) fn states<'py>(
    py: Python<'py>,
    kind: &str,
    sizes: BTreeMap<String, u64>,
    formats: BTreeMap<String, (String, u32)>,
    rank: u32,
    ranks: u32,
) -> PyResult<Bound<'py, PyAny>> {
    let sizes: Vec<(&str, u64)> = sizes.iter().map(|(name, size)| (name.as_str(), *size)).collect();
    let formats: Vec<(&str, Format)> = formats
        .iter()
        .map(|(role, (name, bytes))| (role.as_str(), Format::new(name, *bytes)))
        .collect();
    let formats: Vec<(&str, &Format)> =
        formats.iter().map(|(role, format)| (*role, format)).collect();
    if rank >= ranks {
        return Err(PyValueError::new_err(format!("there is no rank {rank} among {ranks}")));
    }
    let made = Facts::shipped().states().tensors(kind, &sizes, &formats);
    let tensors = made.map_err(|error| PyValueError::new_err(error.to_string()))?;
    let tensors: Vec<Value> = tensors
        .iter()
        .map(|tensor| {
            let states = tensor.states.iter().map(|state| {
                json!({
                    "name": state.name,
                    "kind": state.kind,
                    "bounds": state.held(rank.into(), ranks.into()),
                })
            });
            let (packing, spare) = match tensor.packing {
                Packing::Plain => ("plain", false),
                Packing::Planes => ("planes", false),
                Packing::Convolution { grows } => ("convolution", grows),
            };
            json!({
                "packing": packing,
                "spare": spare,
                "states": states.collect::<Vec<_>>(),
            })
        })
        .collect();
    read(py, &json!(tensors).to_string())
}

/// The sizes of a kind in the whole model, as far as the shapes on one rank tell them.
#[pyfunction]
#[pyo3(signature = (kind, shapes, told, *, ranks))]
pub(crate) fn solve(
    kind: &str,
    shapes: Vec<Vec<u64>>,
    told: BTreeMap<String, u64>,
    ranks: u32,
) -> PyResult<BTreeMap<String, u64>> {
    let solved = Facts::shipped().states().solve(kind, &shapes, &told, ranks.into());
    solved.map_err(|error| PyValueError::new_err(error.to_string()))
}

fn read<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (text,))
}
