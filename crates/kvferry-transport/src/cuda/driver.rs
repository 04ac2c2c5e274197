//! As much of CUDA's driver interface as the back end needs, loaded at run time.
//!
//! Also what a benchmark needs to make memory on a card and to look at it: this is not a general
//! binding, and says nothing that CUDA's own documentation does not say better.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr;
use std::sync::{Arc, OnceLock};

use crate::error::Error;

/// A handle of CUDA's: context, stream, event, module, function.
type Handle = *mut c_void;
type Code = c_int;

/// Bytes that name an allocation to another process.
pub(crate) type IpcHandle = [u8; 64];
/// Bytes that name a card wherever it is seen.
pub(crate) type Uuid = [u8; 16];

const NOT_READY: Code = 600;
const NON_BLOCKING: c_uint = 1;
const NO_TIMING: c_uint = 2;
const LAZY_PEER_ACCESS: c_uint = 1;
const POSIX_DESCRIPTOR: c_uint = 1;
const MULTIPROCESSORS: c_int = 16;
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;
const POINTER_DEVICE: c_int = 9;
const POINTER_IS_LEGACY_IPC: c_int = 10;
const POINTER_MAPPING_BYTES: c_int = 18;
const POINTER_MAPPING_BASE: c_int = 19;
const MAX_DYNAMIC_SHARED: c_int = 8;

/// CUmemAllocationProp, and CUmemLocation and CUmemAccessDesc inside and beside it.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Location {
    kind: c_int,
    id: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct AllocationProperties {
    kind: c_int,
    handles: c_int,
    location: Location,
    windows: *mut c_void,
    flags: [u8; 8],
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Access {
    location: Location,
    flags: c_int,
}

/// As `cuIpcOpenMemHandle` takes it: by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct ByValue(IpcHandle);

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*);)*) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> Code,)*
            /// Keeps the functions loaded.
            _library: libloading::Library,
        }

        impl Functions {
            fn load(library: libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the declarations below are those of cuda.h.
                unsafe {
                    Ok(Self {
                        $($field: *library.get(concat!($symbol, "\0").as_bytes())?,)*
                        _library: library,
                    })
                }
            }
        }
    };
}

