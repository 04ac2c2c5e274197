//! NIXL's C interface: the functions used here, declared by hand, and thin owners for its handles.
//!
//! Nothing here adds a policy. Each method is one call (or the few calls that belong together), so
//! that a loop over these types is a loop over the C interface.

mod agent;
mod library;
mod request;

pub use agent::{Agent, AgentError, AgentSettings, Span};
pub use library::{Code, Nixl};
pub use request::{Prepared, Request};
