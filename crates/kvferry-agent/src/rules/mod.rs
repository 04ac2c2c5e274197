//! The rules of the game: state machines without clock, thread or socket, which are checked
//! exhaustively and driven by everything else.
//!
//! * [`lease`]: what P promises, and to whom.
//! * [`life`]: what D does with one request on one rank.
//! * [`failure`]: why a request can fail.

pub(crate) mod failure;
pub mod lease;
pub mod life;
