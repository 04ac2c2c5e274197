//! As much of CUDA's driver interface as the back end needs, loaded at run time.
//!
//! Also what a benchmark needs to make memory on a card and to look at it: this is not a general
//! binding, and says nothing that CUDA's own documentation does not say better.
//!
//! `load` finds the driver, `card` is a card, `memory` its memory and that of other processes, `launch` the work on it.

/// The driver's functions, for a thread whose current context is a card's.
macro_rules! call {
    ($card:expr, $what:expr, $function:ident($($argument:expr),*)) => {{
        let driver = $card.enter()?;
        let code = (driver.0.$function)($($argument),*);
        driver.said($what, code)
    }};
}

mod card;
mod launch;
mod load;
mod memory;

pub use card::Card;
pub(crate) use launch::Grid;
pub use launch::{Event, Kernel, Module, Stream};
use load::Driver;
pub(crate) use load::IpcHandle;
pub(super) use load::reason;
pub use memory::Mapped;
pub(crate) use memory::{OnCard, Pinned};

/// The newest major version of CUDA that the driver knows. `None` without one.
pub fn major_version() -> Option<u32> {
    let mut version = 0;
    // SAFETY: the pointer is to a live value.
    let code = unsafe { (Driver::get().ok()?.0.driver_version)(&raw mut version) };
    (code == 0).then_some(version as u32 / 1000)
}

/// Whether a driver for tests is loaded, whose cards have memory of the host: other libraries must be told.
pub fn is_a_stand_in() -> bool {
    // CUDA is not started for the question.
    load::is_named() && Driver::get().is_ok_and(|driver| driver.0.stands_in)
}
