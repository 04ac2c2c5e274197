//! The driver's library and its functions.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr;
use std::sync::OnceLock;

use kvferry_transport::Error;

/// Names CUDA's driver library, where it is not the system's.
const VARIABLE: &str = "KVFERRY_CUDA_DRIVER";

/// Whether it is not the system's.
pub(super) fn is_named() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// A handle of CUDA's: context, stream, event, module, function.
pub(super) type Handle = *mut c_void;
pub(super) type Code = c_int;

/// Bytes that name an allocation to another process.
pub(crate) type IpcHandle = [u8; 64];

/// CUmemAllocationProp, and CUmemLocation and CUmemAccessDesc inside and beside it.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Location {
    pub(super) kind: c_int,
    pub(super) id: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct AllocationProperties {
    pub(super) kind: c_int,
    pub(super) handles: c_int,
    pub(super) location: Location,
    pub(super) windows: *mut c_void,
    pub(super) flags: [u8; 8],
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Access {
    pub(super) location: Location,
    pub(super) flags: c_int,
}

/// CUlaunchConfig, and CUlaunchAttribute beside it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared: c_uint,
    pub(super) stream: Handle,
    pub(super) attributes: *const LaunchAttribute,
    pub(super) attribute_count: c_uint,
}

#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct LaunchAttribute {
    pub(super) id: c_int,
    pub(super) unused: c_int,
    /// A union as large as that, whose first word is all that is used here.
    pub(super) value: [c_int; 16],
}

/// As `cuIpcOpenMemHandle` takes it: by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ByValue(pub(super) IpcHandle);

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*);)*) => {
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> Code,)*
            /// Whether what is called a card's memory is the host's, which stand-ins for the driver say in tests.
            pub(super) stands_in: bool,
            /// Keeps the functions loaded.
            _library: libloading::Library,
        }

        impl Functions {
            fn load(library: libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the declarations below are those of cuda.h.
                unsafe {
                    Ok(Self {
                        $($field: *library.get(concat!($symbol, "\0").as_bytes())?,)*
                        stands_in: library.get::<*const c_int>(b"kvferry_stand_in\0").is_ok(),
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
    stream_query = "cuStreamQuery": fn(Handle);
    stream_wait = "cuStreamWaitEvent": fn(Handle, Handle, c_uint);
    event_create = "cuEventCreate": fn(*mut Handle, c_uint);
    event_destroy = "cuEventDestroy_v2": fn(Handle);
    event_record = "cuEventRecord": fn(Handle, Handle);
    event_query = "cuEventQuery": fn(Handle);
    event_elapsed = "cuEventElapsedTime": fn(*mut f32, Handle, Handle);
    module_load = "cuModuleLoadData": fn(*mut Handle, *const c_void);
    module_unload = "cuModuleUnload": fn(Handle);
    module_function = "cuModuleGetFunction": fn(*mut Handle, Handle, *const c_char);
    function_set = "cuFuncSetAttribute": fn(Handle, c_int, c_int);
    launch = "cuLaunchKernelEx":
        fn(*const LaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void);
    memory_info = "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
    allocate = "cuMemAlloc_v2": fn(*mut u64, usize);
    free = "cuMemFree_v2": fn(u64);
    host_allocate = "cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost": fn(*mut c_void);
    upload_async = "cuMemcpyHtoDAsync_v2": fn(u64, *const c_void, usize, Handle);
    download_async = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, u64, usize, Handle);
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
pub(crate) struct Driver(pub(super) Functions);

impl Driver {
    /// The driver of this machine, loaded once.
    pub(crate) fn get() -> Result<&'static Self, Error> {
        static DRIVER: OnceLock<Result<Driver, Error>> = OnceLock::new();
        DRIVER.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, Error> {
        let missing = |error: libloading::Error| Error::NoDriver(reason(&error));
        let named = std::env::var_os(VARIABLE).unwrap_or_else(|| "libcuda.so.1".into());
        // SAFETY: loading CUDA's driver library runs its initialisers, as any CUDA program does.
        let library = unsafe { libloading::Library::new(named) }.map_err(missing)?;
        let driver = Self(Functions::load(library).map_err(missing)?);
        // SAFETY: takes a number.
        let code = unsafe { (driver.0.init)(0) };
        match driver.said("starting CUDA", code) {
            Ok(()) => Ok(driver),
            Err(error) => Err(Error::NoDriver(error.to_string())),
        }
    }

    /// What an answer means.
    pub(super) fn said(&self, what: &str, code: Code) -> Result<(), Error> {
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
pub(crate) fn reason(error: &libloading::Error) -> String {
    let cause = std::error::Error::source(error);
    cause.map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Driver")
    }
}
