//! The rules of the game: state machines without clock, thread or socket, which are checked
//! exhaustively and driven by everything else.
//!
//! * [`lease`]: what P promises, and to whom.
//! * [`life`]: what D does with one request on one rank.
//! * [`grant`]: what may be read, and the fingerprint that stands for it.
//! * [`follow`]: what D has heard and read of a request that P still computes.
//! * [`audit`]: which requests are compared with what the source holds, and what follows.
//! * [`failure`]: why a request can fail.

pub(crate) mod audit;
pub(crate) mod failure;
pub mod follow;
pub(crate) mod grant;
pub mod lease;
pub mod life;
