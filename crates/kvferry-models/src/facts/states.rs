//! Kinds of states and formats of numbers, by name.

use std::collections::BTreeMap;

use kvferry_layout::Format;
use serde::{Deserialize, Serialize};

use super::kind::StateKind;
use crate::config::Fields;
use crate::error::{ConfigError, FactsError};
use crate::model::{Cache, Limit, Place, Tensor};
use crate::suggest;

/// The kinds of states that are known, and the formats of their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct States {
    pub(super) formats: BTreeMap<String, FormatFacts>,
    pub(super) kinds: BTreeMap<String, StateKind>,
}

/// How large a number is, and what others call its format.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FormatFacts {
    bytes: u32,
    /// What configurations and engines call it.
    #[serde(default)]
    names: Vec<String>,
    /// Whether a model's own numbers may have it.
    #[serde(default)]
    models: bool,
}

impl States {
    /// A kind of states.
    pub fn kind(&self, name: &str) -> Result<&StateKind, FactsError> {
        self.kinds.get(name).ok_or_else(|| FactsError::UnknownKind {
            found: name.to_owned(),
            nearest: suggest::nearest(name, self.kinds.keys().map(String::as_str))
                .map(str::to_owned),
            known: self.kinds.keys().cloned().collect::<Vec<_>>().join(", "),
        })
    }

    /// The tensors of a kind, for its sizes and formats. States are named without a layer.
    pub fn tensors(
        &self,
        kind: &str,
        sizes: &[(&str, u64)],
        formats: &[(&str, &Format)],
    ) -> Result<Vec<Tensor>, FactsError> {
        self.kind(kind)?.tensors(kind, &self.formats(), sizes, formats)
    }

    /// The sizes of a kind in the whole model, as far as they follow from what one of `ranks` ranks
    /// holds: the shape of each tensor (of a convolution: all channels, live columns), and the sizes
    /// that are `told`. A size that does not follow is left out, as where ranks may hold the same unit.
    pub fn solve(
        &self,
        kind: &str,
        shapes: &[Vec<u64>],
        told: &BTreeMap<String, u64>,
        ranks: u64,
    ) -> Result<BTreeMap<String, u64>, FactsError> {
        self.kind(kind)?.solve(kind, shapes, told, ranks)
    }

    /// A format by its name here.
    pub fn format(&self, name: &str) -> Option<Format> {
        self.formats.get(name).map(|format| Format::new(name, format.bytes))
    }

    /// What a module of a layer keeps.
    pub(crate) fn cache(
        &self,
        kind: &str,
        at: Place,
        sizes: &[(&str, u64)],
        formats: &[(&str, &Format)],
        window: Option<u64>,
    ) -> Result<Cache, FactsError> {
        let tensors = self.tensors(kind, sizes, formats)?;
        Ok(at.cache(self.kind(kind)?.sort(kind, window), tensors))
    }

    /// What tensor parallelism has to divide.
    pub(crate) fn limits(
        &self,
        kind: &str,
        sizes: &[(&str, u64)],
    ) -> Result<Vec<Limit>, FactsError> {
        self.kind(kind)?.limits(kind, sizes)
    }

    /// The format of a model's numbers: what its configuration says, or else the format that engines
    /// fall back to.
    pub(crate) fn model_format(&self, fields: &Fields<'_>) -> Result<Format, ConfigError> {
        for field in ["dtype", "torch_dtype"] {
            if let Some(format) = self.format_in(fields, field)? {
                return Ok(format);
            }
        }
        Ok(Format::new("bf16", 2))
    }

    /// The format that a field of a configuration names.
    pub(crate) fn format_in(
        &self,
        fields: &Fields<'_>,
        field: &str,
    ) -> Result<Option<Format>, ConfigError> {
        let Some(text) = fields.text(field)? else { return Ok(None) };
        let name = text.strip_prefix("torch.").unwrap_or(text);
        let mut formats = self.formats.iter().filter(|(_, format)| format.models);
        let called = |format: &FormatFacts| format.names.iter().any(|known| known == name);
        if let Some((name, format)) = formats.clone().find(|(_, format)| called(format)) {
            return Ok(Some(Format::new(name, format.bytes)));
        }
        let last = formats.next_back().and_then(|(_, format)| format.names.first());
        let others: Vec<_> = formats.filter_map(|(_, format)| format.names.first()).collect();
        let others: Vec<_> = others.into_iter().map(String::as_str).collect();
        let last = last.map(String::as_str).unwrap_or_default();
        Err(fields.bad(field, text, format!("{} or {last}", others.join(", "))))
    }

    pub(super) fn check(&self) -> Result<(), FactsError> {
        let wrong = |what: &str, name: &str, problem| {
            Err(FactsError::Definition { place: format!("{what} '{name}'"), problem })
        };
        if let Some((name, _)) = self.formats.iter().find(|(_, format)| format.bytes == 0) {
            return wrong("format", name, "a number has at least one byte".to_owned());
        }
        let formats = self.formats();
        for (name, kind) in &self.kinds {
            if let Some(problem) = kind.problem(&formats) {
                return wrong("kind", name, problem);
            }
        }
        Ok(())
    }

    fn formats(&self) -> BTreeMap<String, Format> {
        let formats = self.formats.iter();
        formats.map(|(name, it)| (name.clone(), Format::new(name, it.bytes))).collect()
    }
}
