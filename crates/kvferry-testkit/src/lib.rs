//! The judge of kvferry's core.
//!
//! A [`model`] is drawn at random, and two [`recipe`]s for [`engine`]s that run it, independently of each
//! other, and a [`request`] between them. The [`judge`] knows the address of every element because it walked
//! the memory of every rank, and compares what a plan does with what it should do, byte for byte.

#![deny(unsafe_code)]

mod build;
pub mod draw;
pub mod drive;
pub mod engine;
pub mod fuzz;
pub mod heap;
pub mod judge;
pub mod kinds;
pub mod large;
pub mod memory;
pub mod model;
pub mod mutate;
pub mod plain;
pub mod random;
pub mod recipe;
pub mod request;

use kvferry_layout::{BlockPair, ByteCopy, Loops};

/// A list of copies as loops, each with a nest of its own; those of no bytes are none.
pub fn one_by_one(copies: &[ByteCopy]) -> Loops {
    let mut loops = Loops::default();
    let table = loops.add_table([BlockPair::default()]);
    for copy in copies.iter().filter(|copy| copy.bytes > 0) {
        let start = (copy.source, copy.destination);
        let added = loops.add_nest(start, copy.bytes, (0, 0), &[], table);
        added.unwrap_or_else(|error| panic!("{copy:?}: {error}"));
    }
    loops
}
