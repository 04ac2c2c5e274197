//! Where NIXL's library is, and how to get it.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::Error;
use crate::random::random;

/// The version that [`install`] fetches, and that everything here is tested with.
pub const VERSION: &str = "1.5.1";
/// Names the library, or the directory the wheel was unpacked into.
pub const VARIABLE: &str = "KVFERRY_NIXL";

const LIBRARY: &str = "libnixl_capi.so";
/// The wheels' hashes, as pip checks them: x86_64 and aarch64.
const HASHES: [&str; 2] = [
    "sha256:341d0dfa499f941c054614252f1d8047d1380e33f29c87707372ff5ec7d3779a",
    "sha256:aced5529cc9781f8be1ee22e451c852630455460c1812b06cc863b05d797f2db",
];

/// Where to look, and in which order. What was looked at is kept for the error message.
#[derive(Debug, Default)]
struct Search {
    tried: Vec<PathBuf>,
}

impl Search {
    /// The library itself, or a directory that holds the wheel's content.
    fn at(&mut self, path: &Path) -> Option<PathBuf> {
        if path.is_file() {
            return Some(path.to_owned());
        }
        let direct = path.join(LIBRARY);
        if direct.is_file() {
            return Some(direct);
        }
        self.tried.push(direct);
        // The wheel keeps its libraries in a hidden directory named after the CUDA version.
        let mut inside: Vec<PathBuf> = fs::read_dir(path)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .filter(|entry| {
                let name = entry.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with(".nixl_cu") && name.ends_with(".mesonpy.libs")
            })
            .collect();
        inside.sort();
        if inside.is_empty() {
            self.tried.push(path.join(".nixl_cu*.mesonpy.libs").join(LIBRARY));
        }
        inside.into_iter().find_map(|directory| {
            let library = directory.join(LIBRARY);
            if library.is_file() {
                return Some(library);
            }
            self.tried.push(library);
            None
        })
    }

    fn failed(&self) -> Error {
        let tried: String =
            self.tried.iter().map(|path| format!("\n  {}", path.display())).collect();
        Error::Library(format!(
            "NIXL was not found. Looked for:{tried}\n\
             Install it with `kvferry nixl install`, or into the Python environment with \
             `pip install nixl-cu12=={VERSION}`, or name the library or the wheel's directory in \
             {VARIABLE}."
        ))
    }
}

/// Finds the library: where `option` says; else where the environment variable `KVFERRY_NIXL` says;
/// else what [`install`] installed; else in the active Python environment.
///
/// What is named explicitly must be there: nothing else is tried then.
pub fn find(option: Option<&Path>) -> Result<PathBuf, Error> {
    let mut search = Search::default();
    let named = option.map(Path::to_owned).or_else(|| env::var_os(VARIABLE).map(PathBuf::from));
    if let Some(named) = named {
        return search.at(&named).ok_or_else(|| search.failed());
    }
    if let Some(cache) = cache_directory()
        && let Some(library) = search.at(&cache)
    {
        return Ok(library);
    }
    for directory in site_packages() {
        if let Some(library) = search.at(&directory) {
            return Ok(library);
        }
    }
    Err(search.failed())
}

/// Where [`install`] puts the library: below the user's cache, one directory per version.
pub fn cache_directory() -> Option<PathBuf> {
    let base = env::var_os("XDG_CACHE_HOME")
        .filter(|value| Path::new(value).is_absolute())
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")))?;
    Some(base.join("kvferry").join(format!("nixl-{VERSION}")))
}

/// The `site-packages` of the active virtual or Conda environment, else of the Python on the path.
pub(crate) fn site_packages() -> Vec<PathBuf> {
    let prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(env::var_os).map(PathBuf::from).collect();
    let prefixes = if prefixes.is_empty() {
        env::var_os("PATH")
            .iter()
            .flat_map(|path| env::split_paths(path).collect::<Vec<_>>())
            .filter(|bin| bin.join("python3").is_file())
            .filter_map(|bin| {
                Some(fs::canonicalize(bin.join("python3")).ok()?.parent()?.parent()?.to_owned())
            })
            .take(1)
            .collect()
    } else {
        prefixes
    };
    let mut found = Vec::new();
    for prefix in prefixes {
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
    }
    found
}

