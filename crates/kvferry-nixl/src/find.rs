//! Where NIXL's library is.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use super::wheel::{self, Wheel};
use kvferry_transport::Error;
use kvferry_transport::shared::python::guessed_site_packages;

/// The version that [`install`](super::install()) fetches, and that everything here is tested with.
pub const VERSION: &str = "1.5.1";
/// Names the library, or the directory the wheel was unpacked into.
pub const VARIABLE: &str = "KVFERRY_NIXL";

const LIBRARY: &str = "libnixl_capi.so";

/// Finds the library: where `option` says; else where the environment variable `KVFERRY_NIXL` says;
/// else in the folders that [`NixlOptions::site_packages`](super::NixlOptions::site_packages) names;
/// else what [`install`](super::install()) installed; else in the Python environments that seem to be
/// in use: the active one, that of the interpreter this process runs in, that of the `python3` on the
/// path.
///
/// What is named explicitly must be there: nothing else is tried then.
pub fn find(option: Option<&Path>) -> Result<PathBuf, Error> {
    find_in(option, &[])
}

/// The same, with folders that the caller knows to be those of its own Python environment.
pub(super) fn find_in(option: Option<&Path>, site_packages: &[PathBuf]) -> Result<PathBuf, Error> {
    let mut search = Search::new();
    let named = option.map(Path::to_owned).or_else(|| env::var_os(VARIABLE).map(PathBuf::from));
    if let Some(named) = named {
        return search.at(&named).ok_or_else(|| search.failed());
    }
    elsewhere(search, site_packages)
}

/// Looks where nobody said it is.
fn elsewhere(mut search: Search, site_packages: &[PathBuf]) -> Result<PathBuf, Error> {
    let folders = site_packages.iter().cloned().chain(installed()).chain(guessed_site_packages());
    for folder in folders {
        if let Some(library) = search.at(&folder) {
            return Ok(library);
        }
    }
    Err(search.failed())
}

/// Where to look, and in which order. What was looked at is kept for the error message.
#[derive(Debug)]
pub(super) struct Search {
    /// Of several wheels, this one comes first.
    wheel: &'static Wheel,
    tried: Vec<PathBuf>,
}

impl Search {
    pub(super) fn new() -> Self {
        Self::of(wheel::fitting())
    }

    fn of(wheel: &'static Wheel) -> Self {
        Self { wheel, tried: vec![] }
    }

