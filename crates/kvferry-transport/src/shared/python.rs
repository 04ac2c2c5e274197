//! Where the packages are of the Python that this process seems to belong to.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The folders of packages of the Python environments that seem to be in use, the surest first.
pub fn guessed_site_packages() -> Vec<PathBuf> {
    let prefixes = prefixes(&|name| env::var_os(name), invoked_as().as_deref());
    prefixes.iter().flat_map(|prefix| packages_below(prefix)).collect()
}

/// The folders of the Python environments that seem to be in use, the surest first.
///
/// An environment that is active says so in a variable. One that is not, as in containers and unit
/// files that simply start its `bin/python` or a script beside it, is known by the path of that
/// interpreter. The path must not be resolved: in a virtual environment it is a link to the Python
/// that the environment was made from, and that one has none of its packages.
pub fn prefixes(
    variable: &dyn Fn(&str) -> Option<OsString>,
    invoked_as: Option<&Path>,
) -> Vec<PathBuf> {
    let path = variable("PATH").unwrap_or_default();
    let on_path = |name: &Path| {
        env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
    };
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| variable(name));
    let mut found: Vec<PathBuf> = active.map(PathBuf::from).collect();
    // A bare name was looked up on the path by whoever started the process.
    let running = invoked_as.and_then(|invoked| match invoked.parent() {
        Some(parent) if parent != Path::new("") => Some(invoked.to_owned()),
        _ => on_path(invoked),
    });
    let interpreters = running.into_iter().chain(on_path(Path::new("python3")));
    for interpreter in interpreters {
        found.extend(prefixes_of(&interpreter));
    }
    let mut unique: Vec<PathBuf> = Vec::new();
    for prefix in found {
        if !unique.contains(&prefix) {
            unique.push(prefix);
        }
    }
    unique
}

/// The environments that an interpreter belongs to: the virtual one whose `bin` it, or a link on the
/// way to it, lies in; and the one it was made from, if the virtual one uses that one's packages too.
fn prefixes_of(interpreter: &Path) -> Vec<PathBuf> {
    /// A chain of links that is longer is a circle.
    const MAX_LINKS: usize = 16;
    let mut at = interpreter.to_owned();
    for _ in 0..MAX_LINKS {
        let prefix = at.parent().and_then(Path::parent);
        if let Some(prefix) = prefix
            && let Ok(settings) = fs::read_to_string(prefix.join("pyvenv.cfg"))
        {
            let mut found = vec![prefix.to_owned()];
            if setting(&settings, "include-system-site-packages") == Some("true")
                && let Some(home) = setting(&settings, "home")
            {
                found.extend(Path::new(home).parent().map(Path::to_owned));
            }
            return found;
        }
        match fs::read_link(&at) {
            // A relative link is relative to the folder it is in.
            Ok(to) => at = at.parent().unwrap_or(Path::new("")).join(to),
            Err(_) => return prefix.map(Path::to_owned).into_iter().collect(),
        }
    }
    Vec::new()
}

/// A line `key = value` of a `pyvenv.cfg`.
fn setting<'a>(settings: &'a str, key: &str) -> Option<&'a str> {
    settings
        .lines()
        .filter_map(|line| line.split_once('='))
        .find_map(|(name, value)| (name.trim().eq_ignore_ascii_case(key)).then_some(value.trim()))
}

/// The interpreter this process was started as, if it is one: what the kernel tells of the running
/// program is resolved already, the first word of the command line is not.
fn invoked_as() -> Option<PathBuf> {
    let words = fs::read("/proc/self/cmdline").ok()?;
    let first = words.split(|&byte| byte == 0).next()?;
    let first = PathBuf::from(OsString::from_vec(first.to_vec()));
    let name = first.file_name()?.to_string_lossy();
    name.starts_with("python").then_some(first)
}

/// The folders of packages below an environment's own.
pub fn packages_below(prefix: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for lib in ["lib", "lib64"] {
        let versions = fs::read_dir(prefix.join(lib)).into_iter().flatten().flatten();
        found.extend(
            versions
                .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
                .flat_map(|entry| {
                    ["site-packages", "dist-packages"].map(|name| entry.path().join(name))
                })
                .filter(|directory| directory.is_dir()),
        );
    }
    found
}
