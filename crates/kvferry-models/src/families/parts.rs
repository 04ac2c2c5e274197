//! What the families that are read by code are made of.

use kvferry_layout::Format;

use crate::config::Fields;
use crate::error::ConfigError;
use crate::facts::{Facts, States};
use crate::model::{Cache, Limit, Place, Rule};

/// The kinds of states that come with kvferry.
pub(super) fn states() -> &'static States {
    Facts::shipped().states()
}

/// Heads that attention layers keep.
#[derive(Clone)]
pub(super) struct Heads {
    pub(super) format: Format,
    pub(super) count: u64,
    pub(super) key: u64,
    pub(super) value: u64,
}

impl Heads {
    pub(super) fn read(fields: &Fields<'_>) -> Result<Self, ConfigError> {
        let attention = fields.count("num_attention_heads")?;
        let size = match fields.count_of(&["head_dim", "attention_head_dim"])? {
            Some(size) => size,
            None => divide(fields, "hidden_size", "num_attention_heads")?,
        };
        Ok(Self {
            format: states().model_format(fields)?,
            count: fields.count_if_any("num_key_value_heads")?.unwrap_or(attention),
            key: size,
            value: size,
        })
    }

    pub(super) fn cache(&self, at: Place, window: Option<u64>) -> Result<Cache, ConfigError> {
        let sizes = [("heads", self.count), ("key", self.key), ("value", self.value)];
        Ok(states().cache("attention", at, &sizes, &[("model", &self.format)], window)?)
    }

    pub(super) fn limits(&self, fields: &Fields<'_>) -> Result<Vec<Limit>, ConfigError> {
        Ok(vec![attention_heads(fields)?, self.limit("KV heads")])
    }

    pub(super) fn limit(&self, what: &str) -> Limit {
        Limit { what: what.to_owned(), count: self.count, rule: Rule::EitherDivides }
    }
}

pub(super) fn attention_heads(fields: &Fields<'_>) -> Result<Limit, ConfigError> {
    let count = fields.count("num_attention_heads")?;
    Ok(Limit { what: "attention heads".to_owned(), count, rule: Rule::Divides })
}

fn divide(fields: &Fields<'_>, whole: &str, parts: &str) -> Result<u64, ConfigError> {
    let (size, count) = (fields.count(whole)?, fields.count(parts)?);
    if size % count != 0 {
        return Err(fields.bad(whole, size, format!("a multiple of '{parts}', which is {count}")));
    }
    Ok(size / count)
}

/// Columns that a convolution keeps: one fewer than it is wide.
pub(super) fn columns(fields: &Fields<'_>, field: &str) -> Result<u64, ConfigError> {
    let width = fields.count(field)?;
    if width < 2 {
        return Err(fields.bad(field, width, "at least 2"));
    }
    Ok(width - 1)
}
