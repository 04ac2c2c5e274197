//! The census of an engine: everything in it that keeps a cache, what kvferry makes of it, and what the
//! engine's own connector does with it.
//!
//! It is data (`facts/census.json`), which `tools/census.sh` writes from the engine's source and the tables
//! of the adapter.

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

const TEXT: &str = include_str!("../facts/census.json");

static VLLM: LazyLock<Census> = LazyLock::new(|| {
    serde_json::from_str(TEXT).unwrap_or_else(|error| panic!("facts/census.json: {error}"))
});

/// Everything in one version of vLLM that keeps a cache.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Census {
    /// The version.
    pub vllm: String,
    /// Classes of cache specs.
    pub specs: Vec<Row>,
    /// Types of recurrent states.
    pub states: Vec<Row>,
    /// Quantisation modes.
    pub quantisation: Vec<Row>,
    /// Attention back ends, by the names that they give themselves.
    pub backends: Vec<Row>,
    /// Architectures of the model registry.
    pub architectures: Vec<Row>,
}

/// One thing that keeps a cache.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// What vLLM calls it.
    pub name: String,
    /// What kvferry makes of it.
    pub kvferry: Verdict,
    /// How it is described, or why it is refused.
    pub why: String,
    /// What vLLM's own connector does with it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub nixl: String,
    /// Why, or as far as what.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub nixl_why: String,
    /// The line of its source that shows it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub nixl_source: String,
    /// Of a back end: the classes that give themselves this name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<String>,
    /// Of an architecture: in which list of the registry it is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// Of an architecture: the layers that it can have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<String>,
    /// Of an architecture: the classes of its layers' caches.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub specs: Vec<String>,
    /// Of an architecture: the types of its recurrent states.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub states: Vec<String>,
}

/// What kvferry makes of something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum Verdict {
    /// It is known where every byte lies.
    #[serde(rename = "described")]
    Described,
    /// An engine with it is refused when it starts.
    #[serde(rename = "refused")]
    Refused,
    /// It keeps nothing of a prompt.
    #[serde(rename = "not a cache")]
    NotACache,
}

impl Census {
    /// That of vLLM.
    pub fn vllm() -> &'static Self {
        &VLLM
    }

    /// Its tables, each with what its rows are.
    pub fn tables(&self) -> [(&'static str, &[Row]); 5] {
        [
            ("class of caches", &self.specs),
            ("type of states", &self.states),
            ("quantisation mode", &self.quantisation),
            ("attention back end", &self.backends),
            ("architecture", &self.architectures),
        ]
    }
}

impl Verdict {
    /// A word for tables.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Described => "described",
            Self::Refused => "refused",
            Self::NotACache => "not a cache",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_says_why_it_is_refused_and_what_the_engine_does() {
        let census = Census::vllm();
        for (table, rows) in census.tables() {
            assert!(!rows.is_empty(), "{table}");
            for row in rows.iter().filter(|row| row.kvferry != Verdict::NotACache) {
                assert!(!row.nixl.is_empty(), "{table} {}", row.name);
                assert!(row.kvferry == Verdict::Described || !row.why.is_empty(), "{}", row.name);
            }
        }
    }
}
