//! `kvferry.Plan`.

use std::sync::Arc;

use kvferry_layout::ByteCopy;
use kvferry_plan as plan;
use kvferry_plan::{Request, Table, Transfer};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict};

use crate::errors;
use crate::manifest::Manifest;

/// What one destination rank does to serve requests from the ranks of another engine.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Plan(plan::Plan);

/// What the copies of a request from one source rank amount to.
#[pyclass(frozen, eq, get_all, module = "kvferry")]
#[derive(PartialEq)]
pub(crate) struct Summary {
    bytes: u64,
    copies: u64,
    shortest: u64,
    longest: u64,
    mean: f64,
}

/// Compiles the plan of one destination rank.
#[pyfunction]
pub(crate) fn compile(
    py: Python<'_>,
    destination: &Bound<'_, Manifest>,
    sources: Vec<Bound<'_, Manifest>>,
) -> PyResult<Plan> {
    let destination = Arc::clone(&destination.get().0);
    let sources: Vec<_> = sources.iter().map(|source| Arc::clone(&source.get().0)).collect();
    py.detach(|| {
        let sources: Vec<&_> = sources.iter().map(Arc::as_ref).collect();
        plan::Plan::compile(&destination, &sources)
    })
    .map(Plan)
    .map_err(|error| errors::incompatible(py, &error))
}

#[pymethods]
impl Plan {
    /// The number of source ranks that the plan was compiled from.
    #[getter]
    fn sources(&self) -> usize {
        self.0.source_count()
    }

    /// Whether anything is read from a source rank.
    fn reads(&self, source: usize) -> bool {
        self.0.reads(source)
    }

    /// The copies of a request: for every source rank an array of (source address, destination
    /// address, length).
    #[pyo3(
        signature = (**request),
        text_signature = "($self, *, tokens, source_blocks, destination_blocks, cached=None, \
                          source_first=None, destination_first=None)"
    )]
    fn copies<'py>(
        &self,
        py: Python<'py>,
        request: Option<Bound<'py, PyDict>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let lists = self.answer(py, request, |transfer| {
            let list =
                |source| {
                    let copies = transfer.copies(source);
                    words(copies.map(|ByteCopy { source, destination, bytes }| {
                        [source, destination, bytes]
                    }))
                };
            (0..self.0.source_count()).map(list).collect::<Vec<_>>()
        })?;
        lists.iter().map(|list| array(py, list, 3)).collect()
    }

    /// What is left of the request's own destination blocks: an array of (address, length).
    #[pyo3(
        signature = (**request),
        text_signature = "($self, *, tokens, source_blocks, destination_blocks, cached=None, \
                          source_first=None, destination_first=None)"
    )]
    fn rest<'py>(
        &self,
        py: Python<'py>,
        request: Option<Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let list = self.answer(py, request, |transfer| {
            words(transfer.rest().map(|area| [area.address, area.bytes]))
        })?;
        array(py, &list, 2)
    }

    /// What the copies from every source rank amount to.
    #[pyo3(
        signature = (**request),
        text_signature = "($self, *, tokens, source_blocks, destination_blocks, cached=None, \
                          source_first=None, destination_first=None)"
    )]
    fn summary(
        &self,
        py: Python<'_>,
        request: Option<Bound<'_, PyDict>>,
    ) -> PyResult<Vec<Summary>> {
        let sums = self.answer(py, request, |transfer| {
            (0..self.0.source_count()).map(|source| transfer.summary(source)).collect::<Vec<_>>()
        })?;
        let sum = |sum: plan::Summary| Summary {
            bytes: sum.bytes,
            copies: sum.copies,
            shortest: sum.shortest,
            longest: sum.longest,
            mean: sum.mean(),
        };
        Ok(sums.into_iter().map(sum).collect())
    }

    fn __repr__(&self) -> String {
        let read = (0..self.0.source_count()).filter(|&source| self.0.reads(source)).count();
        format!("<kvferry.Plan reading {read} of {} source ranks>", self.0.source_count())
    }
}

