//! What the two ends of a link test say to each other, and what comes out of it.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

/// Of these messages. Two ends with other versions do not test each other.
pub(super) const VERSION: u32 = 1;
/// The longest of them.
pub(super) const LONGEST: usize = 1 << 20;
/// How long the runs are that are read.
pub(super) const RUNS: [u64; 3] = [2 << 10, 64 << 10, 16 << 20];
/// How many plain sockets are measured at once.
pub(super) const SOCKETS: [u32; 2] = [1, 4];

/// All that ends of other versions know of each other. It comes first in what a [`Side`] says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Version {
    pub(super) version: u32,
    pub(super) release: String,
    /// Why there is nothing else that it says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) unable: Option<String>,
}

/// What one end has.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Side {
    #[serde(flatten)]
    pub(super) version: Version,
    /// How long the tester wants to measure, in all.
    pub(super) seconds: u64,
    /// Where the other end's connection came from.
    pub(super) sees: IpAddr,
    pub(super) host: Host,
    /// What the memory holds follows from it.
    pub(super) seed: u64,
    /// Where the memory is.
    pub(super) base: u64,
    pub(super) sockets: SocketAddr,
    /// Who connects there has to say it first.
    pub(super) token: [u8; 16],
    pub(super) transports: Vec<Offer>,
}

/// A transport, and what opens it or why it cannot be had.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Offer {
    pub(super) name: String,
    pub(super) description: Result<Vec<u8>, String>,
}

/// One end of the link.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Host {
    /// Where the other end reads from it.
    pub(super) address: IpAddr,
    /// Whose memory is read from and into.
    pub(super) memory: String,
    /// Where that address is; none where it is another's that leads here.
    pub(super) interface: Option<Interface>,
    /// The fastest that the host has besides.
    pub(super) fastest_other: Option<Interface>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Interface {
    pub(super) name: String,
    pub(super) megabits: Option<u64>,
    pub(super) mtu: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum End {
    Tester,
    Listener,
}

/// What is measured at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Step {
    /// Who reads.
    pub(super) reader: End,
    #[serde(flatten)]
    pub(super) what: What,
    /// For how long.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub(super) milliseconds: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub(super) enum What {
    Sockets { connections: u32 },
    Read { transport: String, run: u64 },
    RoundTrips { transport: String },
}

impl What {
    pub(super) fn transport(&self) -> Option<&str> {
        match self {
            Self::Sockets { .. } => None,
            Self::Read { transport, .. } | Self::RoundTrips { transport } => Some(transport),
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sockets { connections: 1 } => f.write_str("one plain socket"),
            Self::Sockets { connections } => write!(f, "{connections} plain sockets"),
            Self::Read { transport, run } => {
                write!(f, "{transport}, runs of {}", crate::text::bytes(*run).replace(".0", ""))
            }
            Self::RoundTrips { transport } => write!(f, "{transport}, small requests"),
        }
    }
}

/// What a step has shown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Measured {
    #[serde(flatten)]
    pub(super) step: Step,
    pub(super) came: Came,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Came {
    /// Bytes in so many seconds of reading.
    Bytes { bytes: u64, seconds: f64, gb_per_s: f64, packed: bool },
    /// One small read after the other.
    Trips { count: u64, median_us: f64, worst_us: f64 },
    /// It was not tried, or not to the end.
    LeftOut(String),
    /// Nobody can be connected to at this address.
    Unreachable { address: Option<SocketAddr>, why: String },
    /// It broke off.
    Failed(String),
    /// Other bytes came than were sent.
    Corrupt { at: u64, sent: u8, came: u8, wrong: u64, of: u64 },
}

/// What the kernel counted where bytes were sent over plain sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Sent {
    pub(super) segments: u64,
    pub(super) retransmitted: u64,
}

/// As the kernel sees the way of the first connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Path {
    pub(super) mtu: u32,
    /// Bytes that one packet carries (TCP_MAXSEG).
    pub(super) segment: u32,
    pub(super) round_trip_us: u32,
}

/// What the tester asks for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    Measure(Step),
    Sent,
    End(Box<Report>),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Measured(Measured),
    Sent(Sent),
}

/// Something to know of the link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Finding {
    /// One word for it.
    pub(super) what: String,
    /// Whether engines should not be started like this.
    pub(super) wrong: bool,
    pub(super) says: String,
    /// What to do about it.
    pub(super) advice: String,
}

/// What the test has shown.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) works: bool,
    pub(super) tester: Host,
    pub(super) listener: Host,
    /// Where the listener sees the tester, and the tester the listener.
    pub(super) tester_seen_at: IpAddr,
    pub(super) listener_seen_at: IpAddr,
    pub(super) path: Path,
    pub(super) sent_by_tester: Sent,
    pub(super) sent_by_listener: Sent,
    pub(super) measured: Vec<Measured>,
    /// Transports that one of the ends does not have, and why.
    pub(super) left_out: Vec<String>,
    pub(super) findings: Vec<Finding>,
}

impl Report {
    pub(super) fn host(&self, end: End) -> &Host {
        match end {
            End::Tester => &self.tester,
            End::Listener => &self.listener,
        }
    }
}

impl End {
    pub(super) const BOTH: [Self; 2] = [Self::Tester, Self::Listener];

    pub(super) fn other(self) -> Self {
        match self {
            Self::Tester => Self::Listener,
            Self::Listener => Self::Tester,
        }
    }
}