    /// The library itself, or a directory that holds the wheel's content.
    pub(super) fn at(&mut self, path: &Path) -> Option<PathBuf> {
        if path.is_file() {
            return Some(path.to_owned());
        }
        let direct = path.join(LIBRARY);
        if direct.is_file() {
            return Some(direct);
        }
        self.tried.push(direct);
        // A wheel keeps its libraries in a hidden directory named after the CUDA version. There may be several:
        // the package that brings all of them leaves the choice to whoever uses it.
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
        let fits = |folder: &PathBuf| folder.ends_with(self.wheel.folder());
        inside.sort_by_key(|folder| (!fits(folder), folder.clone()));
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

    pub(super) fn failed(&self) -> Error {
        let tried: String =
            self.tried.iter().map(|path| format!("\n  {}", path.display())).collect();
        Error::Library(format!(
            "NIXL was not found. Looked for:{tried}\n\
             Install it with `kvferry nixl install`, or into the Python environment with \
             `pip install {}=={VERSION}`, or name the library or the wheel's directory in \
             {VARIABLE}.",
            self.wheel.name()
        ))
    }
}

/// Where [`install`](super::install()) puts the library that fits: below the user's cache, one directory for each
/// version, and for each CUDA but the oldest.
pub fn cache_directory() -> Option<PathBuf> {
    directory_of(wheel::fitting())
}

/// Where wheels may have been installed, the one that fits first.
fn installed() -> Vec<PathBuf> {
    let others = wheel::ALL.iter().filter(|wheel| *wheel != wheel::fitting());
    std::iter::once(wheel::fitting()).chain(others).filter_map(directory_of).collect()
}

fn directory_of(wheel: &Wheel) -> Option<PathBuf> {
    let base = env::var_os("XDG_CACHE_HOME")
        .filter(|value| Path::new(value).is_absolute())
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")))?;
    Some(base.join("kvferry").join(format!("nixl-{VERSION}{}", wheel.suffix())))
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
    use kvferry_transport::shared::python::{packages_below, prefixes};
    use std::os::unix::fs::symlink;

    /// A folder that goes when the test ends.
    struct Folder(PathBuf);

    impl Folder {
        fn new() -> Self {
            let unique = u64::from_le_bytes(kvferry_transport::shared::random::random().unwrap());
            let path = env::temp_dir().join(format!("kvferry-find-{unique:016x}"));
            fs::create_dir(&path).unwrap();
            // The system's folder for temporary files may be a link itself.
            Self(fs::canonicalize(path).unwrap())
        }

        /// A Python that is installed: `usr/bin/python3.12`, and links to it.
        fn python(&self) -> PathBuf {
            let bin = self.0.join("usr/bin");
            fs::create_dir_all(&bin).unwrap();
            fs::create_dir_all(self.0.join("usr/lib/python3.12/site-packages")).unwrap();
            fs::write(bin.join("python3.12"), "").unwrap();
            symlink("python3.12", bin.join("python3")).unwrap();
            bin.join("python3")
        }

        /// A virtual environment as `python -m venv` makes it, with NIXL in it or not.
        fn environment(&self, name: &str, settings: &str, nixl: bool) -> PathBuf {
            let prefix = self.0.join(name);
            let bin = prefix.join("bin");
            fs::create_dir_all(&bin).unwrap();
            fs::write(prefix.join("pyvenv.cfg"), settings).unwrap();
            symlink(self.0.join("usr/bin/python3"), bin.join("python3")).unwrap();
            symlink("python3", bin.join("python")).unwrap();
            let packages = prefix.join("lib/python3.12/site-packages");
            fs::create_dir_all(&packages).unwrap();
            if nixl {
                install(&packages);
            }
            prefix
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn install(packages: &Path) {
        unpack(packages, ".nixl_cu13.mesonpy.libs");
    }

    fn unpack(packages: &Path, folder: &str) {
        let wheel = packages.join(folder);
        fs::create_dir_all(&wheel).unwrap();
        fs::write(wheel.join(LIBRARY), "").unwrap();
    }

    /// What is found with these variables, by a process that was started as `invoked`.
    fn found(variables: &[(&str, &Path)], invoked: Option<&Path>) -> Option<PathBuf> {
        let variable = |name: &str| {
            let known = variables.iter().find(|(known, _)| *known == name);
            known.map(|(_, value)| value.as_os_str().to_owned())
        };
        let mut search = Search::of(&wheel::ALL[0]);
        prefixes(&variable, invoked)
            .iter()
            .flat_map(|prefix| packages_below(prefix))
            .find_map(|folder| search.at(&folder))
    }

    #[test]
    fn an_environment_that_is_not_active_is_known_by_its_interpreter() {
        let folder = Folder::new();
        let system = folder.python();
        let prefix = folder.environment("venv", "home = /usr/bin\n", true);
        let library = prefix.join("lib/python3.12/site-packages/.nixl_cu13.mesonpy.libs");
        let library = Some(library.join(LIBRARY));
        let bin = prefix.join("bin");
        let elsewhere = ("PATH", &*folder.0.join("usr/bin"));
        // Started by its path, whichever of its names: a container's entry point, a unit file, the
        // first line of a script beside it.
        assert_eq!(found(&[elsewhere], Some(&bin.join("python"))), library);
        assert_eq!(found(&[elsewhere], Some(&bin.join("python3"))), library);
        // A link to it from elsewhere, as some tools make one.
        symlink(bin.join("python"), folder.0.join("usr/bin/python-link")).unwrap();
        assert_eq!(found(&[elsewhere], Some(&folder.0.join("usr/bin/python-link"))), library);
        // Found on the path.
        assert_eq!(found(&[("PATH", &bin)], Some(Path::new("python"))), library);
        assert_eq!(found(&[("PATH", &bin)], None), library);
        // Active.
        assert_eq!(found(&[("VIRTUAL_ENV", &prefix)], None), library);
        // The Python that it was made from does not have it.
        assert_eq!(found(&[elsewhere], Some(&system)), None);
        assert_eq!(found(&[elsewhere], None), None);
    }

    #[test]
    fn an_environment_may_use_the_packages_of_the_python_it_was_made_from() {
        let folder = Folder::new();
        folder.python();
        let packages = folder.0.join("usr/lib/python3.12/site-packages");
        install(&packages);
        let home = folder.0.join("usr/bin");
        let settings = |include| {
            format!("home = {}\ninclude-system-site-packages = {include}\n", home.display())
        };
        let open = folder.environment("open", &settings("true"), false).join("bin/python");
        let closed = folder.environment("closed", &settings("false"), false).join("bin/python");
        let library = packages.join(".nixl_cu13.mesonpy.libs").join(LIBRARY);
        assert_eq!(found(&[], Some(&open)), Some(library));
        assert_eq!(found(&[], Some(&closed)), None);
    }

    #[test]
    fn links_in_a_circle_are_nowhere() {
        let folder = Folder::new();
        let (one, other) = (folder.0.join("python3"), folder.0.join("python"));
        symlink(&one, &other).unwrap();
        symlink(&other, &one).unwrap();
        assert_eq!(found(&[], Some(&one)), None);
    }

    #[test]
    fn a_callers_own_folder_comes_first() {
        let folder = Folder::new();
        install(&folder.0);
        let library = folder.0.join(".nixl_cu13.mesonpy.libs").join(LIBRARY);
        assert_eq!(elsewhere(Search::new(), std::slice::from_ref(&folder.0)), Ok(library));
    }

    /// As `pip install nixl` leaves it: a library for every CUDA.
    #[test]
    fn of_several_wheels_the_one_that_fits_is_taken() {
        let folder = Folder::new();
        let folders = wheel::ALL.each_ref().map(Wheel::folder);
        for folder_of in &folders {
            unpack(&folder.0, folder_of);
        }
        for (wheel, folder_of) in std::iter::zip(&wheel::ALL, &folders) {
            let found = Search::of(wheel).at(&folder.0);
            assert_eq!(found, Some(folder.0.join(folder_of).join(LIBRARY)));
        }
        // Another is better than none.
        for (wheel, folder_of) in std::iter::zip(&wheel::ALL, folders.iter().rev()) {
            let folder = Folder::new();
            unpack(&folder.0, folder_of);
            let found = Search::of(wheel).at(&folder.0);
            assert_eq!(found, Some(folder.0.join(folder_of).join(LIBRARY)));
        }
    }

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
            &format!("{}==1.5.1", wheel::fitting().name()),
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
