//! Memory on a card, of this process and of others, and pinned memory beside it.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;

use super::card::Card;
use super::load::{Access, AllocationProperties, ByValue, IpcHandle, Location};
use kvferry_transport::Error;

const LAZY_PEER_ACCESS: c_uint = 1;
const POSIX_DESCRIPTOR: c_uint = 1;
const POINTER_DEVICE: c_int = 9;
const POINTER_IS_LEGACY_IPC: c_int = 10;
const POINTER_MAPPING_BYTES: c_int = 18;
const POINTER_MAPPING_BASE: c_int = 19;

impl Card {
    /// Memory on the card.
    pub fn allocate(&self, bytes: u64) -> Result<u64, Error> {
        let mut address = 0;
        // SAFETY: the pointer is to a live value.
        unsafe {
            call!(self, "allocating on a GPU", allocate(&raw mut address, bytes as usize))?;
        }
        Ok(address)
    }

    /// Gives memory back.
    ///
    /// # Safety
    ///
    /// It was allocated by [`allocate`](Self::allocate), and nothing uses it any more.
    pub unsafe fn free(&self, address: u64) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { call!(self, "freeing memory of a GPU", free(address)) }
    }

    /// Writes to the card's memory, and waits for it.
    ///
    /// # Safety
    ///
    /// So many bytes from the address on are allocated until this returns, and whoever else uses them bears that they
    /// change. CUDA refuses only what it does not know: pinned memory of the host is written like the card's own.
    pub unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<(), Error> {
        // SAFETY: the slice is live; the rest is the caller's promise.
        unsafe { call!(self, "writing to a GPU", upload(to, from.as_ptr().cast(), from.len())) }
    }

    /// Reads the card's memory.
    ///
    /// # Safety
    ///
    /// As many bytes from the address on are allocated until this returns.
    pub unsafe fn download(&self, to: &mut [u8], from: u64) -> Result<(), Error> {
        // SAFETY: the slice is live; the rest is the caller's promise.
        unsafe {
            call!(self, "reading from a GPU", download(to.as_mut_ptr().cast(), from, to.len()))
        }
    }

    /// Memory of the host that the card reads at full speed.
    pub(crate) fn pinned(&self, bytes: usize) -> Result<Pinned, Error> {
        let mut memory = ptr::null_mut();
        // SAFETY: the pointer is to a live value.
        unsafe { call!(self, "pinning memory", host_allocate(&raw mut memory, bytes, 0))? };
        Ok(Pinned { card: self.clone(), memory: memory.cast() })
    }

    /// The allocation that an address lies in: start and length.
    pub(crate) fn allocation(&self, address: u64) -> Result<(u64, u64), Error> {
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: the pointers are to live values.
        unsafe {
            call!(
                self,
                &format!("asking what {address:#x} belongs to"),
                address_range(&raw mut base, &raw mut bytes, address)
            )?;
        }
        Ok((base, bytes as u64))
    }

    /// The mapping that an address of mapped memory lies in: start and length.
    pub(crate) fn mapping(&self, address: u64) -> Result<(u64, u64), Error> {
        let (mut base, mut bytes) = (0u64, 0u64);
        // SAFETY: both attributes have 64 bits, and the pointers are to live values.
        unsafe {
            let what = "asking how memory is mapped";
            let (to_base, to_bytes) = ((&raw mut base).cast(), (&raw mut bytes).cast());
            call!(self, what, pointer_attribute(to_base, POINTER_MAPPING_BASE, address))?;
            call!(self, what, pointer_attribute(to_bytes, POINTER_MAPPING_BYTES, address))?;
        }
        Ok((base, bytes))
    }

    /// The number of the card whose memory an address is.
    pub(crate) fn owner(&self, address: u64) -> Result<u32, Error> {
        let mut ordinal: c_int = 0;
        // SAFETY: the attribute is an int, and the pointer is to a live one.
        unsafe {
            let to = (&raw mut ordinal).cast();
            call!(
                self,
                &format!("asking whose memory {address:#x} is"),
                pointer_attribute(to, POINTER_DEVICE, address)
            )?;
        }
        Ok(ordinal as u32)
    }

    /// Whether an allocation can be named by an [`IpcHandle`]: plain ones can, mapped ones cannot.
    pub(crate) fn is_plain(&self, address: u64) -> Result<bool, Error> {
        let mut plain: c_int = 0;
        // SAFETY: the attribute is a bool, for which an int has room, and the pointer is to a live one.
        unsafe {
            let to = (&raw mut plain).cast();
            call!(
                self,
                "asking how memory can be shared",
                pointer_attribute(to, POINTER_IS_LEGACY_IPC, address)
            )?;
        }
        Ok(plain & 0xff != 0)
    }

    pub(crate) fn ipc_handle(&self, base: u64) -> Result<IpcHandle, Error> {
        let mut handle = [0; 64];
        // SAFETY: the pointer is to a live value of 64 bytes.
        unsafe { call!(self, "naming memory to other processes", ipc_get(&raw mut handle, base))? };
        Ok(handle)
    }

    /// Opens another process's allocation.
    pub(crate) fn ipc_open(&self, handle: &IpcHandle) -> Result<u64, Error> {
        let mut base = 0;
        // SAFETY: the pointer is to a live value; CUDA checks the handle.
        unsafe {
            let handle = ByValue(*handle);
            call!(
                self,
                "opening the memory of another process",
                ipc_open(&raw mut base, handle, LAZY_PEER_ACCESS)
            )?;
        }
        Ok(base)
    }

    /// # Safety
    ///
    /// `base` is from [`ipc_open`](Self::ipc_open), and nothing uses it any more.
    pub(crate) unsafe fn ipc_close(&self, base: u64) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { call!(self, "closing the memory of another process", ipc_close(base)) }
    }

    /// A descriptor that names the mapped allocation at `base`. The caller closes it.
    pub(crate) fn export_descriptor(&self, base: u64) -> Result<c_int, Error> {
        let (mut handle, mut descriptor) = (0, -1);
        // SAFETY: the pointers are to live values; the handle is released once.
        unsafe {
            let address = base as *mut c_void;
            call!(self, "holding mapped memory", handle_of(&raw mut handle, address))?;
            let to = (&raw mut descriptor).cast();
            let exported = call!(
                self,
                "exporting mapped memory (it must be made for that: \
                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; and each allocation takes a descriptor: see ulimit -n)",
                handle_export(to, handle, POSIX_DESCRIPTOR, 0)
            );
            call!(self, "releasing mapped memory", handle_release(handle))?;
            exported?;
        }
        Ok(descriptor)
    }

    /// Maps allocations of these sizes, one after the other, where the card can read them. Each is named by a
    /// descriptor, which is asked for when it is its turn: there may be thousands.
    pub(crate) fn map(
        &self,
        parts: &[u64],
        mut descriptor_of: impl FnMut(usize) -> Result<OwnedFd, Error>,
    ) -> Result<Mapped, Error> {
        let bytes = parts.iter().sum();
        let mut mapped = Mapped { card: self.clone(), base: 0, bytes, mapped: vec![] };
        // SAFETY: the pointers are to live values; what was made is in `mapped`, whose drop undoes it.
        unsafe {
            let to = &raw mut mapped.base;
            call!(self, "reserving addresses", reserve(to, bytes as usize, 0, 0, 0))?;
            let mut at = mapped.base;
            for (number, &bytes) in parts.iter().enumerate() {
                let mut handle = 0;
                let descriptor = descriptor_of(number)?;
                let from = descriptor.as_raw_fd() as usize as *mut c_void;
                call!(
                    self,
                    "importing mapped memory of another process",
                    handle_import(&raw mut handle, from, POSIX_DESCRIPTOR)
                )?;
                let done = call!(self, "mapping memory", map(at, bytes as usize, 0, handle, 0));
                // A mapping keeps the memory by itself.
                call!(self, "releasing mapped memory", handle_release(handle))?;
                done?;
                mapped.mapped.push((at, bytes));
                at += bytes;
            }
            self.allow(mapped.base, bytes)?;
        }
        Ok(mapped)
    }

    /// Memory from the virtual-memory interface that other processes can be given, as vLLM's sleep
    /// mode and PyTorch's expandable segments make it: `parts` allocations in a row.
    pub fn allocate_mapped(&self, bytes: u64, parts: u64) -> Result<Mapped, Error> {
        let properties = AllocationProperties {
            kind: 1,
            handles: POSIX_DESCRIPTOR as c_int,
            location: Location { kind: 1, id: self.device() },
            windows: ptr::null_mut(),
            flags: [0; 8],
        };
        let mut step = 0;
        // SAFETY: the pointers are to live values.
        unsafe {
            let facts = &raw const properties;
            call!(self, "asking for a granularity", granularity(&raw mut step, facts, 0))?;
        }
        let part = bytes.div_ceil(parts).next_multiple_of(step as u64);
        let mut mapped =
            Mapped { card: self.clone(), base: 0, bytes: part * parts, mapped: vec![] };
        // SAFETY: as in `map`.
        unsafe {
            let to = &raw mut mapped.base;
            call!(self, "reserving addresses", reserve(to, mapped.bytes as usize, 0, 0, 0))?;
            for number in 0..parts {
                let (mut handle, at) = (0, mapped.base + number * part);
                let facts = &raw const properties;
                call!(
                    self,
                    "allocating on a GPU",
                    handle_create(&raw mut handle, part as usize, facts, 0)
                )?;
                let done = call!(self, "mapping memory", map(at, part as usize, 0, handle, 0));
                call!(self, "releasing mapped memory", handle_release(handle))?;
                done?;
                mapped.mapped.push((at, part));
            }
            self.allow(mapped.base, mapped.bytes)?;
        }
        Ok(mapped)
    }

    /// # Safety
    ///
    /// The span is mapped.
    unsafe fn allow(&self, base: u64, bytes: u64) -> Result<(), Error> {
        let access = Access { location: Location { kind: 1, id: self.device() }, flags: 3 };
        // SAFETY: the pointer is to a live value.
        unsafe {
            call!(
                self,
                "allowing access to mapped memory",
                set_access(base, bytes as usize, &raw const access, 1)
            )
        }
    }
}

