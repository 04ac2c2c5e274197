//! What the ranks of a source do for those who read from them, beside being read: tasks.
//!
//! ```text
//!   D's worker ──Ask──▶ P's scheduler ──Do, with what was granted──▶ P's worker
//! ```
//!
//! The scheduler answers for the lease, the trust and the deadline, and passes the task on
//! ([`relay`]). The worker ([`service`]) takes tasks from its own scheduler alone, by a token that
//! travels with its card and that no peer gets to see. So a rank is never told by a reader which blocks
//! to look at, and a reader needs no way to it.
//!
//! One task is answered from what the engine tells the worker while it computes: what it has written of the
//! present step ([`steps`]).
//!
//! What ranks can be asked to do is in [`task`](crate::wire::task). A new task is a variant there, an arm
//! in `service`, and nothing else on the way.

pub(crate) mod relay;
pub(crate) mod service;
pub(crate) mod steps;

#[cfg(test)]
mod tests;
