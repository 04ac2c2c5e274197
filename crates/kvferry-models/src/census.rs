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
    use std::collections::BTreeMap;

    use super::*;

    /// The verdicts of a table, by name: no name is there twice.
    fn verdicts(rows: &[Row]) -> BTreeMap<&str, &Row> {
        let named: BTreeMap<&str, &Row> = rows.iter().map(|row| (row.name.as_str(), row)).collect();
        assert_eq!(named.len(), rows.len(), "a name is there twice");
        named
    }

    #[test]
    fn every_row_says_why_it_is_refused_and_what_the_engine_does() {
        let census = Census::vllm();
        for (table, rows) in census.tables() {
            assert!(!rows.is_empty(), "{table}");
            for row in verdicts(rows).values() {
                let at = format!("{table} {}", row.name);
                assert!(row.kvferry == Verdict::Described || !row.why.is_empty(), "{at}");
                let known = ["serves", "serves some", "refuses", "as its language model"];
                assert_eq!(row.kvferry != Verdict::NotACache, known.contains(&row.nixl.as_str()));
                // Whoever doubts it can look it up; what is said of an architecture follows from its layers.
                let shown = row
                    .nixl_source
                    .split_once(".py:")
                    .is_some_and(|(_, line)| line.parse::<u32>().is_ok());
                let own = row.kind.is_empty() && row.kvferry != Verdict::NotACache;
                assert_eq!(shown, own, "{at}");
            }
        }
    }

    /// What the census is for.
    #[test]
    fn whatever_the_engines_own_connector_serves_is_described() {
        for (table, rows) in Census::vllm().tables() {
            for row in rows.iter().filter(|row| row.kvferry == Verdict::Refused) {
                assert_eq!(row.nixl, "refuses", "{table} {}", row.name);
            }
        }
    }

    /// An architecture is refused where one of its caches or states is, and its row says which; the
    /// engine's connector serves no more of it than of the least of them.
    #[test]
    fn what_is_said_of_an_architecture_follows_from_its_layers() {
        let census = Census::vllm();
        let (specs, states) = (verdicts(&census.specs), verdicts(&census.states));
        for row in &census.architectures {
            let parts: Vec<&Row> = row
                .specs
                .iter()
                .map(|name| specs[name.as_str()])
                .chain(row.states.iter().map(|name| states[name.as_str()]))
                .collect();
            let refused = parts.iter().find(|part| part.kvferry == Verdict::Refused);
            let expected = match (refused, row.nixl.as_str()) {
                (Some(_), _) => Verdict::Refused,
                (None, "") => Verdict::NotACache,
                (None, _) => Verdict::Described,
            };
            assert_eq!(row.kvferry, expected, "{}", row.name);
            if let Some(part) = refused {
                assert_eq!(row.why, format!("{}: {}", part.name, part.why), "{}", row.name);
            }
            let keeps = ["", "as its language model"].contains(&row.nixl.as_str());
            assert_eq!(parts.is_empty(), keeps, "{}", row.name);
            assert_eq!(row.layers.is_empty(), keeps, "{}", row.name);
            for least in ["refuses", "serves some"] {
                if parts.iter().any(|part| part.nixl == least) {
                    assert_eq!(row.nixl, least, "{}", row.name);
                    break;
                }
            }
        }
    }

    #[test]
    fn rows_are_read_strictly_and_words_are_those_of_the_file() {
        for verdict in [Verdict::Described, Verdict::Refused, Verdict::NotACache] {
            let read: Verdict = serde_json::from_value(verdict.word().into()).unwrap();
            assert_eq!(read, verdict);
        }
        let row = r#"{"name": "it", "kvferry": "described", "why": "", "more": 1}"#;
        assert!(serde_json::from_str::<Row>(row).unwrap_err().to_string().contains("`more`"));
        assert_eq!(serde_json::to_value(Census::vllm()).unwrap()["vllm"], Census::vllm().vllm);
        let [specs, states, quantisation, backends, architectures] =
            Census::vllm().tables().map(|(what, rows)| (what, rows.first().unwrap().name.as_str()));
        assert_eq!(specs, ("class of caches", "KVCacheSpec"));
        assert_eq!(states, ("type of states", "MAMBA1"));
        assert_eq!(quantisation, ("quantisation mode", "NONE"));
        assert_eq!(backends, ("attention back end", "AITER_TRITON_MLA"));
        assert_eq!(architectures.0, "architecture");
    }
}