/// Fetches the wheel with pip, checks its hash, and unpacks it into [`cache_directory`]. Nothing is
/// fetched when it is there already. Returns where the library is.
///
/// `python` is the interpreter whose pip is used; `python3` without.
pub fn install(python: Option<&Path>) -> Result<PathBuf, Error> {
    let cache = cache_directory().ok_or_else(|| {
        Error::Library(
            "no place to install NIXL to: neither XDG_CACHE_HOME nor HOME is set".to_owned(),
        )
    })?;
    if let Some(library) = Search::default().at(&cache) {
        return Ok(library);
    }
    let platform = match env::consts::ARCH {
        arch @ ("x86_64" | "aarch64") => format!("manylinux_2_28_{arch}"),
        other => {
            return Err(Error::Library(format!("there is no NIXL wheel for {other}")));
        }
    };
    let system = |what: &str, error: &std::io::Error| Error::system(what, error);
    let parent = cache.parent().unwrap_or(&cache);
    fs::create_dir_all(parent)
        .map_err(|error| system(&format!("making {}", parent.display()), &error))?;
    // Beside its place, so that the last step is one rename: nobody sees half of it, and two
    // installations at once do no harm.
    let unique = u64::from_le_bytes(random()?);
    let temporary = parent.join(format!("nixl-{VERSION}.{unique:016x}"));
    let result = fetch(python, &platform, &temporary).and_then(|()| {
        match fs::rename(temporary.join("wheel"), &cache) {
            Ok(()) => Ok(()),
            // Somebody else was faster.
            Err(_) if cache.is_dir() => Ok(()),
            Err(error) => Err(system(&format!("making {}", cache.display()), &error)),
        }
    });
    let _ = fs::remove_dir_all(&temporary);
    result?;
    let mut search = Search::default();
    search.at(&cache).ok_or_else(|| search.failed())
}

fn fetch(python: Option<&Path>, platform: &str, temporary: &Path) -> Result<(), Error> {
    let io = |error: &std::io::Error| {
        Error::system(format!("writing to {}", temporary.display()), error)
    };
    fs::create_dir_all(temporary).map_err(|error| io(&error))?;
    let requirements = temporary.join("requirements.txt");
    let mut line = format!("nixl-cu12=={VERSION}");
    for hash in HASHES {
        line.push_str(&format!(" --hash={hash}"));
    }
    fs::write(&requirements, line + "\n").map_err(|error| io(&error))?;
    let interpreter = python.map_or_else(|| OsString::from("python3"), OsString::from);
    // The wheel's Python version does not matter: only its shared libraries are used.
    let output = Command::new(&interpreter)
        .args(["-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"])
        .args(["--only-binary", ":all:", "--implementation", "cp"])
        .args(["--python-version", "3.11", "--abi", "cp311", "--platform", platform])
        .args(["--disable-pip-version-check", "--no-input", "--root-user-action", "ignore"])
        .arg("--target")
        .arg(temporary.join("wheel"))
        .arg("--requirement")
        .arg(&requirements)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| {
            Error::Library(format!(
                "installing NIXL needs pip, but {} could not be run: {error}",
                Path::new(&interpreter).display()
            ))
        })?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::Library(format!(
        "pip could not install NIXL:\n{}",
        String::from_utf8_lossy(&output.stderr).trim_end()
    )))
}

/// Explains why a library that was found does not load.
pub(crate) fn does_not_load(library: &Path, why: &dyn std::fmt::Display) -> Error {
    Error::Library(format!(
        "NIXL was found at {} but does not load: {why}\n\
         Install it anew with `kvferry nixl install`, or name another in {VARIABLE}.",
        library.display()
    ))
}

/// Explains why a plugin does not load.
pub(crate) fn no_plugin(library: &Path, plugin: &str, why: &dyn std::fmt::Display) -> Error {
    let directory = env::var_os("NIXL_PLUGIN_DIR")
        .map_or_else(|| library.parent().unwrap_or(Path::new("")).join("plugins"), PathBuf::from);
    let file = directory.join(format!("libplugin_{plugin}.so"));
    let there =
        if file.is_file() { "it is there, but does not load or start" } else { "it is not there" };
    Error::Library(format!(
        "NIXL's {plugin} plugin cannot be used: {why}. Looked for {}: {there}. Install the whole \
         wheel with `kvferry nixl install`, or name the plugins' directory in NIXL_PLUGIN_DIR; \
         NIXL_LOG_LEVEL=debug tells more.",
        file.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_every_place_and_the_remedy() {
        let missing = Path::new("/nonexistent/kvferry");
        let Err(Error::Library(message)) = find(Some(missing)) else {
            panic!("found a library that is not there");
        };
        for part in [
            "/nonexistent/kvferry/libnixl_capi.so",
            "/nonexistent/kvferry/.nixl_cu*.mesonpy.libs/libnixl_capi.so",
            "kvferry nixl install",
            "KVFERRY_NIXL",
            "nixl-cu12==1.5.1",
        ] {
            assert!(message.contains(part), "{part} is missing in: {message}");
        }
    }

    #[test]
    fn a_missing_plugin_is_named_with_its_file_and_the_remedy() {
        let message = no_plugin(Path::new("/opt/x/libnixl_capi.so"), "UCX", &"no").to_string();
        assert!(message.contains("libplugin_UCX.so: it is not there"), "{message}");
        assert!(message.contains("kvferry nixl install"), "{message}");
    }
}
