//! Where this interpreter's packages are.

use std::path::PathBuf;

use pyo3::prelude::*;

/// Their folders: the libraries that they bring are found there, whether or not
/// the environment is active. One that lies over another has packages in several folders.
pub(crate) fn site_packages(py: Python<'_>) -> PyResult<Vec<PathBuf>> {
    let sysconfig = py.import("sysconfig")?;
    let mut found: Vec<PathBuf> = vec![];
    for kind in ["purelib", "platlib"] {
        let folder: Option<PathBuf> = sysconfig.call_method1("get_path", (kind,))?.extract()?;
        found.extend(folder.filter(|folder| !found.contains(folder)));
    }
    let searched: Vec<PathBuf> = py.import("sys")?.getattr("path")?.extract()?;
    // Not those of Python itself.
    let own = ["stdlib", "platstdlib"].map(|kind| -> PyResult<Option<PathBuf>> {
        sysconfig.call_method1("get_path", (kind,))?.extract()
    });
    let own: Vec<Option<PathBuf>> = own.into_iter().collect::<PyResult<_>>()?;
    for folder in searched {
        let of_python = folder.ends_with("lib-dynload") || own.contains(&Some(folder.clone()));
        if folder.is_absolute() && folder.is_dir() && !of_python && !found.contains(&folder) {
            found.push(folder);
        }
    }
    Ok(found)
}
