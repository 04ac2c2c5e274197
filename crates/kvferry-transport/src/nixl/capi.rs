//! NIXL's C interface: the functions used here, declared by hand, and thin owners for its handles.
//!
//! Nothing here adds a policy. Each method is one call (or the few calls that belong together), so
//! that a loop over these types is a loop over the C interface.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use kvferry_layout::Place;

type Handle = *mut c_void;

/// What a call answered, when it did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub i32);

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

fn check(status: c_int) -> Result<(), Code> {
    match status {
        0 => Ok(()),
        other => Err(Code(other)),
    }
}

#[repr(C)]
struct AgentConfig {
    enable_prog_thread: bool,
    enable_listen_thread: bool,
    listen_port: c_int,
    thread_sync: c_int,
    num_workers: c_uint,
    pthr_delay_us: u64,
    lthr_delay_us: u64,
    capture_telemetry: bool,
}

/// Lets several threads use one agent.
const THREAD_SYNC_STRICT: c_int = 1;

macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        /// The library's functions.
        #[allow(missing_docs, reason = "each is the C function of the same name")]
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
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
    create_notif_map(*mut Handle);
    destroy_notif_map(Handle);
    get_notifs(Handle, Handle, Handle);
    notif_map_size(Handle, *mut usize);
    notif_map_get_agent_at(Handle, usize, *mut *const c_char);
    notif_map_get_notifs_size(Handle, *const c_char, *mut usize);
    notif_map_get_notif(Handle, *const c_char, usize, *mut *const c_void, *mut usize);
    gen_notif(Handle, *const c_char, *const c_void, usize, Handle);
}

/// NIXL, loaded. It stays loaded: it and UCX are not made to be unloaded.
#[derive(Clone)]
pub struct Nixl {
    functions: &'static Functions,
}

impl fmt::Debug for Nixl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nixl").finish_non_exhaustive()
    }
}

impl Nixl {
    /// Loads the library at `path`, once for the process.
    pub fn load(path: &Path) -> Result<Self, libloading::Error> {
        static LOADED: OnceLock<Mutex<HashMap<PathBuf, &'static Functions>>> = OnceLock::new();
        let loaded = LOADED.get_or_init(Mutex::default);
        let mut loaded = loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(functions) = loaded.get(path) {
            return Ok(Self { functions });
        }
        // The wheel's UCX brings its own libnl and, where the host has libibverbs, loads that too,
        // whose libnl then registers itself with the wheel's by mistake and is unloaded before it:
        // the process crashes when it exits. The host's libnl, loaded by itself beforehand, finds
        // its own functions. Where there is none, there is nothing to do.
        // SAFETY: a library of the system, whose initialisers only fill tables of its own.
        std::mem::forget(unsafe { libloading::Library::new("libnl-route-3.so.200") });
        // SAFETY: loading runs the library's initialisers. The caller chose the library, by an
        // option, the environment or an installed package, as one chooses any dependency.
        let library = unsafe { libloading::Library::new(path) }?;
        let functions: &'static Functions = Box::leak(Box::new(Functions::load(&library)?));
        std::mem::forget(library);
        loaded.insert(path.to_owned(), functions);
        Ok(Self { functions })
    }
}

/// The settings of an agent.
#[derive(Clone, Debug)]
pub struct AgentSettings {
    /// Pause between two rounds of the progress thread. 0 spins.
    pub progress_delay_us: u64,
    /// The plugin that moves bytes.
    pub plugin: String,
    /// Its parameters.
    pub parameters: Vec<(String, String)>,
}

/// Why an agent could not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentError {
    /// The agent itself.
    Agent(Code),
    /// Its plugin.
    Plugin(Code),
    /// A name or parameter holds a zero byte.
    Name,
}

/// An agent with one back end.
pub struct Agent {
    nixl: Nixl,
    agent: Handle,
    backend: Handle,
    /// Names the back end in every call, so that NIXL does not have to look for one.
    arguments: Handle,
}

// SAFETY: the agent is made with strict thread synchronisation, under which NIXL takes its own lock
// in every call on the agent. The handles are only ever passed to such calls.
unsafe impl Send for Agent {}
// SAFETY: as above.
unsafe impl Sync for Agent {}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent").finish_non_exhaustive()
    }
}

/// Memory to register or to move: address, length and place.
pub type Span = (u64, u64, Place);

