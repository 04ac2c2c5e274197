//! The library and its functions.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use parking_lot::Mutex;

pub(super) type Handle = *mut c_void;

/// What a call answered, when it did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub i32);

impl Code {
    /// A parameter is not valid.
    pub(super) const INVALID: Self = Self(-1);
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let meaning = match self.0 {
            1 => "still in progress",
            -1 => "a parameter is not valid",
            -2 => "the back end reports an error, such as a peer that is gone",
            -3 => "not possible in this state",
            -4 => "an exception inside NIXL",
            -6 => "not found: the peer's metadata is not loaded, or no back end serves this memory",
            _ => "unknown",
        };
        write!(f, "NIXL status {} ({meaning})", self.0)
    }
}

impl std::error::Error for Code {}

pub(super) fn check(status: c_int) -> Result<(), Code> {
    match status {
        0 => Ok(()),
        other => Err(Code(other)),
    }
}

#[repr(C)]
pub(super) struct AgentConfig {
    pub(super) enable_prog_thread: bool,
    pub(super) enable_listen_thread: bool,
    pub(super) listen_port: c_int,
    pub(super) thread_sync: c_int,
    pub(super) num_workers: c_uint,
    pub(super) pthr_delay_us: u64,
    pub(super) lthr_delay_us: u64,
    pub(super) capture_telemetry: bool,
}

/// Lets several threads use one agent.
pub(super) const THREAD_SYNC_STRICT: c_int = 1;

macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        /// The library's functions.
        #[allow(missing_docs, reason = "each is the C function of the same name")]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            fn load(library: &libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    $($name: {
                        let symbol = concat!("nixl_capi_", stringify!($name), "\0");
                        // SAFETY: the declaration below is that of NIXL's C interface, whose
                        // signatures have not changed since 1.0.
                        *unsafe { library.get(symbol.as_bytes()) }?
                    },)*
                })
            }
        }
    };
}

functions! {
    create_configured_agent(*const c_char, *const AgentConfig, *mut Handle);
    destroy_agent(Handle);
    create_params(*mut Handle);
    params_add(Handle, *const c_char, *const c_char);
    destroy_params(Handle);
    create_backend(Handle, *const c_char, Handle, *mut Handle);
    destroy_backend(Handle);
    create_opt_args(*mut Handle);
    destroy_opt_args(Handle);
    opt_args_add_backend(Handle, Handle);
    create_reg_dlist(c_int, *mut Handle);
    destroy_reg_dlist(Handle);
    reg_dlist_add_desc(Handle, usize, usize, u64, *const c_void, usize);
    register_mem(Handle, Handle, Handle);
    deregister_mem(Handle, Handle, Handle);
    get_local_md(Handle, *mut *mut c_void, *mut usize);
    load_remote_md(Handle, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md(Handle, *const c_char);
    gen_notif(Handle, *const c_char, *const c_void, usize, Handle);
    create_xfer_dlist(c_int, *mut Handle);
    destroy_xfer_dlist(Handle);
    xfer_dlist_add_desc(Handle, usize, usize, u64);
    prep_xfer_dlist(Handle, *const c_char, Handle, *mut Handle, Handle);
    release_xfer_dlist_handle(Handle, Handle);
    create_xfer_req(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    make_xfer_req(Handle, c_int, Handle, *const c_int, usize, Handle, *const c_int, usize, *mut Handle, Handle);
    post_xfer_req(Handle, Handle, Handle);
    get_xfer_status(Handle, Handle);
    release_xfer_req(Handle, Handle);
    destroy_xfer_req(Handle);
}

/// NIXL, loaded. It stays loaded: it and UCX are not made to be unloaded.
#[derive(Clone)]
pub struct Nixl {
    pub(super) functions: &'static Functions,
}

impl fmt::Debug for Nixl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nixl").finish_non_exhaustive()
    }
}

impl Nixl {
    /// Loads the library at `path`, once for the process.
    ///
    /// # Safety
    ///
    /// Loading it runs its code, and what it says of its functions is believed: it must be NIXL.
    pub unsafe fn load(path: &Path) -> Result<Self, libloading::Error> {
        static LOADED: OnceLock<Mutex<HashMap<PathBuf, &'static Functions>>> = OnceLock::new();
        let loaded = LOADED.get_or_init(Mutex::default);
        let mut loaded = loaded.lock();
        if let Some(functions) = loaded.get(path) {
            return Ok(Self { functions });
        }
        // The wheel's UCX brings its own libnl and, where the host has libibverbs, loads that too,
        // whose libnl then registers itself with the wheel's by mistake and is unloaded before it:
        // the process crashes when it exits. The host's libnl, loaded by itself beforehand, finds
        // its own functions. Where there is none, there is nothing to do.
        // SAFETY: a library of the system, whose initialisers only fill tables of its own.
        std::mem::forget(unsafe { libloading::Library::new("libnl-route-3.so.200") });
        // SAFETY: the caller's promise.
        let library = unsafe { libloading::Library::new(path) }?;
        let functions: &'static Functions = Box::leak(Box::new(Functions::load(&library)?));
        std::mem::forget(library);
        loaded.insert(path.to_owned(), functions);
        Ok(Self { functions })
    }
}
