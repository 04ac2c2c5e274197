//! How much a port lets others take.

use std::time::Duration;

use crate::strangers::at_most;

/// How many may come, and how long each may take.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Connections that have proven nothing yet.
    pub strangers: usize,
    /// Connections that are served.
    pub connections: usize,
    /// How long a new connection may take to prove that it may be here.
    pub greeting: Duration,
    /// How long a peer may take nothing of what it has asked for.
    pub sending: Duration,
}

impl Bounds {
    /// At 5,000 new ones a second, each of 2,048 strangers stays for 0.4 s, and so outlives the two round trips of a
    /// greeting where they take 100 ms each. Of a process's files, a port takes three eighths at the most.
    pub fn of_this_process() -> Self {
        Self {
            strangers: at_most(2048, 8),
            connections: at_most(4096, 4),
            greeting: Duration::from_secs(5),
            sending: Duration::from_secs(30),
        }
    }
}
