//! A card: its primary context, and what it says of itself.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use kvferry_transport::Error;

use super::load::{Code, Driver, Handle};

const NOT_READY: Code = 600;
const MULTIPROCESSORS: c_int = 16;
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;

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
    /// The last answer that did not say whether work has ended.
    unclear: AtomicI32,
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

impl Card {
    /// The card with this number.
    pub fn open(ordinal: u32) -> Result<Self, Error> {
        let driver = Driver::get()?;
        let (mut device, mut context) = (0, ptr::null_mut());
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: all pointers are to live values.
        unsafe {
            driver.said(
                &format!("looking for GPU {ordinal}"),
                (driver.0.device_get)(&raw mut device, number),
            )?;
            driver.said(
                &format!("entering GPU {ordinal}"),
                (driver.0.context_retain)(&raw mut context, device),
            )?;
        }
        Ok(Self(Arc::new(Held { driver, ordinal, device, context, unclear: AtomicI32::new(0) })))
    }

    pub(super) fn enter(&self) -> Result<&'static Driver, Error> {
        let driver = self.0.driver;
        // SAFETY: the context is held.
        driver.said("entering a GPU", unsafe { (driver.0.context_set)(self.0.context) })?;
        Ok(driver)
    }

    /// Asks whether work on the card has ended, where "no" is also the answer to a question that CUDA did not
    /// answer. After an error nothing of the context runs any more.
    pub(super) fn has_ended(&self, ask: impl Fn(&Driver) -> Code) -> Result<bool, Error> {
        let driver = self.0.driver;
        // SAFETY: the context is held.
        let code = match unsafe { (driver.0.context_set)(self.0.context) } {
            0 => ask(driver),
            code => code,
        };
        if code == NOT_READY {
            return Ok(false);
        }
        match driver.said("carrying out copies", code) {
            Ok(()) => Ok(true),
            Err(error) if ends_context(code) => Err(error),
            Err(error) => {
                if self.0.unclear.swap(code, Ordering::Relaxed) != code {
                    tracing::warn!("the GPU does not say whether copies have ended: {error}");
                }
                Ok(false)
            }
        }
    }

    /// The error that is left of questions which were not answered.
    pub(super) fn unclear(&self) -> Result<(), Error> {
        let code = self.0.unclear.load(Ordering::Relaxed);
        self.0.driver.said("asking whether copies have ended", code)
    }

    /// The driver's name for it.
    pub(super) fn device(&self) -> c_int {
        self.0.device
    }

    /// Its number.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
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

    /// Bytes of its memory that nobody has.
    pub fn free_memory(&self) -> Result<u64, Error> {
        let (mut free, mut all) = (0, 0);
        // SAFETY: the pointers are to live values.
        unsafe {
            call!(self, "asking for free memory", memory_info(&raw mut free, &raw mut all))?;
        }
        Ok(free as u64)
    }

    /// Waits until everything that was started on it has ended.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: takes nothing.
        unsafe { call!(self, "waiting for a GPU", context_synchronize()) }
    }
}

/// Whether an answer to a question after work means that nothing of the context runs any more, nor will again.
/// So CUDA's documentation says of these: the driver ends (4), the card failed (uncorrectable errors of its memory or
/// of NVLink: 214, 220; contained ones: 226), a kernel did (700, 702, 710, 714 to 719, 721), the context is no more
/// (709), the server of MPS has ended this process (810), or a device outside of CUDA failed (911). A context that is
/// not valid (201) or a handle that is not (400) was so when it was made and is held: somebody has reset the card.
///
/// Other codes tell of the question and not of the work. Those of stream capture (900 to 909), for one, are given
/// to whoever asks while another thread captures a graph, as engines do when they start.
fn ends_context(code: Code) -> bool {
    let failed = matches!(code, 214 | 220 | 226 | 700 | 702 | 710 | 714..=719 | 721 | 911);
    failed || matches!(code, 4 | 201 | 400 | 709 | 810)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_some_errors_mean_that_nothing_runs_any_more() {
        for code in [4, 214, 700, 709, 714, 715, 716, 717, 718, 719] {
            assert!(ends_context(code), "{code}");
        }
        // Invalid values, no memory, not ready, not permitted, captures, unknown.
        for code in [0, 1, 2, 3, 600, 701, 800, 801, 900, 901, 905, 907, 908, 909, 910, 999] {
            assert!(!ends_context(code), "{code}");
        }
    }
}