functions! {
    init = "cuInit": fn(c_uint);
    error_string = "cuGetErrorString": fn(Code, *mut *const c_char);
    device_get = "cuDeviceGet": fn(*mut c_int, c_int);
    device_uuid = "cuDeviceGetUuid_v2": fn(*mut Uuid, c_int);
    device_name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int);
    device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, c_int);
    driver_version = "cuDriverGetVersion": fn(*mut c_int);
    context_retain = "cuDevicePrimaryCtxRetain": fn(*mut Handle, c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2": fn(c_int);
    context_set = "cuCtxSetCurrent": fn(Handle);
    context_synchronize = "cuCtxSynchronize": fn();
    priority_range = "cuCtxGetStreamPriorityRange": fn(*mut c_int, *mut c_int);
    stream_create = "cuStreamCreateWithPriority": fn(*mut Handle, c_uint, c_int);
    stream_destroy = "cuStreamDestroy_v2": fn(Handle);
    stream_synchronize = "cuStreamSynchronize": fn(Handle);
    event_create = "cuEventCreate": fn(*mut Handle, c_uint);
    event_destroy = "cuEventDestroy_v2": fn(Handle);
    event_record = "cuEventRecord": fn(Handle, Handle);
    event_query = "cuEventQuery": fn(Handle);
    event_elapsed = "cuEventElapsedTime": fn(*mut f32, Handle, Handle);
    module_load = "cuModuleLoadData": fn(*mut Handle, *const c_void);
    module_unload = "cuModuleUnload": fn(Handle);
    module_function = "cuModuleGetFunction": fn(*mut Handle, Handle, *const c_char);
    function_set = "cuFuncSetAttribute": fn(Handle, c_int, c_int);
    launch = "cuLaunchKernel": fn(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle,
        *mut *mut c_void, *mut *mut c_void
    );
    allocate = "cuMemAlloc_v2": fn(*mut u64, usize);
    free = "cuMemFree_v2": fn(u64);
    host_allocate = "cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost": fn(*mut c_void);
    upload_async = "cuMemcpyHtoDAsync_v2": fn(u64, *const c_void, usize, Handle);
    copy_async = "cuMemcpyDtoDAsync_v2": fn(u64, u64, usize, Handle);
    upload = "cuMemcpyHtoD_v2": fn(u64, *const c_void, usize);
    download = "cuMemcpyDtoH_v2": fn(*mut c_void, u64, usize);
    fill_async = "cuMemsetD8Async": fn(u64, u8, usize, Handle);
    address_range = "cuMemGetAddressRange_v2": fn(*mut u64, *mut usize, u64);
    pointer_attribute = "cuPointerGetAttribute": fn(*mut c_void, c_int, u64);
    ipc_get = "cuIpcGetMemHandle": fn(*mut IpcHandle, u64);
    ipc_open = "cuIpcOpenMemHandle_v2": fn(*mut u64, ByValue, c_uint);
    ipc_close = "cuIpcCloseMemHandle": fn(u64);
    handle_of = "cuMemRetainAllocationHandle": fn(*mut u64, *mut c_void);
    handle_create = "cuMemCreate": fn(*mut u64, usize, *const AllocationProperties, u64);
    handle_release = "cuMemRelease": fn(u64);
    handle_export = "cuMemExportToShareableHandle": fn(*mut c_void, u64, c_uint, u64);
    handle_import = "cuMemImportFromShareableHandle": fn(*mut u64, *mut c_void, c_uint);
    granularity = "cuMemGetAllocationGranularity":
        fn(*mut usize, *const AllocationProperties, c_uint);
    reserve = "cuMemAddressReserve": fn(*mut u64, usize, usize, u64, u64);
    unreserve = "cuMemAddressFree": fn(u64, usize);
    map = "cuMemMap": fn(u64, usize, usize, u64, u64);
    unmap = "cuMemUnmap": fn(u64, usize);
    set_access = "cuMemSetAccess": fn(u64, usize, *const Access, usize);
}

/// CUDA's driver.
pub(crate) struct Driver(Functions);

impl Driver {
    /// The driver of this machine, loaded once.
    pub(crate) fn get() -> Result<&'static Self, Error> {
        static DRIVER: OnceLock<Result<Driver, Error>> = OnceLock::new();
        DRIVER.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, Error> {
        let missing = |error: libloading::Error| Error::NoDriver(reason(&error));
        // SAFETY: loading CUDA's driver library runs its initialisers, as any CUDA program does.
        let library = unsafe { libloading::Library::new("libcuda.so.1") }.map_err(missing)?;
        let driver = Self(Functions::load(library).map_err(missing)?);
        // SAFETY: takes a number.
        let code = unsafe { (driver.0.init)(0) };
        match driver.said("starting CUDA", code) {
            Ok(()) => Ok(driver),
            Err(error) => Err(Error::NoDriver(error.to_string())),
        }
    }

    /// What an answer means.
    fn said(&self, what: &str, code: Code) -> Result<(), Error> {
        if code == 0 {
            return Ok(());
        }
        let mut text: *const c_char = ptr::null();
        // SAFETY: the pointer is to a live value; the text is CUDA's and stays.
        let text = unsafe {
            (self.0.error_string)(code, &raw mut text);
            if text.is_null() { None } else { Some(CStr::from_ptr(text)) }
        };
        let text = text.map_or("an error without a name".into(), CStr::to_string_lossy);
        Err(Error::Cuda { what: what.to_owned(), code, text: text.into_owned() })
    }
}

/// What the system says about a library that does not load.
pub(super) fn reason(error: &libloading::Error) -> String {
    let cause = std::error::Error::source(error);
    cause.map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Driver")
    }
}

