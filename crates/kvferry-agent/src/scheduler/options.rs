//! How a scheduler is set up.

use std::net::SocketAddr;
use std::time::Duration;

use crate::error::Error;
use crate::wire::listener::advertised;
use crate::wire::places::Limits;
use crate::wire::reach::Network;
use crate::wire::trust::Trust;
use crate::wire::version::Version;

/// How a [`Scheduler`](crate::Scheduler) is set up.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SchedulerOptions {
    /// The engine's name, the same as in its manifests.
    pub engine: String,
    /// Where to listen. Port 0 means any free one.
    pub bind: SocketAddr,
    /// The host to give to peers, where it is not the address to listen on.
    pub advertise: Option<String>,
    /// How peers prove who they are.
    pub trust: Trust,
    /// Where the engines are that tickets may name; none of these for all that trust allows: without a key or TLS
    /// loopback, unless [`Trust::Insecure`]. Link-local addresses never are.
    pub peers: Vec<Network>,
    /// How long a lease lasts without an extension.
    pub term: Duration,
    /// How long a lease can last in all.
    pub longest: Duration,
    /// What a stranger can take of this process.
    pub limits: Limits,
    /// A quiet connection to another engine is tried this often.
    pub keepalive: Duration,
    /// The protocol to speak.
    pub version: Version,
}

impl SchedulerOptions {
    /// An engine that listens on a free port of the loopback address.
    pub fn new(engine: impl Into<String>) -> Self {
        Self {
            engine: engine.into(),
            bind: ([127, 0, 0, 1], 0).into(),
            advertise: None,
            trust: Trust::Loopback,
            peers: vec![],
            term: Duration::from_secs(30),
            longest: Duration::from_secs(1800),
            limits: Limits::default(),
            keepalive: Duration::from_secs(5),
            version: Version::CURRENT,
        }
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        self.trust.check_bind(self.bind)?;
        if self.term < Duration::from_millis(20) {
            return Err(Error::Options(format!(
                "a lease of {:?} is too short to be extended in time: take at least 20 ms",
                self.term
            )));
        }
        Ok(())
    }

    /// The address to give to peers, once `bound` is known.
    pub(super) fn address(&self, bound: SocketAddr) -> Result<String, Error> {
        advertised(self.advertise.as_deref(), bound)
    }
}
