//! A family of models as data: where a `config.json` says which layers there are and how large.

use std::collections::BTreeMap;

use kvferry_layout::Format;
use serde::{Deserialize, Serialize};

use super::expression::{Expression, NoValue};
use super::kind::LimitFacts;
use super::states::States;
use crate::config::{Fields, MAX_COUNT};
use crate::error::ConfigError;
use crate::model::{Cache, Limit, Place};

/// What a family's configuration says of a model.
pub(crate) struct Description {
    pub(crate) format: Format,
    pub(crate) layers: u64,
    pub(crate) caches: Vec<Cache>,
    pub(crate) limits: Vec<Limit>,
    pub(crate) own_draft: Vec<Cache>,
}

/// How to read the configuration of a family.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Family {
    /// Other values of `model_type` that are read in the same way.
    #[serde(default)]
    also: Vec<String>,
    /// Modules of its own, beside those that all families may use.
    #[serde(default)]
    modules: BTreeMap<String, Module>,
    /// What the layers keep: the first of these whose field is there.
    layers: Vec<Pattern>,
    /// Draft layers that come with the model.
    draft: Option<DraftLayers>,
}

/// Modules by name.
pub(super) type Modules = BTreeMap<String, Module>;

/// One module of a layer: a kind of memory, and where its sizes come from.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Module {
    kind: String,
    /// From fields of the configuration, by the name of the size.
    sizes: BTreeMap<String, Expression>,
    /// By role, the first that there is: a field that names a format, a format, or `model`. A role that
    /// is left out has the model's.
    #[serde(default)]
    formats: BTreeMap<String, Vec<String>>,
    /// The sliding window, in tokens.
    window: Option<Expression>,
    #[serde(default)]
    limits: Vec<LimitFacts>,
}

/// Which modules each layer has.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(untagged, deny_unknown_fields)]
enum Pattern {
    /// The same in all layers.
    All { all: Vec<String> },
    /// By a word (or a number) for each layer.
    Words { words: String, are: BTreeMap<String, Vec<String>> },
    /// By a list of layers, counted from zero.
    Listed { listed: String, are: Vec<String>, others: Vec<String> },
    /// One layer in so many, from one on.
    Every { every: Expression, from: Expression, are: Vec<String>, others: Vec<String> },
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct DraftLayers {
    layers: Expression,
    are: Vec<String>,
}

impl Pattern {
    fn modules(&self) -> Vec<&String> {
        match self {
            Self::All { all } => all.iter().collect(),
            Self::Words { are, .. } => are.values().flatten().collect(),
            Self::Listed { are, others, .. } | Self::Every { are, others, .. } => {
                are.iter().chain(others).collect()
            }
        }
    }

    /// Whether the configuration says what the pattern needs.
    fn is_there(&self, fields: &Fields<'_>) -> bool {
        match self {
            Self::All { .. } => true,
            Self::Words { words: field, .. } | Self::Listed { listed: field, .. } => {
                fields.has(field)
            }
            Self::Every { every, .. } => every.names().iter().all(|name| fields.has(name)),
        }
    }