fn memory_type(place: Place) -> (c_int, u64) {
    match place {
        Place::Host => (0, 0),
        Place::Gpu(n) => (1, n.into()),
    }
}

impl Agent {
    /// Makes an agent and its back end.
    pub fn new(nixl: &Nixl, name: &str, settings: &AgentSettings) -> Result<Self, AgentError> {
        let f = nixl.functions;
        let text = |text: &str| CString::new(text).map_err(|_| AgentError::Name);
        let name = text(name)?;
        let plugin = text(&settings.plugin)?;
        let parameters = settings
            .parameters
            .iter()
            .map(|(key, value)| Ok((text(key)?, text(value)?)))
            .collect::<Result<Vec<_>, _>>()?;
        let config = AgentConfig {
            enable_prog_thread: true,
            enable_listen_thread: false,
            listen_port: 0,
            thread_sync: THREAD_SYNC_STRICT,
            num_workers: 1,
            pthr_delay_us: settings.progress_delay_us,
            lthr_delay_us: 100_000,
            capture_telemetry: false,
        };
        let mut agent = Self {
            nixl: nixl.clone(),
            agent: ptr::null_mut(),
            backend: ptr::null_mut(),
            arguments: ptr::null_mut(),
        };
        // SAFETY: all pointers are to live values of the declared types; each handle is written by
        // the call that makes it and is destroyed once, here or in `drop`.
        unsafe {
            check((f.create_configured_agent)(
                name.as_ptr(),
                &raw const config,
                &raw mut agent.agent,
            ))
            .map_err(AgentError::Agent)?;
            let mut handle = ptr::null_mut();
            check((f.create_params)(&raw mut handle)).map_err(AgentError::Agent)?;
            let added = parameters.iter().try_for_each(|(key, value)| {
                check((f.params_add)(handle, key.as_ptr(), value.as_ptr()))
            });
            let made = added.and_then(|()| {
                check((f.create_backend)(
                    agent.agent,
                    plugin.as_ptr(),
                    handle,
                    &raw mut agent.backend,
                ))
            });
            (f.destroy_params)(handle);
            made.map_err(AgentError::Plugin)?;
            check((f.create_opt_args)(&raw mut agent.arguments)).map_err(AgentError::Agent)?;
            check((f.opt_args_add_backend)(agent.arguments, agent.backend))
                .map_err(AgentError::Agent)?;
        }
        Ok(agent)
    }

    fn registration(
        &self,
        span: Span,
        call: unsafe extern "C" fn(Handle, Handle, Handle) -> c_int,
    ) -> Result<(), Code> {
        let f = self.nixl.functions;
        let (address, bytes, place) = span;
        let (memory, device) = memory_type(place);
        let mut list = ptr::null_mut();
        // SAFETY: the list is made, filled, used and destroyed here; the metadata is empty.
        unsafe {
            check((f.create_reg_dlist)(memory, &raw mut list))?;
            let done = check((f.reg_dlist_add_desc)(
                list,
                address as usize,
                bytes as usize,
                device,
                ptr::null(),
                0,
            ))
            .and_then(|()| check(call(self.agent, list, self.arguments)));
            (f.destroy_reg_dlist)(list);
            done
        }
    }

    /// Registers memory.
    pub fn register(&self, span: Span) -> Result<(), Code> {
        self.registration(span, self.nixl.functions.register_mem)
    }

    /// Takes memory back.
    pub fn deregister(&self, span: Span) -> Result<(), Code> {
        self.registration(span, self.nixl.functions.deregister_mem)
    }

    /// What a peer must load to reach this agent.
    pub fn metadata(&self) -> Result<Vec<u8>, Code> {
        let mut data = ptr::null_mut();
        let mut bytes = 0;
        // SAFETY: on success the call gives a block from `malloc` of the length it says, which is
        // copied and freed.
        unsafe {
            check((self.nixl.functions.get_local_md)(self.agent, &raw mut data, &raw mut bytes))?;
            if data.is_null() {
                return Ok(Vec::new());
            }
            let metadata = std::slice::from_raw_parts(data.cast::<u8>(), bytes).to_vec();
            libc::free(data);
            Ok(metadata)
        }
    }