/// The primary context of one card, held: the one that PyTorch and the CUDA runtime use too.
///
/// Cheap to clone. Every call makes it the calling thread's current context first.
#[derive(Clone, Debug)]
pub struct Card(Arc<Held>);

#[derive(Debug)]
struct Held {
    driver: &'static Driver,
    ordinal: u32,
    device: c_int,
    context: Handle,
    uuid: Uuid,
}

// SAFETY: CUDA's handles may be used from any thread.
unsafe impl Send for Held {}
// SAFETY: the driver synchronises calls from several threads.
unsafe impl Sync for Held {}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: the context was retained once for this value.
        unsafe { (self.driver.0.context_release)(self.device) };
    }
}

/// The driver's functions, for a thread whose current context is a card's.
macro_rules! call {
    ($card:expr, $what:expr, $function:ident($($argument:expr),*)) => {{
        let driver = $card.enter()?;
        let code = (driver.0.$function)($($argument),*);
        driver.said($what, code)
    }};
}

impl Card {
    /// The card with this number.
    pub fn open(ordinal: u32) -> Result<Self, Error> {
        let driver = Driver::get()?;
        let (mut device, mut context, mut uuid) = (0, ptr::null_mut(), Uuid::default());
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: all pointers are to live values.
        unsafe {
            driver.said(
                &format!("looking for GPU {ordinal}"),
                (driver.0.device_get)(&raw mut device, number),
            )?;
            driver.said("asking for its UUID", (driver.0.device_uuid)(&raw mut uuid, device))?;
            driver.said(
                &format!("entering GPU {ordinal}"),
                (driver.0.context_retain)(&raw mut context, device),
            )?;
        }
        Ok(Self(Arc::new(Held { driver, ordinal, device, context, uuid })))
    }

