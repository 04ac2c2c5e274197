//! `kvferry.Plan`.

use std::sync::Arc;

use kvferry_plan as plan;
use kvferry_plan::{BlockTable, LoopsError, Request, Table, Transfer};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
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

    /// Group and index of the destination pieces that get less than their group keeps.
    #[getter]
    fn windowed(&self) -> Vec<(usize, usize)> {
        self.0.windowed().to_vec()
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
        let transfer = self.check(py, request)?;
        let copies = |source| {
            let listed = py.detach(|| {
                let loops = transfer.loops(source)?;
                Ok(words(loops.copies().map(|run| [run.source, run.destination, run.bytes])))
            });
            array(py, &listed.map_err(unsound)?, 3)
        };
        (0..self.0.source_count()).map(copies).collect()
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
        let transfer = self.check(py, request)?;
        let rest = py.detach(|| transfer.rest()).map_err(unsound)?;
        array(py, &words(rest.into_iter().map(|area| [area.address, area.bytes])), 2)
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
        let transfer = self.check(py, request)?;
        let sources = 0..self.0.source_count();
        let sums: Result<Vec<_>, _> =
            py.detach(|| sources.map(|source| transfer.summary(source)).collect());
        let sum = |sum: plan::Summary| Summary {
            bytes: sum.bytes,
            copies: sum.copies,
            shortest: sum.shortest,
            longest: sum.longest,
            mean: sum.mean(),
        };
        Ok(sums.map_err(unsound)?.into_iter().map(sum).collect())
    }

    fn __repr__(&self) -> String {
        let read = (0..self.0.source_count()).filter(|&source| self.0.reads(source)).count();
        format!("<kvferry.Plan reading {read} of {} source ranks>", self.0.source_count())
    }
}

impl Plan {
    /// Checks a request, without Python's lock.
    fn check(&self, py: Python<'_>, request: Option<Bound<'_, PyDict>>) -> PyResult<Transfer<'_>> {
        let asked = Asked::read(request)?;
        let source = asked.source.ok_or_else(|| missing("source_blocks"))?;
        let made = py.detach(|| {
            let none = vec![0; asked.destination.len()];
            let request = Request {
                tokens: asked.tokens,
                cached: asked.cached.as_ref().unwrap_or(&none),
                source: &borrowed(&source),
                destination: &borrowed(&asked.destination),
            };
            self.0.transfer(&request)
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
    /// `None` where they are not given.
    pub(crate) source: Option<Vec<BlockTable>>,
    pub(crate) destination: Vec<BlockTable>,
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
                "source_blocks" if value.is_none() => {}
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
        let source = match (source, source_first) {
            (Some(source), first) => Some(tables(source, first, "source_blocks", "source_first")?),
            (None, None) => None,
            (None, Some(_)) => return Err(missing("source_blocks")),
        };
        Ok(Self {
            tokens: tokens.ok_or_else(|| missing("tokens"))?,
            cached,
            source,
            destination: tables(
                destination.ok_or_else(|| missing("destination_blocks"))?,
                destination_first,
                "destination_blocks",
                "destination_first",
            )?,
        })
    }
}

/// A plan that is not sound, which no proven plan is.
fn unsound(error: LoopsError) -> PyErr {
    PyRuntimeError::new_err(format!("the plan cannot be carried out: {error}"))
}

fn missing(key: &str) -> PyErr {
    PyTypeError::new_err(format!("the keyword '{key}' is missing"))
}

/// The block tables of a grant: ids, and positions of the first where lists were clipped.
pub(crate) fn granted_tables(
    ids: &Bound<'_, PyAny>,
    first: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<BlockTable>> {
    let name = |key: &'static str| move |error: PyErr| named(ids.py(), key, &error);
    let first = first.map(numbers).transpose().map_err(name("first"))?;
    tables(blocks(ids).map_err(name("blocks"))?, first, "blocks", "first")
}

/// The block tables of one side: ids, and positions of the first where lists were clipped.
fn tables(
    blocks: Vec<Vec<u32>>,
    first: Option<Vec<u64>>,
    blocks_name: &str,
    first_name: &str,
) -> PyResult<Vec<BlockTable>> {
    let first = first.unwrap_or_else(|| vec![0; blocks.len()]);
    if first.len() != blocks.len() {
        return Err(PyValueError::new_err(format!(
            "{first_name} has {} entries, but {blocks_name} has {} tables",
            first.len(),
            blocks.len()
        )));
    }
    let tables = first.into_iter().zip(blocks);
    Ok(tables.map(|(first, blocks)| BlockTable { first, blocks }).collect())
}

fn borrowed(tables: &[BlockTable]) -> Vec<Table<'_>> {
    tables.iter().map(BlockTable::borrow).collect()
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
    for row in rows {
        for word in row {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
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