    /// Loads a peer's metadata, and tells the peer's name.
    pub fn load(&self, metadata: &[u8]) -> Result<CString, Code> {
        let mut name = ptr::null_mut();
        // SAFETY: the slice is live; on success the call gives a C string from `malloc`, which is
        // copied and freed.
        unsafe {
            check((self.nixl.functions.load_remote_md)(
                self.agent,
                metadata.as_ptr().cast(),
                metadata.len(),
                &raw mut name,
            ))?;
            let owned = CStr::from_ptr(name).to_owned();
            libc::free(name.cast());
            Ok(owned)
        }
    }

    /// Forgets a peer.
    pub fn forget(&self, peer: &CStr) -> Result<(), Code> {
        // SAFETY: both pointers are live for the call.
        check(unsafe { (self.nixl.functions.invalidate_remote_md)(self.agent, peer.as_ptr()) })
    }

    /// Makes a list of descriptors.
    fn list(&self, memory: c_int, spans: impl Iterator<Item = Span>) -> Result<List, Code> {
        let f = self.nixl.functions;
        let mut list = List { nixl: self.nixl.clone(), handle: ptr::null_mut() };
        // SAFETY: the list is made by the first call and owned by `list` from then on.
        unsafe {
            check((f.create_xfer_dlist)(memory, &raw mut list.handle))?;
            for (address, bytes, place) in spans {
                check((f.xfer_dlist_add_desc)(
                    list.handle,
                    address as usize,
                    bytes as usize,
                    memory_type(place).1,
                ))?;
            }
        }
        Ok(list)
    }

    /// Prepares a list once for many requests; for the own side without a name.
    pub fn prepare(
        self: &Arc<Self>,
        peer: Option<&CStr>,
        place: Place,
        spans: impl Iterator<Item = Span>,
    ) -> Result<Prepared, Code> {
        let list = self.list(memory_type(place).0, spans)?;
        let mut handle = ptr::null_mut();
        // SAFETY: all handles are live; the prepared list does not refer to `list` afterwards.
        check(unsafe {
            (self.nixl.functions.prep_xfer_dlist)(
                self.agent,
                peer.unwrap_or(c"").as_ptr(),
                list.handle,
                &raw mut handle,
                self.arguments,
            )
        })?;
        Ok(Prepared { agent: self.clone(), handle })
    }

    /// A request over single descriptors. All `ours` are in the same kind of place, and so are all
    /// `theirs`.
    pub fn request(
        self: &Arc<Self>,
        write: bool,
        peer: &CStr,
        ours: impl Iterator<Item = Span> + Clone,
        theirs: impl Iterator<Item = Span> + Clone,
    ) -> Result<Request, Code> {
        let kind = |spans: &mut dyn Iterator<Item = Span>| {
            spans.next().map_or(0, |(_, _, place)| memory_type(place).0)
        };
        let our_list = self.list(kind(&mut ours.clone()), ours)?;
        let their_list = self.list(kind(&mut theirs.clone()), theirs)?;
        let mut handle = ptr::null_mut();
        // SAFETY: all handles are live; the request does not refer to the lists afterwards.
        check(unsafe {
            (self.nixl.functions.create_xfer_req)(
                self.agent,
                c_int::from(write),
                our_list.handle,
                their_list.handle,
                peer.as_ptr(),
                &raw mut handle,
                self.arguments,
            )
        })?;
        Ok(Request { agent: self.clone(), handle })
    }

    /// A request over entries of prepared lists.
    pub fn request_prepared(
        self: &Arc<Self>,
        write: bool,
        ours: &Prepared,
        our_entries: &[c_int],
        theirs: &Prepared,
        their_entries: &[c_int],
    ) -> Result<Request, Code> {
        let mut handle = ptr::null_mut();
        // SAFETY: all handles are live and of this agent; the entries are live slices.
        check(unsafe {
            (self.nixl.functions.make_xfer_req)(
                self.agent,
                c_int::from(write),
                ours.handle,
                our_entries.as_ptr(),
                our_entries.len(),
                theirs.handle,
                their_entries.as_ptr(),
                their_entries.len(),
                &raw mut handle,
                self.arguments,
            )
        })?;
        Ok(Request { agent: self.clone(), handle })
    }

    /// Sends a message to a peer.
    pub fn notify(&self, peer: &CStr, message: &[u8]) -> Result<(), Code> {
        // SAFETY: all pointers are live for the call, which copies the message.
        check(unsafe {
            (self.nixl.functions.gen_notif)(
                self.agent,
                peer.as_ptr(),
                message.as_ptr().cast(),
                message.len(),
                self.arguments,
            )
        })
    }

