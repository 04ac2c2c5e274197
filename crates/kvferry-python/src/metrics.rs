//! `kvferry.metrics`: what both halves of an agent count.

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// What is counted and measured, by section and name, with what it means.
#[pyfunction]
pub(crate) fn metrics(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let sections = PyDict::new(py);
    for (section, described) in kvferry_agent::catalogue() {
        let names = PyDict::new(py);
        for (name, meaning) in described {
            names.set_item(name, meaning)?;
        }
        sections.set_item(section, names)?;
    }
    Ok(sections)
}