    fn enter(&self) -> Result<&'static Driver, Error> {
        let driver = self.0.driver;
        // SAFETY: the context is held.
        driver.said("entering a GPU", unsafe { (driver.0.context_set)(self.0.context) })?;
        Ok(driver)
    }

    /// Its number.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    pub(crate) fn uuid(&self) -> Uuid {
        self.0.uuid
    }

    /// Its name, and the newest CUDA that its driver knows, as in 13000 for 13.0.
    pub fn name(&self) -> Result<(String, i32), Error> {
        let mut name = [0 as c_char; 128];
        let mut version = 0;
        // SAFETY: the buffers are live and as long as said; CUDA ends the name with a zero.
        let name = unsafe {
            call!(self, "asking for its name", device_name(name.as_mut_ptr(), 127, self.0.device))?;
            call!(self, "asking for the version", driver_version(&raw mut version))?;
            CStr::from_ptr(name.as_ptr())
        };
        Ok((name.to_string_lossy().into_owned(), version))
    }

    fn attribute(&self, attribute: c_int) -> Result<u32, Error> {
        let mut value = 0;
        // SAFETY: the pointer is to a live value.
        unsafe {
            let device = self.0.device;
            call!(self, "asking for a fact", device_attribute(&raw mut value, attribute, device))?;
        }
        Ok(value as u32)
    }

    /// How many multiprocessors it has.
    pub fn multiprocessors(&self) -> Result<u32, Error> {
        self.attribute(MULTIPROCESSORS)
    }

    /// Its compute capability, as in 90 for 9.0.
    pub fn capability(&self) -> Result<u32, Error> {
        Ok(self.attribute(CAPABILITY_MAJOR)? * 10 + self.attribute(CAPABILITY_MINOR)?)
    }

    /// Waits until everything that was started on it has ended.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: takes nothing.
        unsafe { call!(self, "waiting for a GPU", context_synchronize()) }
    }

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
    pub fn upload(&self, to: u64, from: &[u8]) -> Result<(), Error> {
        // SAFETY: the slice is live; CUDA checks its own side.
        unsafe { call!(self, "writing to a GPU", upload(to, from.as_ptr().cast(), from.len())) }
    }

    /// Reads the card's memory.
    pub fn download(&self, to: &mut [u8], from: u64) -> Result<(), Error> {
        // SAFETY: the slice is live; CUDA checks its own side.
        unsafe {
            call!(self, "reading from a GPU", download(to.as_mut_ptr().cast(), from, to.len()))
        }
    }

    /// A stream that waits for no other: of the lowest priority, or of the usual one.
    pub fn stream(&self, low_priority: bool) -> Result<Stream, Error> {
        let (mut least, mut greatest, mut stream) = (0, 0, ptr::null_mut());
        // SAFETY: all pointers are to live values.
        unsafe {
            call!(
                self,
                "asking for priorities",
                priority_range(&raw mut least, &raw mut greatest)
            )?;
            let priority = if low_priority { least } else { 0 };
            call!(self, "making a stream", stream_create(&raw mut stream, NON_BLOCKING, priority))?;
        }
        Ok(Stream { card: self.clone(), stream })
    }

    /// Something to record in a stream and to wait for.
    pub fn event(&self, timing: bool) -> Result<Event, Error> {
        let mut event = ptr::null_mut();
        let flags = if timing { 0 } else { NO_TIMING };
        // SAFETY: the pointer is to a live value.
        unsafe { call!(self, "making an event", event_create(&raw mut event, flags))? };
        Ok(Event { card: self.clone(), event })
    }

    /// Loads compiled code.
    pub fn module(&self, image: &[u8]) -> Result<Module, Error> {
        let mut module = ptr::null_mut();
        // PTX is text, and ends with a zero.
        let image = [image, &[0]].concat();
        // SAFETY: the image is live during the call.
        unsafe {
            call!(self, "loading the kernel", module_load(&raw mut module, image.as_ptr().cast()))?;
        }
        Ok(Module { card: self.clone(), module })
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
                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)",
                handle_export(to, handle, POSIX_DESCRIPTOR, 0)
            );
            call!(self, "releasing mapped memory", handle_release(handle))?;
            exported?;
        }
        Ok(descriptor)
    }

    /// Maps allocations that descriptors name, one after the other, where the card can read them.
    pub(crate) fn map(&self, parts: &[(c_int, u64)]) -> Result<Mapped, Error> {
        let bytes = parts.iter().map(|part| part.1).sum();
        let mut mapped = Mapped { card: self.clone(), base: 0, bytes, mapped: vec![] };
        // SAFETY: the pointers are to live values; what was made is in `mapped`, whose drop undoes it.
        unsafe {
            let to = &raw mut mapped.base;
            call!(self, "reserving addresses", reserve(to, bytes as usize, 0, 0, 0))?;
            let mut at = mapped.base;
            for &(descriptor, bytes) in parts {
                let mut handle = 0;
                let from = descriptor as usize as *mut c_void;
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
            location: Location { kind: 1, id: self.0.device },
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
        let access = Access { location: Location { kind: 1, id: self.0.device }, flags: 3 };
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

/// Work on a card in order.
#[derive(Debug)]
pub struct Stream {
    card: Card,
    stream: Handle,
}

// SAFETY: CUDA's handles may be used from any thread, and the driver synchronises calls.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Starts to copy on the card.
    ///
    /// # Safety
    ///
    /// Both spans must be allocated until the stream has passed this.
    pub unsafe fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { call!(self.card, "copying", copy_async(to, from, bytes as usize, self.stream)) }
    }

    /// Starts to set bytes on the card.
    ///
    /// # Safety
    ///
    /// The span must be allocated until the stream has passed this.
    pub unsafe fn fill(&self, to: u64, value: u8, bytes: u64) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { call!(self.card, "filling", fill_async(to, value, bytes as usize, self.stream)) }
    }

    /// # Safety
    ///
    /// `from` must be pinned memory that stays as it is until the stream has passed this, and `to`
    /// allocated memory.
    pub(crate) unsafe fn upload(
        &self,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { call!(self.card, "uploading", upload_async(to, from.cast(), bytes, self.stream)) }
    }

    /// Marks this point of the stream.
    pub fn record(&self, event: &Event) -> Result<(), Error> {
        // SAFETY: both are live.
        unsafe { call!(self.card, "recording an event", event_record(event.event, self.stream)) }
    }

    /// Waits until all of it has ended.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: it is live.
        unsafe { call!(self.card, "waiting for a stream", stream_synchronize(self.stream)) }
    }

    /// Starts a kernel. `arguments` point to the arguments' values.
    ///
    /// # Safety
    ///
    /// The arguments must be those of the kernel, and all memory that it touches must stay allocated
    /// until the stream has passed this.
    pub unsafe fn launch(
        &self,
        kernel: &Kernel,
        (ctas, threads): (u32, u32),
        shared: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<(), Error> {
        let (grid, block, stream) = (ctas, threads, self.stream);
        let (function, values) = (kernel.function, arguments.as_mut_ptr());
        // SAFETY: the caller's promise; the handles are live.
        unsafe {
            call!(
                self.card,
                "starting a kernel",
                launch(function, grid, 1, 1, block, 1, 1, shared, stream, values, ptr::null_mut())
            )
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(driver) = self.card.enter() {
            // SAFETY: made for this value; what is under way still ends.
            unsafe { (driver.0.stream_destroy)(self.stream) };
        }
    }
}

/// A point of a stream.
#[derive(Debug)]
pub struct Event {
    card: Card,
    event: Handle,
}

// SAFETY: CUDA's handles may be used from any thread, and the driver synchronises calls.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Whether the stream has passed it.
    pub fn passed(&self) -> Result<bool, Error> {
        let driver = self.card.enter()?;
        // SAFETY: it is live.
        match unsafe { (driver.0.event_query)(self.event) } {
            NOT_READY => Ok(false),
            code => driver.said("carrying out copies", code).map(|()| true),
        }
    }

    /// Milliseconds from `earlier` to this; both must have passed and count time.
    pub fn since(&self, earlier: &Self) -> Result<f32, Error> {
        let mut time = 0.0;
        // SAFETY: both are live, and so is the number.
        unsafe {
            let (to, from, until) = (&raw mut time, earlier.event, self.event);
            call!(self.card, "reading a clock", event_elapsed(to, from, until))?;
        }
        Ok(time)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(driver) = self.card.enter() {
            // SAFETY: made for this value.
            unsafe { (driver.0.event_destroy)(self.event) };
        }
    }
}

