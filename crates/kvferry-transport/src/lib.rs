//! Moves lists of copies between the registered memory of two processes.
//!
//! [`Transport`] says what every back end promises. There are four:
//!
//! * [`local`]: two processes on one host; reads and writes the peer's memory directly.
//! * [`tcp`]: anything with a network; nothing to install.
//! * [`cuda`]: two processes on one host with memory on GPUs; one kernel carries out a request.
//! * [`nixl`]: NVIDIA's transfer library, loaded at run time, for RDMA, NVLink and GPU memory.
//!
//! A transport knows addresses and bytes, and nothing of models.

mod bytes;
mod counters;
pub mod cuda;
mod error;
mod keeper;
pub mod local;
mod merge;
pub mod nixl;
mod progress;
mod random;
mod rate;
mod region;
pub mod tcp;
mod transport;

pub use error::{Error, InvalidFrame, Side};
pub use kvferry_layout::{ByteCopy, Loops, Place, Price, Region};
pub use progress::Transfer;
pub use region::RegionId;
pub use transport::{
    Instance, MAX_NOTIFICATION_BYTES, Notification, Operation, Report, Statistics, Status,
    Transport,
};
