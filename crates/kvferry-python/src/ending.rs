//! `kvferry.Ending`: how a load ended.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_agent::{Lowerings, Moments, Notice, Outcome, ReadBy, Timings};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert::since_1970;
use crate::plan::{array, words};

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
    read_by: Arc<[ReadBy]>,
    rest: Vec<u8>,
    enclosed: Vec<u8>,
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
    fn read_by(&self) -> Vec<(u32, &'static str, &str)> {
        let all = self.read_by.iter();
        all.map(|by| (by.rank, by.chosen.transport, by.chosen.not_by.as_str())).collect()
    }

    #[getter]
    fn rest<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        array(py, &self.rest, 2)
    }

    #[getter]
    fn enclosed<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.enclosed)
    }

    fn __repr__(&self) -> String {
        format!("<kvferry.Ending {}: {} {}>", self.request, self.outcome, self.reason)
    }
}

impl Ending {
    /// Address and length of each part of the rest.
    pub(crate) fn areas(&self) -> impl Iterator<Item = [u64; 2]> + '_ {
        let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
        self.rest.chunks_exact(16).map(move |area| [word(&area[..8]), word(&area[8..])])
    }

    pub(crate) fn new(notice: Notice) -> Self {
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
                    read_by: Arc::default(),
                    rest: vec![],
                    enclosed: vec![],
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
            read_by: ending.read_by,
            rest: words(ending.rest.iter().map(|area| [area.address, area.bytes])),
            enclosed: ending.enclosed,
        }
    }
}