/// Compiled code on a card.
#[derive(Debug)]
pub struct Module {
    card: Card,
    module: Handle,
}

// SAFETY: CUDA's handles may be used from any thread, and the driver synchronises calls.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A kernel of a [`Module`], which must outlive it.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    function: Handle,
}

// SAFETY: CUDA's handles may be used from any thread, and the driver synchronises calls.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Module {
    /// A kernel by its name, which may use so many bytes of dynamic shared memory.
    pub fn kernel(&self, name: &str, shared: u32) -> Result<Kernel, Error> {
        let c_name = CString::new(name)
            .map_err(|_| Error::Library(format!("no kernel can be called {name:?}")))?;
        let mut function = ptr::null_mut();
        // SAFETY: the pointers are to live values, and the module is loaded.
        unsafe {
            let (to, name) = (&raw mut function, c_name.as_ptr());
            call!(self.card, "looking for a kernel", module_function(to, self.module, name))?;
            if shared > 0 {
                let bytes = shared as c_int;
                call!(
                    self.card,
                    "asking for shared memory",
                    function_set(function, MAX_DYNAMIC_SHARED, bytes)
                )?;
            }
        }
        Ok(Kernel { function })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(driver) = self.card.enter() {
            // SAFETY: loaded for this value.
            unsafe { (driver.0.module_unload)(self.module) };
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

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(driver) = self.card.enter() {
            // SAFETY: allocated for this value.
            unsafe { (driver.0.host_free)(self.memory.cast()) };
        }
    }
}