impl Plan {
    /// Checks a request and answers it, without Python's lock.
    fn answer<T: Send>(
        &self,
        py: Python<'_>,
        request: Option<Bound<'_, PyDict>>,
        answer: impl FnOnce(&Transfer<'_>) -> T + Send,
    ) -> PyResult<T> {
        let asked = Asked::read(request)?;
        let made = py.detach(|| {
            let (source, destination) = (asked.source.tables(), asked.destination.tables());
            let none = vec![0; destination.len()];
            let request = Request {
                tokens: asked.tokens,
                cached: asked.cached.as_ref().unwrap_or(&none),
                source: &source,
                destination: &destination,
            };
            self.0.transfer(&request).map(|transfer| answer(&transfer))
        });
        made.map_err(|error| errors::request(py, &error))
    }
}

const KEYWORDS: &str =
    "tokens, cached, source_blocks, destination_blocks, source_first, destination_first";

/// A request as Python states it, by keyword.
pub(crate) struct Asked {
    pub(crate) tokens: u64,
    pub(crate) cached: Option<Vec<u64>>,
    pub(crate) source: Tables,
    pub(crate) destination: Tables,
}

/// The block tables of one side.
pub(crate) struct Tables {
    pub(crate) blocks: Vec<Vec<u32>>,
    pub(crate) first: Vec<u64>,
}

impl Asked {
    pub(crate) fn read(request: Option<Bound<'_, PyDict>>) -> PyResult<Self> {
        let (mut tokens, mut cached) = (None, None);
        let (mut source, mut source_first) = (None, None);
        let (mut destination, mut destination_first) = (None, None);
        for (key, value) in request.iter().flat_map(PyDictMethods::iter) {
            let key: String = key.extract()?;
            let name = |error: PyErr| named(value.py(), &key, &error);
            match key.as_str() {
                "tokens" => tokens = Some(value.extract().map_err(name)?),
                "cached" => cached = optional(&value).map_err(name)?,
                "source_blocks" => source = Some(blocks(&value).map_err(name)?),
                "destination_blocks" => destination = Some(blocks(&value).map_err(name)?),
                "source_first" => source_first = optional(&value).map_err(name)?,
                "destination_first" => destination_first = optional(&value).map_err(name)?,
                _ => {
                    let message = format!("no keyword '{key}'; the keywords are {KEYWORDS}");
                    return Err(PyTypeError::new_err(message));
                }
            }
        }
        let missing = |key: &str| PyTypeError::new_err(format!("the keyword '{key}' is missing"));
        Ok(Self {
            tokens: tokens.ok_or_else(|| missing("tokens"))?,
            cached,
            source: Tables::new(
                source.ok_or_else(|| missing("source_blocks"))?,
                source_first,
                "source",
            )?,
            destination: Tables::new(
                destination.ok_or_else(|| missing("destination_blocks"))?,
                destination_first,
                "destination",
            )?,
        })
    }
}

impl Tables {
    fn new(blocks: Vec<Vec<u32>>, first: Option<Vec<u64>>, side: &str) -> PyResult<Self> {
        let first = first.unwrap_or_else(|| vec![0; blocks.len()]);
        if first.len() != blocks.len() {
            return Err(PyValueError::new_err(format!(
                "{side}_first has {} entries, but {side}_blocks has {} tables",
                first.len(),
                blocks.len()
            )));
        }
        Ok(Self { blocks, first })
    }

    fn tables(&self) -> Vec<Table<'_>> {
        let tables = self.first.iter().zip(&self.blocks);
        tables.map(|(&first, blocks)| Table { first, blocks }).collect()
    }
}

/// Numbers from a list or an array.
fn numbers<'py, T>(value: &Bound<'py, PyAny>) -> PyResult<Vec<T>>
where
    Vec<T>: FromPyObjectOwned<'py, Error = PyErr>,
{
    match value.getattr_opt("tolist")? {
        Some(list) => list.call0()?.extract(),
        None => value.extract(),
    }
}

fn optional(value: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u64>>> {
    if value.is_none() { Ok(None) } else { numbers(value).map(Some) }
}

fn blocks(value: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<u32>>> {
    value.try_iter()?.map(|table| numbers(&table?)).collect()
}

/// The same error, naming the keyword.
fn named(py: Python<'_>, key: &str, error: &PyErr) -> PyErr {
    PyErr::from_type(error.get_type(py), format!("{key}: {}", error.value(py)))
}

/// The bytes of an array of 64-bit words.
pub(crate) fn words<const N: usize>(rows: impl Iterator<Item = [u64; N]>) -> Vec<u8> {
    let mut bytes = vec![];
    for word in rows.flatten() {
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    bytes
}

/// A NumPy array of 64-bit words with so many columns. NumPy is asked from here, through Python: the
/// package needs nothing of its C interface.
pub(crate) fn array<'py>(
    py: Python<'py>,
    bytes: &[u8],
    columns: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let buffer = PyByteArray::new(py, bytes);
    let words = py.import("numpy")?.call_method1("frombuffer", (buffer, "uint64"))?;
    words.call_method1("reshape", (bytes.len() / 8 / columns, columns))
}
