//! What names a request that is handed over: the life of an engine, and the ticket.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::rules::lease::LeaseKey;

/// Names one life of an engine. It changes when the engine restarts, and when its ranks publish new
/// memory: whatever was said about an earlier life is void.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(#[serde(with = "hex")] pub u64);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// What P hands to the router, and the router to D: where a request's blocks are, and under which
/// lease.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ticket {
    /// The engine that holds the blocks.
    pub engine: String,
    /// Where it listens: `host:port`.
    pub address: String,
    /// Its life that granted the lease.
    pub incarnation: Incarnation,
    /// The request.
    pub request: String,
    /// Which lease of the request.
    #[serde(with = "hex")]
    pub nonce: u64,
    /// How long the lease lasts without an extension.
    pub term_ms: u64,
}

impl Ticket {
    pub(crate) fn key(&self) -> LeaseKey {
        LeaseKey { request: self.request.clone(), nonce: self.nonce }
    }

    pub(crate) fn term(&self) -> Duration {
        // Whatever a ticket says, neither a storm of heartbeats nor none at all.
        Duration::from_millis(self.term_ms.clamp(20, 3_600_000))
    }
}

/// Numbers as text in JSON, where large ones lose digits.
mod hex {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(n: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(&format_args!("{n:016x}"))
        } else {
            n.serialize(serializer)
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        if deserializer.is_human_readable() {
            let text = String::deserialize(deserializer)?;
            u64::from_str_radix(&text, 16).map_err(serde::de::Error::custom)
        } else {
            u64::deserialize(deserializer)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incarnation_survives_json() {
        let incarnation = Incarnation(u64::MAX - 1);
        let json = serde_json::to_string(&incarnation).unwrap();
        assert_eq!(json, "\"fffffffffffffffe\"");
        assert_eq!(serde_json::from_str::<Incarnation>(&json).unwrap(), incarnation);
    }
}
