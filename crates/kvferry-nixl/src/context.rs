//! Makes a GPU's context the current one of a thread.
//!
//! UCX asks CUDA about GPU memory from whichever thread posts a transfer, and CUDA answers a thread
//! by its current context. The driver thread has none by itself.

use std::ffi::{c_int, c_void};
use std::ptr;

type Result = c_int;

/// The primary context of one GPU, held.
pub(super) struct Context {
    library: libloading::Library,
    device: c_int,
}

impl Context {
    /// Holds the primary context of GPU `ordinal`, the one that PyTorch and the CUDA runtime use
    /// too, and makes it this thread's current one. `None` where there is no CUDA.
    pub(super) fn enter(ordinal: u32) -> Option<Self> {
        // SAFETY: loading CUDA's driver library runs its initialisers, as any CUDA program does.
        let library = unsafe { libloading::Library::new("libcuda.so.1") }.ok()?;
        let mut device = 0;
        let mut context: *mut c_void = ptr::null_mut();
        // SAFETY: the declarations are those of the CUDA driver interface; all pointers are to live
        // values.
        unsafe {
            let init = *library.get::<unsafe extern "C" fn(u32) -> Result>(b"cuInit\0").ok()?;
            let get = *library
                .get::<unsafe extern "C" fn(*mut c_int, c_int) -> Result>(b"cuDeviceGet\0")
                .ok()?;
            let retain = *library
                .get::<unsafe extern "C" fn(*mut *mut c_void, c_int) -> Result>(
                    b"cuDevicePrimaryCtxRetain\0",
                )
                .ok()?;
            let set = *library
                .get::<unsafe extern "C" fn(*mut c_void) -> Result>(b"cuCtxSetCurrent\0")
                .ok()?;
            let ordinal = c_int::try_from(ordinal).ok()?;
            if init(0) != 0
                || get(&raw mut device, ordinal) != 0
                || retain(&raw mut context, device) != 0
            {
                return None;
            }
            let held = Self { device, library };
            (set(context) == 0).then_some(held)
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: as in `enter`; the context was retained once for this value.
        unsafe {
            if let Ok(release) = self
                .library
                .get::<unsafe extern "C" fn(c_int) -> Result>(b"cuDevicePrimaryCtxRelease_v2\0")
            {
                release(self.device);
            }
        }
    }
}