/// Addresses of this process that name memory on a card.
#[derive(Debug)]
pub struct Mapped {
    card: Card,
    base: u64,
    bytes: u64,
    mapped: Vec<(u64, u64)>,
}

impl Mapped {
    /// The first address.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// How many bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let Ok(driver) = self.card.enter() else { return };
        // SAFETY: exactly what was mapped and reserved for this value; whoever drops it has made sure
        // that nothing uses it any more.
        unsafe {
            for &(base, bytes) in &self.mapped {
                (driver.0.unmap)(base, bytes as usize);
            }
            if self.base != 0 {
                (driver.0.unreserve)(self.base, self.bytes as usize);
            }
        }
    }
}

/// Pinned memory of the host.
#[derive(Debug)]
pub(crate) struct Pinned {
    card: Card,
    pub(crate) memory: *mut u8,
}

// SAFETY: plain memory, owned by this value.
unsafe impl Send for Pinned {}
// SAFETY: a reference gives no more than the address.
unsafe impl Sync for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(driver) = self.card.enter() {
            // SAFETY: allocated for this value.
            unsafe { (driver.0.host_free)(self.memory.cast()) };
        }
    }
}

/// Memory on the card.
pub(crate) struct OnCard(u64, Card);

impl OnCard {
    pub(crate) fn new(card: &Card, bytes: usize) -> Result<Self, Error> {
        Ok(Self(card.allocate(bytes as u64)?, card.clone()))
    }

    pub(crate) fn address(&self) -> u64 {
        self.0
    }
}

impl Drop for OnCard {
    fn drop(&mut self) {
        // SAFETY: allocated for this value, and kept by whatever used it.
        let _ = unsafe { self.1.free(self.0) };
    }
}
