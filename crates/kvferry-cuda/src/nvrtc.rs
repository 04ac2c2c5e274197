//! CUDA C to machine code, at run time: NVRTC, as the CUDA toolkit and PyTorch's wheels bring it.

use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::Duration;

use parking_lot::Mutex;

use super::driver::{major_version, reason};
use kvferry_transport::Error;

/// Names the library, or the directory it lies in.
pub const VARIABLE: &str = "KVFERRY_NVRTC";

const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Compiles `source`, called `name`, for a compute capability as in 90 for 9.0. `headers` are (name,
/// text). The result is machine code, or, for an architecture that this NVRTC does not know yet, PTX.
pub fn compile(
    name: &str,
    source: &str,
    headers: &[(&str, &str)],
    capability: u32,
) -> Result<Vec<u8>, Error> {
    Nvrtc::find(&[])?.compile_for(name, source, headers, capability)
}

/// Waits until nothing is compiled, at most for `patience`, and lets nothing be compiled any more: for a process
/// that ends. NVRTC gives its memory back then, whoever works with it.
pub fn finish(patience: Duration) {
    if let Some(mut over) = OVER.try_lock_for(patience) {
        *over = true;
    }
}

/// Whether the process ends. Held while something is compiled.
static OVER: Mutex<bool> = Mutex::new(false);

type Program = *mut c_void;

/// The library, loaded.
#[derive(Debug)]
pub(crate) struct Nvrtc {
    library: libloading::Library,
    /// What the library loads by name only.
    _builtins: Option<libloading::Library>,
}

impl Nvrtc {
    /// Finds and loads it. `site_packages` are folders that the caller knows to be those of its own
    /// Python environment. Of several, one whose code the driver can load: a driver knows no CUDA that is newer
    /// than itself, and a newer toolkit may lie beside it.
    pub(crate) fn find(site_packages: &[PathBuf]) -> Result<Self, Error> {
        let known = major_version();
        let (mut tried, mut too_new) = (vec![], None);
        for path in named().unwrap_or_else(|| candidates(site_packages)) {
            match Self::load(&path) {
                Ok(library) if known.is_some_and(|known| library.major() > Some(known)) => {
                    too_new.get_or_insert(library);
                }
                Ok(library) => return Ok(library),
                Err(error) => tried.push((path, error)),
            }
        }
        // Where there is no other, the driver has the last word.
        too_new.ok_or_else(|| missing(&tried))
    }

    /// The major version of its CUDA. `None` if it does not say.
    fn major(&self) -> Option<u32> {
        type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the declaration is that of nvrtc.h, and the pointers are to live values.
        let code = unsafe {
            let version: Version = self.get(c"nvrtcVersion").ok()?;
            version(&raw mut major, &raw mut minor)
        };
        u32::try_from(major).ok().filter(|_| code == 0)
    }

    pub(crate) fn load(path: &Path) -> Result<Self, String> {
        // NVRTC looks for this one by its name, which is not enough inside of a wheel.
        let builtins = path.parent().filter(|directory| directory.is_absolute());
        let builtins = builtins.and_then(|directory| {
            let files = std::fs::read_dir(directory).ok()?;
            let mut files: Vec<PathBuf> = files.flatten().map(|file| file.path()).collect();
            files.sort();
            files.into_iter().find(|file| {
                let name = file.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with("libnvrtc-builtins.so.")
            })
        });
        let open = |path: &Path| {
            // SAFETY: loading NVRTC runs its initialisers, which do nothing but set it up.
            unsafe { libloading::Library::new(path) }.map_err(|error| reason(&error))
        };
        let builtins = builtins.and_then(|path| open(&path).ok());
        Ok(Self { library: open(path)?, _builtins: builtins })
    }

    /// # Safety
    ///
    /// The type must be that of the function.
    unsafe fn get<T: Copy>(&self, name: &CStr) -> Result<T, Error> {
        // SAFETY: the caller's promise.
        let found = unsafe { self.library.get::<T>(name.to_bytes_with_nul()) };
        found.map(|symbol| *symbol).map_err(|error| Error::Library(format!("NVRTC: {error}")))
    }

    /// Compiles for a compute capability, as [`compile`] does.
    pub(crate) fn compile_for(
        &self,
        name: &str,
        source: &str,
        headers: &[(&str, &str)],
        capability: u32,
    ) -> Result<Vec<u8>, Error> {
        let exact = self.compile(name, source, headers, &format!("sm_{capability}"), true);
        exact.or_else(|error| {
            // A newer card than NVRTC: the driver makes machine code of the PTX.
            self.compile(name, source, headers, "compute_80", false).map_err(|_| error)
        })
    }

    /// Compiles for one architecture; `machine_code` or PTX.
    pub(crate) fn compile(
        &self,
        name: &str,
        source: &str,
        headers: &[(&str, &str)],
        architecture: &str,
        machine_code: bool,
    ) -> Result<Vec<u8>, Error> {
        let text = |text: &str| {
            CString::new(text).map_err(|_| Error::Library("a zero byte in CUDA C".to_owned()))
        };
        let (name, source) = (text(name)?, text(source)?);
        let names: Vec<CString> = headers.iter().map(|h| text(h.0)).collect::<Result<_, _>>()?;
        let texts: Vec<CString> = headers.iter().map(|h| text(h.1)).collect::<Result<_, _>>()?;
        let pointers = |strings: &[CString]| -> Vec<*const c_char> {
            strings.iter().map(|string| string.as_ptr()).collect()
        };
        let (name_pointers, text_pointers) = (pointers(&names), pointers(&texts));
        let options = [text(&format!("--gpu-architecture={architecture}"))?, text("--std=c++17")?];
        let option_pointers = pointers(&options);
        let (size, content) = if machine_code {
            (c"nvrtcGetCUBINSize", c"nvrtcGetCUBIN")
        } else {
            (c"nvrtcGetPTXSize", c"nvrtcGetPTX")
        };
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
        type Content = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
        type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
        let mut program: Program = ptr::null_mut();
        let over = OVER.lock();
        if *over {
            return Err(Error::Library("NVRTC is not asked any more: the process ends".to_owned()));
        }
        // SAFETY: the declarations are those of nvrtc.h; all strings and arrays are live during the
        // calls, buffers are as long as the library asked for, and the program is destroyed once.
        unsafe {
            let create: Create = self.get(c"nvrtcCreateProgram")?;
            let compile: Compile = self.get(c"nvrtcCompileProgram")?;
            let destroy: Destroy = self.get(c"nvrtcDestroyProgram")?;
            let fetch = |program, size: &CStr, content: &CStr| -> Result<Vec<u8>, Error> {
                let (size, content): (Size, Content) = (self.get(size)?, self.get(content)?);
                let mut bytes = 0;
                if size(program, &raw mut bytes) != 0 {
                    return Err(Error::Library("NVRTC does not answer".to_owned()));
                }
                let mut buffer = vec![0u8; bytes];
                if content(program, buffer.as_mut_ptr().cast()) != 0 {
                    return Err(Error::Library("NVRTC does not answer".to_owned()));
                }
                Ok(buffer)
            };
            let made = create(
                &raw mut program,
                source.as_ptr(),
                name.as_ptr(),
                headers.len() as c_int,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            );
            if made != 0 {
                return Err(Error::Library(format!("NVRTC takes no program: error {made}")));
            }
            let code = compile(program, options.len() as c_int, option_pointers.as_ptr());
            let result = if code == 0 {
                fetch(program, size, content)
            } else {
                let log = fetch(program, c"nvrtcGetProgramLogSize", c"nvrtcGetProgramLog");
                let log = log.unwrap_or_default();
                let log = String::from_utf8_lossy(&log);
                let log = log.trim_matches(['\0', '\n']);
                Err(Error::Library(format!(
                    "NVRTC cannot compile the kernel for {architecture}: error {code}: {log}"
                )))
            };
            destroy(&raw mut program);
            drop(over);
            result
        }
    }
}

fn missing(tried: &[(PathBuf, String)]) -> Error {
    let tried: String =
        tried.iter().map(|(path, error)| format!("\n  {}: {error}", path.display())).collect();
    Error::Library(format!(
        "NVRTC, which compiles the kernel for the card, was not found. Looked for:{tried}\n\
         Install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc` into the Python environment, \
         or name the library in {VARIABLE}."
    ))
}

/// Where the user says it is.
fn named() -> Option<Vec<PathBuf>> {
    let named = PathBuf::from(env::var_os(VARIABLE)?);
    let inside = NAMES.iter().map(|name| named.join(name));
    let inside: Vec<PathBuf> = inside.filter(|path| path.is_file()).collect();
    Some(if inside.is_empty() { vec![named] } else { inside })
}

/// Where it may be, the likeliest first: in the folders that the caller knows, wherever the system finds it, in
/// the toolkit, in the Python environment.
fn candidates(site_packages: &[PathBuf]) -> Vec<PathBuf> {
    let inside = |packages: &Path| -> Vec<PathBuf> {
        let directories = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"];
        let files = |directory: &str| NAMES.map(|name| packages.join(directory).join(name));
        directories.into_iter().flat_map(files).collect()
    };
    let mut found: Vec<PathBuf> = site_packages.iter().flat_map(|known| inside(known)).collect();
    found.extend(NAMES.iter().map(PathBuf::from));
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(env::var_os).map(PathBuf::from);
    for toolkit in toolkits.chain([PathBuf::from("/usr/local/cuda")]) {
        for directory in ["lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"] {
            found.extend(NAMES.iter().map(|name| toolkit.join(directory).join(name)));
        }
    }
    for guessed in kvferry_transport::shared::python::guessed_site_packages() {
        found.extend(inside(&guessed));
    }
    found.retain(|path| path.is_relative() || path.is_file());
    found
}
