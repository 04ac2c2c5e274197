//! `kvferry.Manifest`.

use std::sync::Arc;

use kvferry_layout as layout;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors;

/// The checked facts of one rank.
#[pyclass(frozen, eq, module = "kvferry")]
#[derive(PartialEq)]
pub(crate) struct Manifest(pub(crate) Arc<layout::Manifest>);

impl Manifest {
    fn checked(
        py: Python<'_>,
        read: impl FnOnce() -> Result<layout::Manifest, layout::ManifestError> + Send,
    ) -> PyResult<Self> {
        let read = py.detach(read);
        read.map(|manifest| Self(Arc::new(manifest))).map_err(|error| errors::manifest(py, &error))
    }
}

#[pymethods]
impl Manifest {
    /// Checks the facts of a draft, given as a dictionary in the shape of the readable form.
    #[new]
    fn new(draft: &Bound<'_, PyDict>) -> PyResult<Self> {
        let py = draft.py();
        // Through text: the draft's shape is that of its JSON, and so are the messages.
        let text: String = py.import("json")?.call_method1("dumps", (draft,))?.extract()?;
        Self::checked(py, move || {
            let draft: layout::Draft = serde_json::from_str(&text)
                .map_err(|error| layout::ManifestError::Decode { problem: error.to_string() })?;
            layout::Manifest::new(draft)
        })
    }

    #[staticmethod]
    fn from_json(py: Python<'_>, text: &str) -> PyResult<Self> {
        Self::checked(py, || layout::Manifest::from_json(text))
    }

    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        Self::checked(py, || layout::Manifest::from_bytes(data))
    }

    fn to_json(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.to_json())
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| self.0.to_bytes()))
    }

    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("json")?.call_method1("loads", (self.to_json(py),))?.get_item("manifest")
    }

    #[getter]
    fn engine(&self) -> &str {
        self.0.engine()
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.0.rank()
    }

    #[getter]
    fn label(&self) -> &str {
        self.0.label()
    }

    #[getter]
    fn identity(&self) -> std::collections::BTreeMap<String, String> {
        self.0.identity().clone()
    }

    /// Pickles as the compact form: manifests cross the processes of an engine.
    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        let read = slf.get_type().getattr("from_bytes")?;
        Ok((read, (slf.get().to_bytes(slf.py()),)))
    }

    fn __repr__(&self) -> String {
        let manifest = &self.0;
        let pieces: usize = manifest.groups().iter().map(|group| group.pieces.len()).sum();
        format!(
            "<kvferry.Manifest {} {}: {} groups, {pieces} pieces>",
            manifest.engine(),
            manifest.label(),
            manifest.groups().len()
        )
    }
}
