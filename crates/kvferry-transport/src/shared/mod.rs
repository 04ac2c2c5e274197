//! What the back ends are built from.

pub(crate) mod bytes;
pub(crate) mod chunks;
mod counters;
pub(crate) mod custody;
mod deadlines;
pub(crate) mod desk;
pub(crate) mod look;
mod merge;
pub(crate) mod random;
pub(crate) mod rate;
pub(crate) mod region;
pub(crate) mod spans;
pub(crate) mod staging;
pub(crate) mod thread;
pub(crate) mod walk;
pub(crate) mod yard;

pub use custody::Transfer;
pub use walk::carry_out;
