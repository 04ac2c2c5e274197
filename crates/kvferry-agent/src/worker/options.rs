//! How a worker is set up.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use kvferry_plan::lowering::Choice;

use crate::rules::audit::Audit;
use crate::wire::reach::Network;
use crate::wire::trust::Trust;
use crate::wire::version::Version;

/// How a [`Worker`](crate::Worker) is set up.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WorkerOptions {
    /// How many ranks the engine has: a request is done when each of them has read it.
    pub ranks: u32,
    /// Where to listen for tasks from the engine's own scheduler. Port 0 means any free one.
    pub bind: SocketAddr,
    /// Of which ports that is one.
    pub ports: Option<RangeInclusive<u16>>,
    /// The host to give to the scheduler, where it is not the address to listen on.
    pub advertise: Option<String>,
    /// How peers prove who they are.
    pub trust: Trust,
    /// Where the engines are that tickets may name, and the memory of their ranks, as in
    /// [`SchedulerOptions::peers`](crate::SchedulerOptions::peers). What NIXL makes of its metadata is not known.
    pub peers: Vec<Network>,
    /// How long a handshake with a new engine may take, tries and pauses included.
    pub handshake: Duration,
    /// How many requests read at once; the others wait in the queue.
    pub concurrent: usize,
    /// While a source computes, reads ahead whatever takes at least so long. What takes less waits for more:
    /// it hides nothing, and costs both sides a read.
    pub least_ahead: Duration,
    /// How many of the requests are audited: compared with what the source holds before they are used.
    pub audit: Audit,
    /// A quiet connection to another engine is tried this often.
    pub keepalive: Duration,
    /// How sources are read: by what is cheapest, or always in one way.
    pub lowering: Choice,
    /// The protocol to speak.
    pub version: Version,
}

/// What a load needs to know of that.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) handshake: Duration,
    pub(super) least_ahead: Duration,
}

impl WorkerOptions {
    pub(super) fn times(&self) -> Times {
        Times { handshake: self.handshake, least_ahead: self.least_ahead }
    }

    /// For an engine of so many ranks.
    pub fn new(ranks: u32) -> Self {
        Self {
            ranks,
            bind: ([127, 0, 0, 1], 0).into(),
            ports: None,
            advertise: None,
            trust: Trust::Loopback,
            peers: vec![],
            handshake: Duration::from_secs(10),
            concurrent: 64,
            least_ahead: Duration::from_millis(2),
            audit: Audit::SAMPLED,
            keepalive: Duration::from_secs(5),
            lowering: Choice::Auto,
            version: Version::CURRENT,
        }
    }
}
