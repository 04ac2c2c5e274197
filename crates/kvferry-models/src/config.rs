//! Typed access to the fields of a `config.json`.

use serde_json::{Map, Value};

use crate::error::ConfigError;

/// The most that any dimension or count may be: far above every real model, and low enough that a
/// product of four of them is a number of bytes.
pub(crate) const MAX_COUNT: u64 = 1 << 20;
/// The most layers that a configuration may name.
const MAX_LAYERS: u64 = 4096;

/// The fields of a configuration. Models that wrap a language model in something else keep its fields
/// in `text_config`; they are looked up there first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'a> {
    outer: &'a Map<String, Value>,
    inner: &'a Map<String, Value>,
    path: &'a str,
    family: &'a str,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(outer: &'a Map<String, Value>, family: &'a str) -> Self {
        let inner = outer.get("text_config").and_then(Value::as_object).unwrap_or(outer);
        Self { outer, inner, path: "", family }
    }

    /// The model type of the language model.
    pub(crate) fn text_family(&self) -> Option<&'a str> {
        self.inner.get("model_type").and_then(Value::as_str)
    }

    /// The fields of an object inside.
    pub(crate) fn object(&self, field: &'a str) -> Result<Self, ConfigError> {
        match self.get(field) {
            Some(Value::Object(map)) => {
                Ok(Self { outer: map, inner: map, path: field, family: self.family })
            }
            Some(other) => Err(self.bad(field, other, "an object")),
            None => Err(self.missing(field)),
        }
    }

    fn get(&self, field: &str) -> Option<&'a Value> {
        let found = self.inner.get(field).or_else(|| self.outer.get(field));
        found.filter(|value| !value.is_null())
    }

    pub(crate) fn has(&self, field: &str) -> bool {
        self.get(field).is_some()
    }

    pub(crate) fn missing(&self, field: &str) -> ConfigError {
        ConfigError::MissingField { field: self.name(field), family: self.family.to_owned() }
    }

    pub(crate) fn bad(
        &self,
        field: &str,
        found: impl ToString,
        expected: impl Into<String>,
    ) -> ConfigError {
        let mut found = found.to_string();
        if let Some((end, _)) = found.char_indices().nth(60) {
            found.truncate(end);
            found.push('…');
        }
        ConfigError::BadField { field: self.name(field), found, expected: expected.into() }
    }

    fn name(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_owned() } else { format!("{}.{field}", self.path) }
    }

    /// A positive number.
    pub(crate) fn count(&self, field: &str) -> Result<u64, ConfigError> {
        self.count_if_any(field)?.ok_or_else(|| self.missing(field))
    }

    /// A positive number, if it is there.
    pub(crate) fn count_if_any(&self, field: &str) -> Result<Option<u64>, ConfigError> {
        self.get(field).map(|value| self.as_count(field, value)).transpose()
    }

    /// A positive number, if it is there; `field` may name one inside an object, as `object.field`.
    /// "auto" says as much as nothing.
    pub(crate) fn count_at(&self, field: &str) -> Result<Option<u64>, ConfigError> {
        let value = match field.split_once('.') {
            None => self.get(field),
            Some((outer, inner)) => self.get(outer).and_then(|value| value.get(inner)),
        };
        let value = value.filter(|value| value.as_str() != Some("auto") && !value.is_null());
        value.map(|value| self.as_count(field, value)).transpose()
    }

    /// The first of several fields that is there.
    pub(crate) fn count_of(&self, fields: &[&str]) -> Result<Option<u64>, ConfigError> {
        for field in fields {
            if let Some(count) = self.count_if_any(field)? {
                return Ok(Some(count));
            }
        }
        Ok(None)
    }

    /// A number that may be zero; zero when it is not there.
    pub(crate) fn number(&self, field: &str) -> Result<u64, ConfigError> {
        match self.get(field) {
            None => Ok(0),
            Some(value) if value.as_u64() == Some(0) => Ok(0),
            Some(value) => self.as_count(field, value),
        }
    }

    fn as_count(&self, field: &str, value: &Value) -> Result<u64, ConfigError> {
        value
            .as_u64()
            .filter(|count| (1..=MAX_COUNT).contains(count))
            .ok_or_else(|| self.bad(field, value, format!("a number from 1 to {MAX_COUNT}")))
    }

    /// Number of decoder layers.
    pub(crate) fn layers(&self) -> Result<u64, ConfigError> {
        let count = self.count("num_hidden_layers")?;
        self.check_layers("num_hidden_layers", count)
    }

    pub(crate) fn check_layers(&self, field: &str, count: u64) -> Result<u64, ConfigError> {
        if count == 0 || count > MAX_LAYERS {
            return Err(self.bad(field, count, format!("from 1 to {MAX_LAYERS} layers")));
        }
        Ok(count)
    }

    pub(crate) fn flag(&self, field: &str) -> Result<Option<bool>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.bad(field, other, "true or false")),
        }
    }

    pub(crate) fn text(&self, field: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.bad(field, other, "a string")),
        }
    }

    fn list(&self, field: &str) -> Result<Option<&'a [Value]>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(self.bad(field, other, "a list")),
        }
    }

    /// A list of words.
    pub(crate) fn words(&self, field: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let Some(list) = self.list(field)? else { return Ok(None) };
        let word = |value: &'a Value| {
            value.as_str().ok_or_else(|| self.bad(field, value, "a list of strings"))
        };
        list.iter().map(word).collect::<Result<_, _>>().map(Some)
    }

    /// A list of words (or numbers), one for each layer.
    pub(crate) fn layer_words(
        &self,
        field: &str,
        layers: u64,
    ) -> Result<Option<Vec<String>>, ConfigError> {
        let Some(list) = self.list(field)? else { return Ok(None) };
        let word = |value: &Value| match value {
            Value::String(word) => Ok(word.clone()),
            Value::Number(number) => Ok(number.to_string()),
            other => Err(self.bad(field, other, "a list of words")),
        };
        let words: Vec<String> = list.iter().map(word).collect::<Result<_, _>>()?;
        if words.len() as u64 != layers {
            let found = format!("{} entries", words.len());
            return Err(self.bad(field, found, format!("one entry for each of {layers} layers")));
        }
        Ok(Some(words))
    }

    /// A list of numbers below `limit`.
    pub(crate) fn numbers(&self, field: &str, limit: u64) -> Result<Option<Vec<u64>>, ConfigError> {
        let Some(list) = self.list(field)? else { return Ok(None) };
        let number = |value: &'a Value| {
            value
                .as_u64()
                .filter(|&number| number < limit)
                .ok_or_else(|| self.bad(field, value, format!("a list of numbers below {limit}")))
        };
        list.iter().map(number).collect::<Result<_, _>>().map(Some)
    }
}
