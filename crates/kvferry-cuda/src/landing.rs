//! What a launch leaves behind until its kernel has ended.

use super::driver::{OnCard, Pinned};
use super::program::Ends;
use kvferry_transport::Error;

/// A launch, as those see it who start it.
pub(super) trait Landing: Send + Sync {
    /// Where the kernel says that it has ended, and what it counts in until then.
    fn ends(&self) -> Ends;
    /// Whether it has said so. Costs next to nothing.
    fn landed(&self) -> bool;
    /// Keeps memory until the kernel has ended.
    fn keep(&self, kept: (Pinned, OnCard));
    /// The card refused it, and runs nothing of it.
    fn refused(&self, error: Error);
}
