//! From block tables to stretches of entries that lie evenly on both sides.

mod entries;
mod holding;
mod rest;
mod rhythm;
mod rounds;
mod segments;
mod slot;

pub(crate) use entries::Entries;
pub(crate) use holding::Holding;
pub(crate) use rest::{walk_own_blocks, walk_rest};
pub(crate) use rhythm::Rhythm;
pub(crate) use segments::{SegmentList, Segments, Shape};
