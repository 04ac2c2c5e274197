//! Compile what one destination rank must copy from the ranks of another engine, prove it, and yield
//! the copies of a request.
//!
//! [`Plan::compile`] intersects the destination's [`Manifest`](kvferry_layout::Manifest) with those of
//! the sources, once per pair of engines. It answers with a plan that is proven (every needed element
//! exactly once, from a rank that holds it), or with the reason why the pair does not fit
//! ([`Incompatible`]). [`Plan::transfer`] takes one request's block tables and checks them;
//! [`Transfer::copies`] yields the copies from each source rank, and [`Transfer::rest`] what is left of
//! the request's own blocks.
//!
//! Nothing here looks at what kind of layer a state belongs to, nor at the two sides' parallelism: a
//! plan is made of boxes, strides and block tables alone.

#![forbid(unsafe_code)]

mod compile;
mod cover;
mod incompatible;
mod nest;
mod prove;
mod request;
mod summary;
mod transfer;
mod walk;

pub use compile::Plan;
pub use cover::Part;
pub use incompatible::Incompatible;
pub use kvferry_layout::Copy;
pub use request::{Request, RequestError, Side, Table};
pub use summary::{Area, Summary};
pub use transfer::{Copies, Rest, Transfer};
