//! How to get NIXL's library.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::find::{Search, VERSION, cache_directory};
use super::wheel;
use kvferry_transport::Error;
use kvferry_transport::shared::random::random;

/// Fetches the wheel for the CUDA that is here with pip, checks its hash, and unpacks it into [`cache_directory`].
/// Nothing is fetched when it is there already. Returns where the library is.
///
/// `python` is the interpreter whose pip is used; `python3` without.
pub fn install(python: Option<&Path>) -> Result<PathBuf, Error> {
    let cache = cache_directory().ok_or_else(|| {
        Error::Library(
            "no place to install NIXL to: neither XDG_CACHE_HOME nor HOME is set".to_owned(),
        )
    })?;
    if let Some(library) = Search::new().at(&cache) {
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
    let mut search = Search::new();
    search.at(&cache).ok_or_else(|| search.failed())
}

fn fetch(python: Option<&Path>, platform: &str, temporary: &Path) -> Result<(), Error> {
    let io = |error: &std::io::Error| {
        Error::system(format!("writing to {}", temporary.display()), error)
    };
    fs::create_dir_all(temporary).map_err(|error| io(&error))?;
    let requirements = temporary.join("requirements.txt");
    let wheel = wheel::fitting();
    let mut line = format!("{}=={VERSION}", wheel.name());
    for hash in wheel.hashes {
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
