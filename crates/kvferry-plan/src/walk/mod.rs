//! From block tables to stretches of entries that lie evenly on both sides.

mod block_layout;
mod entries;
mod pairing;
mod rest;
mod segments;
mod slot;

pub(crate) use block_layout::BlockLayout;
pub(crate) use entries::Entries;
pub(crate) use pairing::Pairing;
pub(crate) use rest::{walk_own_blocks, walk_rest};
pub(crate) use segments::{Segments, Shape};
