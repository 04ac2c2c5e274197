//! An allocator that counts, for tests that bound memory.
//!
//! ```
//! use kvferry_testkit::heap::{Counting, measure};
//!
//! #[global_allocator]
//! static HEAP: Counting = Counting;
//!
//! let (numbers, heap) = measure(|| vec![0u64; 100]);
//! assert_eq!((heap.calls, heap.peak, heap.kept), (1, 800, 800));
//! # drop(numbers);
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, counting for each thread.
#[derive(Debug)]
pub struct Counting;

/// What a piece of work did to the heap, in bytes and calls of its own thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heap {
    /// Allocations and reallocations.
    pub calls: u64,
    /// The most that was held at once, beyond what was held before.
    pub peak: i64,
    /// What is still held.
    pub kept: i64,
}

thread_local! {
    static HEAP: Cell<Heap> = const { Cell::new(Heap { calls: 0, peak: 0, kept: 0 }) };
}

/// Runs `work` and says what it did to the heap. Zero where [`Counting`] is not the allocator.
pub fn measure<T>(work: impl FnOnce() -> T) -> (T, Heap) {
    let before = HEAP.replace(Heap::default());
    let result = work();
    let heap = HEAP.replace(before);
    (result, heap)
}

fn count(calls: u64, bytes: i64) {
    // The thread's last deallocations come after its counters are gone: nobody reads those.
    let _ = HEAP.try_with(|heap| {
        let mut counted = heap.get();
        counted.calls += calls;
        counted.kept += bytes;
        counted.peak = counted.peak.max(counted.kept);
        heap.set(counted);
    });
}

// SAFETY: every call is passed on to the system's allocator unchanged; counting neither allocates nor
// panics.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(1, layout.size() as i64);
        // SAFETY: the caller keeps to the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(1, layout.size() as i64);
        // SAFETY: the caller keeps to the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(1, bytes as i64 - layout.size() as i64);
        // SAFETY: the caller keeps to the contract of `realloc`.
        unsafe { System.realloc(place, layout, bytes) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count(0, -(layout.size() as i64));
        // SAFETY: the caller keeps to the contract of `dealloc`.
        unsafe { System.dealloc(place, layout) }
    }
}
