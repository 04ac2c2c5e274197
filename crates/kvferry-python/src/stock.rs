//! Engines that use NIXL without kvferry: `introduce` and `Bell`.

use std::ffi::CString;

use kvferry_agent::{Error, Incarnation, IntroducedRank};
use kvferry_layout as layout;
use kvferry_nixl::{self as nixl, NixlOptions, describe_foreign};
use kvferry_transport::Instance;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors;
use crate::manifest::Manifest;
use crate::packages::site_packages;
use crate::worker::Worker;

/// Makes an engine known to a worker that runs no agent.
#[pyfunction]
#[pyo3(signature = (worker, address, incarnation, ranks))]
pub(crate) fn introduce(
    py: Python<'_>,
    worker: &Worker,
    address: &str,
    incarnation: &str,
    ranks: Vec<(Py<Manifest>, Vec<u8>, [u8; 16])>,
) -> PyResult<()> {
    let incarnation = u64::from_str_radix(incarnation, 16).map_err(|_| {
        PyValueError::new_err(format!(
            "incarnation is {incarnation:?}, which should be 16 hexadecimal digits"
        ))
    })?;
    let half = worker.half.get(py)?;
    let ranks = ranks.into_iter().map(|(manifest, metadata, instance)| {
        let manifest = layout::Manifest::clone(&manifest.get().0);
        let regions = manifest.regions().to_vec();
        let description = describe_foreign(Instance(instance), regions, &metadata);
        description.map(|description| IntroducedRank { manifest, description })
    });
    let made = ranks.collect::<Result<Vec<_>, _>>().map_err(Error::from);
    let made = made
        .and_then(|ranks| py.detach(|| half.introduce(address, Incarnation(incarnation), ranks)));
    made.map_err(|error| errors::agent(py, &error))
}

/// Sends notifications to processes that use NIXL.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Bell(nixl::Bell);

#[pymethods]
impl Bell {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Self> {
        let site_packages = site_packages(py)?;
        let options = NixlOptions { site_packages, ..NixlOptions::default() };
        let made = py.detach(|| nixl::Bell::new(&options));
        made.map(Self).map_err(|error| errors::agent(py, &error.into()))
    }

    fn meet(&self, py: Python<'_>, metadata: &[u8]) -> PyResult<String> {
        let met = py.detach(|| self.0.meet(metadata));
        let name = met.map_err(|error| errors::agent(py, &error.into()))?;
        name.into_string().map_err(|_| PyValueError::new_err("NIXL's name for it is not text"))
    }

    fn ring(&self, py: Python<'_>, name: &str, message: &[u8]) -> PyResult<()> {
        let name = text(name)?;
        let rung = py.detach(|| self.0.ring(&name, message));
        rung.map_err(|error| errors::agent(py, &error.into()))
    }

    fn forget(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        let name = text(name)?;
        py.detach(|| self.0.forget(&name));
        Ok(())
    }
}

fn text(name: &str) -> PyResult<CString> {
    CString::new(name).map_err(|_| PyValueError::new_err("a name holds no zero byte"))
}
