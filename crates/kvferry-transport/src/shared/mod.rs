//! What the back ends are built from.

pub mod admission;
pub mod bytes;
pub mod chunks;
mod counters;
pub mod custody;
mod deadlines;
pub mod digests;
pub mod io;
mod merge;
pub mod packing_area;
pub mod python;
pub mod random;
pub mod rate;
pub mod region;
pub mod spans;
pub mod staging;
pub mod thread;
pub mod walk;

pub use custody::Transfer;
pub use walk::carry_out;