    /// The modules of every layer.
    fn of(&self, fields: &Fields<'_>, layers: u64) -> Result<Vec<&[String]>, ConfigError> {
        match self {
            Self::All { all } => Ok((0..layers).map(|_| &all[..]).collect()),
            Self::Words { words, are } => {
                let found = fields.layer_words(words, layers)?;
                let found = found.ok_or_else(|| fields.missing(words))?;
                let modules = |word: &String| {
                    let known = || are.keys().map(String::as_str).collect::<Vec<_>>().join(" or ");
                    are.get(word)
                        .map(|list| &list[..])
                        .ok_or_else(|| fields.bad(words, word, known()))
                };
                found.iter().map(modules).collect()
            }
            Self::Listed { listed, are, others } => {
                let found = fields.numbers(listed, layers)?;
                let found = found.ok_or_else(|| fields.missing(listed))?;
                let modules = |layer| if found.contains(&layer) { are } else { others };
                Ok((0..layers).map(|layer| &modules(layer)[..]).collect())
            }
            Self::Every { every, from, are, others } => {
                let (every, from) = (size(every, fields, 1)?, size(from, fields, 0)?);
                let modules = |layer: u64| if layer % every == from { are } else { others };
                Ok((0..layers).map(|layer| &modules(layer)[..]).collect())
            }
        }
    }
}

/// The value of an expression of fields, at least `least`. Fields that are not there are zero where
/// that is allowed.
fn size(expression: &Expression, fields: &Fields<'_>, least: u64) -> Result<u64, ConfigError> {
    let look = |field: &str| match least {
        0 if !field.contains('.') => fields.number(field).map(Some),
        _ => fields.count_at(field),
    };
    let value = expression.value(&look).map_err(|problem| match problem {
        NoValue::Missing(field) => fields.missing(&field),
        NoValue::Unfit { part, value, expected } => fields.bad(&part, value, expected),
        NoValue::Lookup(error) => error,
    })?;
    if value < least || value > MAX_COUNT {
        let expected = format!("from {least} to {MAX_COUNT}");
        return Err(fields.bad(&expression.to_string(), value, expected));
    }
    Ok(value)
}

/// A module whose sizes are known.
struct Measured<'a> {
    kind: &'a str,
    sizes: Vec<(&'a str, u64)>,
    formats: Vec<(&'a str, Format)>,
    window: Option<u64>,
    limits: Vec<Limit>,
}

impl Family {
    /// Reads a configuration; `shared` are the modules that all families may use.
    pub(super) fn read(
        &self,
        states: &States,
        shared: &Modules,
        fields: &Fields<'_>,
    ) -> Result<Description, ConfigError> {
        let (layers, format) = (fields.layers()?, states.model_format(fields)?);
        // In the order in which the definition names them.
        let mut measured: Vec<(&str, Measured<'_>)> = vec![];
        let draft = self.draft.iter().flat_map(|draft| &draft.are);
        for name in self.layers.iter().flat_map(Pattern::modules).chain(draft) {
            if !measured.iter().any(|(known, _)| known == name) {
                let module = self.module(shared, name).expect("checked when it was read");
                measured.push((name, module.measured(states, fields, &format)?));
            }
        }
        let pattern = self.layers.iter().find(|pattern| pattern.is_there(fields));
        let pattern = pattern.or(self.layers.last()).expect("checked when it was read");
        let caches = |at: Place, modules: &[String], into: &mut Vec<Cache>| {
            for name in modules {
                let found = measured.iter().find(|(known, _)| known == name);
                let (_, Measured { kind, sizes, formats, window, .. }) =
                    found.expect("all modules have their sizes");
                let formats: Vec<_> =
                    formats.iter().map(|(role, format)| (*role, format)).collect();
                into.push(states.cache(kind, at, sizes, &formats, *window)?);
            }
            Ok::<_, ConfigError>(())
        };
        let mut description = Description {
            format: format.clone(),
            layers,
            caches: vec![],
            limits: vec![],
            own_draft: vec![],
        };
        let mut used: Vec<&str> = vec![];
        for (layer, modules) in (0u64..).zip(pattern.of(fields, layers)?) {
            caches(Place::Layer(layer), modules, &mut description.caches)?;
            used.extend(modules.iter().map(String::as_str));
        }
        for (name, module) in &measured {
            if used.contains(name) {
                description.limits.extend(module.limits.iter().cloned());
            }
        }
        if let Some(draft) = &self.draft {
            let count = size(&draft.layers, fields, 0)?;
            if count > 0 {
                fields.check_layers(&draft.layers.to_string(), count)?;
            }
            for number in 0..count {
                caches(Place::Draft { number, layers }, &draft.are, &mut description.own_draft)?;
            }
        }
        Ok(description)
    }

    fn module<'a>(&'a self, shared: &'a Modules, name: &str) -> Option<&'a Module> {
        self.modules.get(name).or_else(|| shared.get(name))
    }

    /// Other values of `model_type` that it is for.
    pub(super) fn also(&self) -> &[String] {
        &self.also
    }

    /// What is wrong with the definition, if anything.
    pub(super) fn problem(&self, states: &States, shared: &Modules) -> Option<String> {
        if self.layers.is_empty() {
            return Some("it does not say what its layers keep".to_owned());
        }
        let draft = self.draft.iter().flat_map(|draft| &draft.are);
        for name in self.layers.iter().flat_map(Pattern::modules).chain(draft) {
            let Some(module) = self.module(shared, name) else {
                return Some(format!("there is no module '{name}'"));
            };
            if let Some(problem) = module.problem(states) {
                return Some(format!("module '{name}': {problem}"));
            }
        }
        None
    }
}

impl Module {
    fn measured<'a>(
        &'a self,
        states: &'a States,
        fields: &Fields<'_>,
        format: &Format,
    ) -> Result<Measured<'a>, ConfigError> {
        let kind = states.kind(&self.kind)?;
        // In the order in which the kind names them.
        let sizes = kind.sizes().map(|name| Ok((name, size(&self.sizes[name], fields, 1)?)));
        let sizes: Vec<(&str, u64)> = sizes.collect::<Result<_, ConfigError>>()?;
        let formats = kind.formats().map(|role| {
            let mut sources = self.formats.get(role).into_iter().flatten();
            let found = sources.find_map(|source| match source.as_str() {
                "model" => Some(Ok(format.clone())),
                source => match states.format(source) {
                    Some(format) => Some(Ok(format)),
                    None => states.format_in(fields, source).transpose(),
                },
            });
            Ok((role, found.unwrap_or_else(|| Ok(format.clone()))?))
        });
        let formats = formats.collect::<Result<_, ConfigError>>()?;
        let mut limits = vec![];
        for facts in &self.limits {
            limits.push(facts.limit(size(&facts.count, fields, 1)?));
        }
        limits.extend(kind.limits(&self.kind, &sizes)?);
        let window = self.window.as_ref().map(|window| size(window, fields, 1)).transpose()?;
        Ok(Measured { kind: &self.kind, sizes, formats, window, limits })
    }

    fn problem(&self, states: &States) -> Option<String> {
        let kind = match states.kind(&self.kind) {
            Ok(kind) => kind,
            Err(error) => return Some(error.to_string()),
        };
        if let Some(size) = kind.sizes().find(|size| !self.sizes.contains_key(*size)) {
            return Some(format!("it does not say where the size '{size}' comes from"));
        }
        if let Some(size) = self.sizes.keys().find(|size| !kind.sizes().any(|known| known == *size))
        {
            return Some(format!("the kind '{}' has no size '{size}'", self.kind));
        }
        if let Some(role) = self.formats.keys().find(|role| !kind.formats().any(|it| it == *role)) {
            return Some(format!("the kind '{}' has no format '{role}'", self.kind));
        }
        if self.window.is_some() && !kind.can_slide() {
            return Some(format!("a window means nothing to the kind '{}'", self.kind));
        }
        None
    }
}
