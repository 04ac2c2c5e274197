//! What can be wrong with a model's description or with how it is to be run.

use thiserror::Error;

/// Why a configuration could not be read as a model.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is not JSON.
    ///
    /// What to do: give the model's own `config.json`, as it was released.
    #[error("the configuration is not JSON: {0}")]
    NotJson(String),
    /// The JSON is not an object.
    ///
    /// What to do: give the model's own `config.json`, as it was released.
    #[error("the configuration is not a JSON object")]
    NotAnObject,
    /// A field is not there.
    ///
    /// What to do: take the whole `config.json` of the checkpoint; some tools leave fields out.
    #[error("the configuration has no field '{field}', which a model of type '{family}' needs")]
    MissingField {
        /// The field.
        field: String,
        /// The value of `model_type`.
        family: String,
    },
    /// There is no `model_type`.
    ///
    /// What to do: add the field, with the known type that the model is of.
    #[error(
        "the configuration has no field 'model_type', which says how to read it; known types: {known}"
    )]
    NoFamily {
        /// The families that can be read.
        known: String,
    },
    /// A field has a value that makes no sense.
    ///
    /// What to do: compare the field with the `config.json` of the checkpoint.
    #[error("the field '{field}' of the configuration is {found}, but should be {expected}")]
    BadField {
        /// The field.
        field: String,
        /// Its value.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// The model's type is not known.
    ///
    /// What to do: correct the spelling, or describe the family in a file: docs/new-model.md shows how.
    #[error("the model type '{found}' is not known{}; known types: {known}", crate::suggest::hint(.nearest.as_deref()))]
    UnknownFamily {
        /// The value of `model_type`.
        found: String,
        /// A known one that is spelled alike.
        nearest: Option<String>,
        /// All known ones.
        known: String,
    },
    /// The model's type is known, but what it keeps is not described here.
    ///
    /// What to do: use another model, or describe the family in a file if you know what it keeps.
    #[error("the model type '{family}' is not supported: {reason}")]
    Unsupported {
        /// The value of `model_type`.
        family: String,
        /// Why.
        reason: String,
    },
    /// No preset has the name.
    ///
    /// What to do: take a name from `kvferry models`, or give the model's `config.json`.
    #[error("there is no preset '{found}'{}; 'kvferry models' lists them", crate::suggest::hint(.nearest.as_deref()))]
    UnknownPreset {
        /// What was asked for.
        found: String,
        /// A preset that is spelled alike.
        nearest: Option<String>,
    },
    /// Several presets match the name.
    ///
    /// What to do: give more of the name.
    #[error("'{found}' may be any of {}: say which", .matches.join(", "))]
    AmbiguousPreset {
        /// What was asked for.
        found: String,
        /// The presets that match.
        matches: Vec<String>,
    },
    /// The configuration was read, but what it says makes no state.
    ///
    /// What to do: compare the numbers in the message with the model's configuration.
    #[error(transparent)]
    Facts(#[from] FactsError),
}

/// Why a user's facts could not be read, or do not fit what they are used for.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FactsError {
    /// The text is not JSON, or not of the form of the facts.
    ///
    /// What to do: correct the place that the message names; docs/new-model.md shows the form.
    #[error("the facts cannot be read: {0}")]
    Unreadable(String),
    /// A definition makes no sense.
    ///
    /// What to do: correct the definition that the message names.
    #[error("{place}: {problem}")]
    Definition {
        /// The definition.
        place: String,
        /// What is wrong with it.
        problem: String,
    },
    /// No kind of states has the name.
    ///
    /// What to do: use one of the kinds that the message lists, or define it beside the family.
    #[error("there is no kind of states '{found}'{}; kinds: {known}", crate::suggest::hint(.nearest.as_deref()))]
    UnknownKind {
        /// The name.
        found: String,
        /// One that is spelled alike.
        nearest: Option<String>,
        /// All of them.
        known: String,
    },
    /// The sizes that were given do not make a state of the kind.
    ///
    /// What to do: compare the numbers in the message with the model's configuration: they contradict
    /// each other, or the family is read in the wrong way.
    #[error("the sizes of '{kind}' do not fit: {problem}")]
    Sizes {
        /// The kind of states.
        kind: String,
        /// What is wrong.
        problem: String,
    },
}

/// Why an engine could not run a model in the way that was asked for, or why its layout could not be
/// described.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RulesError {
    /// The engine itself refuses this way of running the model.
    ///
    /// What to do: change the setting that the message names; the engine would not start with it.
    #[error("{engine} cannot run {model} with {setting}: {reason}")]
    CannotRun {
        /// The engine.
        engine: &'static str,
        /// The model.
        model: String,
        /// The part of the topology that is at fault.
        setting: String,
        /// Why.
        reason: String,
    },
    /// The layout that the rules gave is not sound.
    ///
    /// What to do: choose another layout for the engine, and report this: the engine's own pool would mix
    /// up blocks.
    #[error("the layout of {model} is not sound: {0}", .problem)]
    Unsound {
        /// The model.
        model: String,
        /// What is wrong.
        problem: kvferry_layout::ManifestError,
    },
}

/// Why a topology could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// Not `key=value`.
    ///
    /// What to do: write pairs with commas between them: `tp=4,pp=2`.
    #[error("'{0}' is not of the form key=value (for example tp=4,pp=2)")]
    NotAPair(String),
    /// An unknown key.
    ///
    /// What to do: use one of the keys that the message lists.
    #[error("the topology has no key '{found}'{}; keys: {known}", crate::suggest::hint(.nearest.as_deref()))]
    UnknownKey {
        /// The key.
        found: String,
        /// One that is spelled alike.
        nearest: Option<String>,
        /// All keys.
        known: String,
    },
    /// A key of vLLM that no manifest depends on.
    ///
    /// What to do: leave it out.
    #[error("'{key}' does not belong in a topology: {why}. Leave it out")]
    NoMatter {
        /// The key.
        key: String,
        /// Why the caches do not depend on it.
        why: String,
    },
    /// A key twice.
    ///
    /// What to do: give the key once.
    #[error("the key '{0}' is given twice")]
    Twice(String),
    /// A value that the key does not take.
    ///
    /// What to do: give a value that the message allows.
    #[error("'{value}' is not a value for '{key}': {expected}{}", crate::suggest::hint(.nearest.as_deref()))]
    BadValue {
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// What it takes.
        expected: String,
        /// A value that is spelled alike.
        nearest: Option<String>,
    },
    /// Two keys that contradict each other.
    ///
    /// What to do: change one of the two values that the message names.
    #[error("{0}")]
    Contradiction(String),
}
