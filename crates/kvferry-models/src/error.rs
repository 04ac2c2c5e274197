//! What can be wrong with a model's description or with how it is to be run.

use thiserror::Error;

/// Why a configuration could not be read as a model.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is not JSON.
    #[error("the configuration is not JSON: {0}")]
    NotJson(String),
    /// The JSON is not an object.
    #[error("the configuration is not a JSON object")]
    NotAnObject,
    /// A field is not there.
    #[error("the configuration has no field '{field}', which a model of type '{family}' needs")]
    MissingField {
        /// The field.
        field: String,
        /// The value of `model_type`.
        family: String,
    },
    /// There is no `model_type`.
    #[error(
        "the configuration has no field 'model_type', which says how to read it; known types: {known}"
    )]
    NoFamily {
        /// The families that can be read.
        known: String,
    },
    /// A field has a value that makes no sense.
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
    #[error("the model type '{family}' is not supported: {reason}")]
    Unsupported {
        /// The value of `model_type`.
        family: String,
        /// Why.
        reason: String,
    },
    /// No preset has the name.
    #[error("there is no preset '{found}'{}; 'kvferry models' lists them", crate::suggest::hint(.nearest.as_deref()))]
    UnknownPreset {
        /// What was asked for.
        found: String,
        /// A preset that is spelled alike.
        nearest: Option<String>,
    },
    /// Several presets match the name.
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

/// Why facts of one's own could not be read, or do not fit what they are used for.
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
    #[error("'{0}' is not of the form key=value (for example tp=4,pp=2)")]
    NotAPair(String),
    /// An unknown key.
    #[error("the topology has no key '{found}'{}; keys: {known}", crate::suggest::hint(.nearest.as_deref()))]
    UnknownKey {
        /// The key.
        found: String,
        /// One that is spelled alike.
        nearest: Option<String>,
        /// All keys.
        known: String,
    },
    /// A key twice.
    #[error("the key '{0}' is given twice")]
    Twice(String),
    /// A value that the key does not take.
    #[error("'{value}' is no value for '{key}': {expected}{}", crate::suggest::hint(.nearest.as_deref()))]
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
    #[error("{0}")]
    Contradiction(String),
}
