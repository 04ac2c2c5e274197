//! Requests, and the lists of descriptors they are made of.

use std::ffi::{CStr, c_int};
use std::fmt;
use std::ptr;
use std::sync::Arc;

use kvferry_layout::Place;

use super::agent::{Agent, Span};
use super::library::{Code, Handle, Nixl, check};

/// NIXL's number for a read; a write would be 1.
const READ: c_int = 0;

impl Agent {
    /// Prepares a list once for many requests; for the own side without a name.
    ///
    /// # Safety
    ///
    /// The spans must lie in memory that is registered, with this agent or by the peer, for as long
    /// as requests are made of the list.
    pub unsafe fn prepare(
        self: &Arc<Self>,
        peer: Option<&CStr>,
        place: Place,
        spans: impl Iterator<Item = Span>,
    ) -> Result<Prepared, Code> {
        let list = List::new(self, self.memory_type(place).0, spans)?;
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
        Ok(Prepared { agent: self.clone(), handle, entries: list.entries })
    }

    /// A request that reads `theirs` into `ours`. All `ours` are in the same kind of place, and so
    /// are all `theirs`.
    ///
    /// # Safety
    ///
    /// `ours` must lie in memory that is registered with this agent, and `theirs` in memory that the
    /// peer has registered, until the request has ended.
    pub unsafe fn request(
        self: &Arc<Self>,
        peer: &CStr,
        ours: impl Iterator<Item = Span> + Clone,
        theirs: impl Iterator<Item = Span> + Clone,
    ) -> Result<Request, Code> {
        let kind = |spans: &mut dyn Iterator<Item = Span>| {
            spans.next().map_or(0, |(_, _, place)| self.memory_type(place).0)
        };
        let our_list = List::new(self, kind(&mut ours.clone()), ours)?;
        let their_list = List::new(self, kind(&mut theirs.clone()), theirs)?;
        let mut handle = ptr::null_mut();
        // SAFETY: all handles are live; the request does not refer to the lists afterwards.
        check(unsafe {
            (self.nixl.functions.create_xfer_req)(
                self.agent,
                READ,
                our_list.handle,
                their_list.handle,
                peer.as_ptr(),
                &raw mut handle,
                self.arguments,
            )
        })?;
        Ok(Request { agent: self.clone(), handle })
    }

    /// A request that reads entries of one prepared list into entries of another.
    ///
    /// Lists of another agent and entries that a list does not have are refused, as NIXL refuses
    /// parameters.
    pub fn request_prepared(
        self: &Arc<Self>,
        ours: &Prepared,
        our_entries: &[c_int],
        theirs: &Prepared,
        their_entries: &[c_int],
    ) -> Result<Request, Code> {
        let fits = |list: &Prepared, entries: &[c_int]| {
            let known = |&entry: &c_int| usize::try_from(entry).is_ok_and(|n| n < list.entries);
            Arc::ptr_eq(&list.agent, self) && entries.iter().all(known)
        };
        let equal = our_entries.len() == their_entries.len();
        if !equal || !fits(ours, our_entries) || !fits(theirs, their_entries) {
            return Err(Code::INVALID);
        }
        let mut handle = ptr::null_mut();
        // SAFETY: all handles are live and of this agent; the entries are live slices, and each of
        // them names an entry of its list, which was checked above.
        check(unsafe {
            (self.nixl.functions.make_xfer_req)(
                self.agent,
                READ,
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
}

/// A list of descriptors that NIXL has looked up already.
pub struct Prepared {
    agent: Arc<Agent>,
    handle: Handle,
    entries: usize,
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

/// A list of descriptors.
struct List {
    nixl: Nixl,
    handle: Handle,
    entries: usize,
}

impl List {
    fn new(agent: &Agent, memory: c_int, spans: impl Iterator<Item = Span>) -> Result<Self, Code> {
        let f = agent.nixl.functions;
        let mut list = Self { nixl: agent.nixl.clone(), handle: ptr::null_mut(), entries: 0 };
        // SAFETY: the list is made by the first call and owned by `list` from then on.
        unsafe {
            check((f.create_xfer_dlist)(memory, &raw mut list.handle))?;
            for (address, bytes, place) in spans {
                check((f.xfer_dlist_add_desc)(
                    list.handle,
                    address as usize,
                    bytes as usize,
                    agent.memory_type(place).1,
                ))?;
                list.entries += 1;
            }
        }
        Ok(list)
    }
}

impl Drop for List {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: the handle is this list's own and destroyed once.
            unsafe { (self.nixl.functions.destroy_xfer_dlist)(self.handle) };
        }
    }
}
