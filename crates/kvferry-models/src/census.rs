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

    /// Where the census contradicts itself, or misses what it is for.
    fn problems(census: &Census) -> Vec<String> {
        let mut found = vec![];
        for (table, rows) in census.tables() {
            let mut names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
            names.sort_unstable();
            names.dedup();
            if names.len() != rows.len() || rows.is_empty() {
                found.push(format!("{table}: no rows, or one twice"));
            }
            found.extend(rows.iter().filter_map(|row| {
                row_problem(row).map(|problem| format!("{table} {}: {problem}", row.name))
            }));
        }
        let by_name = |rows: &[Row]| -> BTreeMap<String, Row> {
            rows.iter().map(|row| (row.name.clone(), row.clone())).collect()
        };
        let (specs, states) = (by_name(&census.specs), by_name(&census.states));
        for row in &census.architectures {
            let parts: Option<Vec<&Row>> = row
                .specs
                .iter()
                .map(|name| specs.get(name))
                .chain(row.states.iter().map(|name| states.get(name)))
                .collect();
            let problem = match parts {
                None => Some("it has a cache that is not in the census"),
                Some(parts) => architecture_problem(row, &parts),
            };
            found.extend(problem.map(|problem| format!("architecture {}: {problem}", row.name)));
        }
        found
    }

    fn row_problem(row: &Row) -> Option<&'static str> {
        let kept = row.kvferry != Verdict::NotACache;
        let known = ["serves", "serves some", "refuses", "as its language model"];
        // Whoever doubts it can look it up; what is said of an architecture follows from its layers.
        let line = row.nixl_source.split_once(".py:").map(|(_, line)| line.parse::<u32>());
        if row.kvferry != Verdict::Described && row.why.is_empty() {
            return Some("it is not said why it is not described");
        }
        if kept != known.contains(&row.nixl.as_str()) {
            return Some("it is not said what the engine's own connector does with it");
        }
        if matches!(line, Some(Ok(_))) != (kept && row.kind.is_empty()) {
            return Some("it is not said where that is to be seen");
        }
        // What the census is for.
        let refused = row.kvferry == Verdict::Refused;
        (refused && row.nixl != "refuses").then_some("the engine's own connector serves it")
    }

    /// An architecture is refused where one of its caches or states is, and its row says which; the
    /// engine's own connector serves no more of it than of the least of them.
    fn architecture_problem(row: &Row, parts: &[&Row]) -> Option<&'static str> {
        let refused = parts.iter().find(|part| part.kvferry == Verdict::Refused);
        let expected = match (refused, row.nixl.as_str()) {
            (Some(_), _) => Verdict::Refused,
            (None, "") => Verdict::NotACache,
            (None, _) => Verdict::Described,
        };
        if row.kvferry != expected {
            return Some("its caches say otherwise");
        }
        if refused.is_some_and(|part| row.why != format!("{}: {}", part.name, part.why)) {
            return Some("it is not said which of its caches is refused");
        }
        let keeps_none = ["", "as its language model"].contains(&row.nixl.as_str());
        if parts.is_empty() != keeps_none || row.layers.is_empty() != keeps_none {
            return Some("its layers are missing");
        }
        let least = ["refuses", "serves some", "serves"]
            .into_iter()
            .find(|word| parts.iter().any(|part| part.nixl == *word));
        // Some back ends are refused whatever their caches are.
        let fits = least.is_none_or(|least| row.nixl == least || row.nixl == "refuses");
        (!fits).then_some("more of it is served than of its caches")
    }

    #[test]
    fn the_census_agrees_with_itself() {
        assert_eq!(problems(Census::vllm()), Vec::<String>::new());
    }

    /// What would be wrong if a row were changed by hand.
    #[test]
    fn a_row_that_is_changed_is_found() {
        type Change = fn(&mut Census);
        fn row<'a>(rows: &'a mut [Row], name: &str) -> &'a mut Row {
            rows.iter_mut().find(|row| row.name == name).unwrap()
        }
        let changes: [(&str, Change); 14] = [
            ("FullAttentionSpec: it is not said why", |it| {
                let row = row(&mut it.specs, "FullAttentionSpec");
                (row.kvferry, row.why) = (Verdict::Refused, String::new());
            }),
            ("LlamaForCausalLM: its caches say", |it| {
                row(&mut it.specs, "FullAttentionSpec").kvferry = Verdict::Refused;
            }),
            ("WhisperForConditionalGeneration: its caches say", |it| {
                row(&mut it.specs, "CrossAttentionSpec").kvferry = Verdict::Described;
            }),
            ("WhisperForConditionalGeneration: it is not said which", |it| {
                row(&mut it.architectures, "WhisperForConditionalGeneration").why = "so".to_owned();
            }),
            ("MambaSpec: it is not said what", |it| {
                row(&mut it.specs, "MambaSpec").nixl.clear();
            }),
            ("FLASHINFER: it is not said what", |it| {
                row(&mut it.backends, "FLASHINFER").nixl = "serve".to_owned();
            }),
            ("NVFP4: it is not said what", |it| {
                row(&mut it.quantisation, "NVFP4").kvferry = Verdict::NotACache;
            }),
            ("GDN_ATTN: it is not said where", |it| {
                row(&mut it.states, "GDN_ATTN").nixl_source.clear();
            }),
            ("ROCM_ATTN: the engine's own connector serves it", |it| {
                row(&mut it.backends, "ROCM_ATTN").nixl = "serves".to_owned();
            }),
            ("attention back end: no rows, or one twice", |it| {
                let twice = it.backends[3].clone();
                it.backends.push(twice);
            }),
            ("quantisation mode: no rows", |it| it.quantisation.clear()),
            ("LlamaForCausalLM: its layers are missing", |it| {
                row(&mut it.architectures, "LlamaForCausalLM").specs.clear();
            }),
            ("Lfm2ForCausalLM: more of it is served", |it| {
                row(&mut it.architectures, "Lfm2ForCausalLM").nixl = "serves".to_owned();
            }),
            ("it has a cache that is not in the census", |it| {
                it.states.retain(|row| row.name != "MAMBA2");
            }),
        ];
        for (words, change) in changes {
            let mut census = Census::vllm().clone();
            change(&mut census);
            let found = problems(&census);
            assert!(found.iter().any(|problem| problem.contains(words)), "{words}: {found:?}");
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
        let [specs, states, quantisation, backends, architectures] =
            Census::vllm().tables().map(|(what, rows)| (what, rows.first().unwrap().name.as_str()));
        assert_eq!(specs, ("class of caches", "KVCacheSpec"));
        assert_eq!(states, ("type of states", "MAMBA1"));
        assert_eq!(quantisation, ("quantisation mode", "NONE"));
        assert_eq!(backends, ("attention back end", "AITER_TRITON_MLA"));
        assert_eq!(architectures.0, "architecture");
    }
}
