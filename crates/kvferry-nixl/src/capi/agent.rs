//! An agent: registered memory, and what is known of peers.

use std::ffi::{CStr, CString, c_int};
use std::fmt;
use std::ptr;

use kvferry_layout::Place;

use super::library::{AgentConfig, Code, Handle, Nixl, THREAD_SYNC_STRICT, check};

/// The settings of an agent.
#[derive(Clone, Debug)]
pub struct AgentSettings {
    /// Pause between two rounds of the progress thread. 0 spins.
    pub progress_delay_us: u64,
    /// The plugin that moves bytes.
    pub plugin: String,
    /// Its parameters.
    pub parameters: Vec<(String, String)>,
    /// What is said to be a card's memory is the host's: of a stand-in for CUDA's driver.
    pub cards_are_host: bool,
}

/// Why an agent could not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AgentError {
    /// NIXL could not create its agent.
    ///
    /// What to do: the library does not fit this machine; install it anew with
    /// `kvferry nixl install`.
    #[error("NIXL makes no agent: {0}")]
    Agent(Code),
    /// NIXL could not load its plugin.
    ///
    /// What to do: install the whole wheel, or name the plugins' directory in `NIXL_PLUGIN_DIR`.
    #[error("NIXL's plugin cannot be used: {0}")]
    Plugin(Code),
    /// A name or parameter holds a zero byte.
    ///
    /// What to do: correct the name or parameter.
    #[error("a name or parameter for NIXL holds a zero byte")]
    Name,
}

/// An agent with one back end.
pub struct Agent {
    pub(super) nixl: Nixl,
    pub(super) agent: Handle,
    backend: Handle,
    /// Names the back end in every call, so that NIXL does not have to look for one.
    pub(super) arguments: Handle,
    cards_are_host: bool,
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

impl Agent {
    /// NIXL's number for a kind of memory, and the device.
    pub(super) fn memory_type(&self, place: Place) -> (c_int, u64) {
        match place {
            Place::Gpu(n) if !self.cards_are_host => (1, n.into()),
            Place::Host | Place::Gpu(_) => (0, 0),
        }
    }

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
            cards_are_host: settings.cards_are_host,
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
        let (memory, device) = self.memory_type(place);
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
    ///
    /// # Safety
    ///
    /// Peers read this memory from now on, and requests write it. It must stay mapped (for a GPU:
    /// allocated) until [`deregister`](Self::deregister) has succeeded or the agent is dropped, and
    /// until every [`Request`](super::Request) over it has ended; meanwhile no reference to it may
    /// exist that assumes that its content does not change.
    pub unsafe fn register(&self, span: Span) -> Result<(), Code> {
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

    /// Sends a few bytes to a peer, which finds them among its notifications. NIXL does not say whether
    /// they arrive.
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

    /// Forgets a peer.
    pub fn forget(&self, peer: &CStr) -> Result<(), Code> {
        // SAFETY: both pointers are live for the call.
        check(unsafe { (self.nixl.functions.invalidate_remote_md)(self.agent, peer.as_ptr()) })
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