    /// The messages that have arrived, with the names of their senders.
    pub fn notifications(&self) -> Result<Vec<(CString, Vec<u8>)>, Code> {
        let f = self.nixl.functions;
        let mut map = ptr::null_mut();
        // SAFETY: the map is made and destroyed here; what it lends (names, messages) is copied
        // before it is destroyed.
        unsafe {
            check((f.create_notif_map)(&raw mut map))?;
            let read = || {
                check((f.get_notifs)(self.agent, map, self.arguments))?;
                let mut peers = 0;
                check((f.notif_map_size)(map, &raw mut peers))?;
                let mut all = Vec::new();
                for peer in 0..peers {
                    let mut name = ptr::null();
                    check((f.notif_map_get_agent_at)(map, peer, &raw mut name))?;
                    let mut messages = 0;
                    check((f.notif_map_get_notifs_size)(map, name, &raw mut messages))?;
                    for message in 0..messages {
                        let mut data = ptr::null();
                        let mut bytes = 0;
                        check((f.notif_map_get_notif)(
                            map,
                            name,
                            message,
                            &raw mut data,
                            &raw mut bytes,
                        ))?;
                        let message = if bytes == 0 {
                            Vec::new()
                        } else {
                            std::slice::from_raw_parts(data.cast::<u8>(), bytes).to_vec()
                        };
                        all.push((CStr::from_ptr(name).to_owned(), message));
                    }
                }
                Ok(all)
            };
            let all = read();
            (f.destroy_notif_map)(map);
            all
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let f = self.nixl.functions;
        // SAFETY: each handle was made by the matching call, or is null because that call was never
        // reached, and is destroyed once. Requests and prepared lists hold the agent, so none is
        // left.
        unsafe {
            if !self.arguments.is_null() {
                (f.destroy_opt_args)(self.arguments);
            }
            if !self.agent.is_null() {
                (f.destroy_agent)(self.agent);
            }
            // Only the C interface's own box: the back end itself went with the agent.
            if !self.backend.is_null() {
                (f.destroy_backend)(self.backend);
            }
        }
    }
}

struct List {
    nixl: Nixl,
    handle: Handle,
}

impl Drop for List {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: the handle is this list's own and destroyed once.
            unsafe { (self.nixl.functions.destroy_xfer_dlist)(self.handle) };
        }
    }
}

/// A list of descriptors that NIXL has looked up already.
pub struct Prepared {
    agent: Arc<Agent>,
    handle: Handle,
}

// SAFETY: the handle is only passed to calls that take the agent's lock.
unsafe impl Send for Prepared {}
// SAFETY: as above; NIXL does not change a prepared list.
unsafe impl Sync for Prepared {}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared").finish_non_exhaustive()
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        let f = self.agent.nixl.functions;
        // SAFETY: the handle is this list's own, of this agent, and released once.
        unsafe { (f.release_xfer_dlist_handle)(self.agent.agent, self.handle) };
    }
}

/// A transfer request.
///
/// Dropping it releases it, which does **not** stop a transfer that is on its way: its bytes may
/// land afterwards.
pub struct Request {
    agent: Arc<Agent>,
    handle: Handle,
}

// SAFETY: the handle is only passed to calls that take the agent's lock.
unsafe impl Send for Request {}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").finish_non_exhaustive()
    }
}

impl Request {
    /// Starts it; whether it has ended already.
    pub fn post(&mut self) -> Result<bool, Code> {
        let f = self.agent.nixl.functions;
        // SAFETY: all handles are live.
        let status =
            unsafe { (f.post_xfer_req)(self.agent.agent, self.handle, self.agent.arguments) };
        ended(status)
    }

    /// Whether it has ended.
    pub fn ended(&mut self) -> Result<bool, Code> {
        let f = self.agent.nixl.functions;
        // SAFETY: both handles are live.
        ended(unsafe { (f.get_xfer_status)(self.agent.agent, self.handle) })
    }
}

fn ended(status: c_int) -> Result<bool, Code> {
    match status {
        0 => Ok(true),
        1 => Ok(false),
        other => Err(Code(other)),
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let f = self.agent.nixl.functions;
        // SAFETY: the handle is this request's own, of this agent; released and destroyed once.
        unsafe {
            (f.release_xfer_req)(self.agent.agent, self.handle);
            (f.destroy_xfer_req)(self.handle);
        }
    }
}
