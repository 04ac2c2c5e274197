//! What passes between two agents, and how.
//!
//! * [`version`]: which protocol is spoken. [`message`]: what is said in it. [`ticket`]: what names a request in
//!   it. [`news`]: how far a lease has come. [`task`]: what the ranks of an engine are asked to do.
//! * [`trust`]: how a peer proves who it is. [`seal`]: P's word for what reaches D through routers and clients.
//!   [`owner`]: whose the other end of a connection on this host is.
//! * [`channel`]: messages over one connection, authenticated and encrypted. [`overheard`]: what somebody says
//!   who does not speak TLS.
//! * [`reach`]: which addresses are connected to. [`link`]: connections to other engines, as the side that asks.
//! * [`listener`]: connections from other engines, as the side that answers. [`places`]: how many of them there may be.

pub(crate) mod channel;
pub(crate) mod link;
pub(crate) mod listener;
pub(crate) mod lookup;
pub(crate) mod message;
pub(crate) mod news;
mod overheard;
mod owner;
pub(crate) mod places;
pub(crate) mod reach;
pub(crate) mod seal;
pub(crate) mod task;
pub(crate) mod ticket;
pub(crate) mod trust;
pub(crate) mod version;
