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
