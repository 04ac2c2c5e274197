//! Work on a card: streams, events, kernels.

use std::ffi::{CString, c_int, c_uint, c_void};
use std::ptr;
use std::time::{Duration, Instant};

use super::card::Card;
use super::load::{Handle, LaunchAttribute, LaunchConfig};
use kvferry_transport::Error;

/// CUDA is not asked for longer than this whether a stream has ended, if it does not answer.
const UNANSWERED: Duration = Duration::from_secs(60);
const NON_BLOCKING: c_uint = 1;
const NO_TIMING: c_uint = 2;
const MAX_DYNAMIC_SHARED: c_int = 8;
const PROGRAMMATIC_SERIALIZATION: c_int = 6;

impl Card {
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

    /// # Safety
    ///
    /// `to` must be pinned memory that nobody else uses, and `from` allocated memory, until the stream has passed this.
    pub(crate) unsafe fn download(
        &self,
        to: *mut u8,
        from: u64,
        bytes: usize,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe {
            call!(self.card, "downloading", download_async(to.cast(), from, bytes, self.stream))
        }
    }

    /// Marks this point of the stream.
    pub fn record(&self, event: &Event) -> Result<(), Error> {
        // SAFETY: both are live.
        unsafe { call!(self.card, "recording an event", event_record(event.event, self.stream)) }
    }

    /// What comes after this in the stream waits for what was marked last.
    pub(crate) fn wait_for(&self, event: &Event) -> Result<(), Error> {
        // SAFETY: both are live.
        unsafe {
            call!(self.card, "waiting for an event", stream_wait(self.stream, event.event, 0))
        }
    }

    /// Whether all of it has ended. After an error nothing of it runs any more, either.
    pub(crate) fn has_ended(&self) -> Result<bool, Error> {
        // SAFETY: it is live.
        self.card.has_ended(|driver| unsafe { (driver.0.stream_query)(self.stream) })
    }

    /// Waits until all of it has ended. After an error nothing of it runs any more, either, unless CUDA has not
    /// said for a minute whether it does.
    pub fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: it is live.
        let wait =
            || self.card.has_ended(|driver| unsafe { (driver.0.stream_synchronize)(self.stream) });
        let asked = Instant::now();
        while !wait()? {
            if asked.elapsed() > UNANSWERED {
                return self.card.unclear();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
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
        let grid = Grid { ctas, threads, shared, overlaps: false };
        // SAFETY: the caller's promise.
        unsafe { self.launch_grid(kernel, grid, arguments) }
    }

    /// The same for any grid.
    ///
    /// # Safety
    ///
    /// As for [`launch`](Self::launch); and where it overlaps the kernel before it in the stream, the two
    /// must have nothing to do with each other.
    pub(crate) unsafe fn launch_grid(
        &self,
        kernel: &Kernel,
        grid: Grid,
        arguments: &mut [*mut c_void],
    ) -> Result<(), Error> {
        let mut value = [0; 16];
        value[0] = 1;
        let overlap = LaunchAttribute { id: PROGRAMMATIC_SERIALIZATION, unused: 0, value };
        let config = LaunchConfig {
            grid: [grid.ctas, 1, 1],
            block: [grid.threads, 1, 1],
            shared: grid.shared,
            stream: self.stream,
            attributes: &raw const overlap,
            attribute_count: u32::from(grid.overlaps),
        };
        let (config, values) = (&raw const config, arguments.as_mut_ptr());
        // SAFETY: the caller's promise; the handles and what is pointed to are live.
        unsafe {
            call!(
                self.card,
                "starting a kernel",
                launch(config, kernel.function, values, ptr::null_mut())
            )
        }
    }
}

/// How a kernel is spread over the card.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) ctas: u32,
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory for each CTA.
    pub(crate) shared: u32,
    /// Whether it may begin as soon as the kernel before it says so, which need not have ended.
    pub(crate) overlaps: bool,
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
    /// Whether the stream has passed it. After an error nothing of the stream runs any more, either.
    pub fn passed(&self) -> Result<bool, Error> {
        // SAFETY: it is live.
        self.card.has_ended(|driver| unsafe { (driver.0.event_query)(self.event) })
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
