//! What callers see, and what every back end keeps to.

mod error;
mod status;
mod transport;

pub use error::{Error, InvalidFrame, Side};
pub use status::{Instance, RegionId, Report, StagingStatistics, Statistics, Status};
pub use transport::{Operation, Transport};
