//! The facts, told once: kinds of states, formats, identity, and the families that are plain enough to
//! be data.
//!
//! They lie in JSON beside this crate (`facts/states.json`, `facts/families.json`). The families of
//! this crate build their states from them, and the adapters of engines get them through
//! `kvferry._core`: both sides of a transfer then speak of the same states by the same names.
//! [`Facts::with`] adds a user's own, in the same form.

mod expression;
mod family;
mod kind;
mod solve;
mod states;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};
use serde_json::json;

pub(crate) use self::family::Description;
use self::family::{Family, Module};
pub use self::kind::StateKind;
use self::states::FormatFacts;
pub use self::states::States;
use crate::config::Fields;
use crate::error::{ConfigError, FactsError};

static SHIPPED: LazyLock<Facts> = LazyLock::new(|| {
    let states = include_str!("../facts/states.json");
    let families = include_str!("../facts/families.json");
    let facts = Facts::default().with(states).and_then(|facts| facts.with(families));
    facts.unwrap_or_else(|error| panic!("the facts that come with kvferry: {error}"))
});

/// Everything that is known of states and families.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    states: States,
    identity: BTreeMap<String, IdentityFacts>,
    modules: BTreeMap<String, Module>,
    families: BTreeMap<String, Family>,
}

/// The files.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Text {
    formats: BTreeMap<String, FormatFacts>,
    identity: BTreeMap<String, IdentityFacts>,
    kinds: BTreeMap<String, StateKind>,
    modules: BTreeMap<String, Module>,
    families: BTreeMap<String, Family>,
}

/// What must be equal on both sides for equal shapes to mean equal things.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct IdentityFacts {
    about: String,
    /// Whether every engine says it. The others are said where there is something to say.
    #[serde(default)]
    required: bool,
}

impl Facts {
    /// The facts that come with kvferry.
    pub fn shipped() -> &'static Self {
        &SHIPPED
    }

    /// These facts and those of a JSON text of the same form. What is known already cannot be told
    /// again: two sides must never mean different things by one name.
    pub fn with(&self, text: &str) -> Result<Self, FactsError> {
        let added: Text = serde_json::from_str(text)
            .map_err(|error| FactsError::Unreadable(error.to_string()))?;
        let mut facts = self.clone();
        merge("format", &mut facts.states.formats, added.formats)?;
        merge("identity", &mut facts.identity, added.identity)?;
        merge("kind", &mut facts.states.kinds, added.kinds)?;
        merge("module", &mut facts.modules, added.modules)?;
        merge("family", &mut facts.families, added.families)?;
        facts.states.check()?;
        let mut names: Vec<&str> = facts.families().collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(twice("family", pair[0]));
        }
        for (name, family) in &facts.families {
            if let Some(problem) = family.problem(&facts.states, &facts.modules) {
                return Err(FactsError::Definition { place: format!("family '{name}'"), problem });
            }
        }
        Ok(facts)
    }

    /// The kinds of states and the formats.
    pub fn states(&self) -> &States {
        &self.states
    }

    /// The values of `model_type` that are read by data.
    pub fn families(&self) -> impl Iterator<Item = &str> {
        let names = |(name, family)| std::iter::once(name).chain(Family::also(family));
        self.families.iter().flat_map(names).map(String::as_str)
    }

    /// Reads a configuration, if its family is data.
    pub(crate) fn read(
        &self,
        family: &str,
        fields: &Fields<'_>,
    ) -> Option<Result<Description, ConfigError>> {
        let also = |it: &&Family| it.also().iter().any(|known| known == family);
        let found = self.families.get(family).or_else(|| self.families.values().find(also))?;
        Some(found.read(&self.states, &self.modules, fields))
    }

    /// Everything as JSON, in the form of the files.
    pub fn to_json(&self) -> String {
        let Self { states, identity, modules, families } = self;
        let (formats, kinds) = (&states.formats, &states.kinds);
        json!({
            "formats": formats,
            "identity": identity,
            "kinds": kinds,
            "modules": modules,
            "families": families,
        })
        .to_string()
    }
}

fn merge<T>(
    what: &str,
    into: &mut BTreeMap<String, T>,
    added: BTreeMap<String, T>,
) -> Result<(), FactsError> {
    for (name, it) in added {
        if into.contains_key(&name) {
            return Err(twice(what, &name));
        }
        into.insert(name, it);
    }
    Ok(())
}

fn twice(what: &str, name: &str) -> FactsError {
    FactsError::Definition {
        place: format!("{what} '{name}'"),
        problem: "it is defined already; choose another name".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    /// Adapters have the same test: the keys that a manifest says of itself are told here alone.
    #[test]
    fn a_models_identity_is_made_of_the_keys_that_are_told() {
        let told = &Facts::shipped().identity;
        let model = presets::find("deepseek-v3").unwrap().model().unwrap();
        let drafted = model.clone().with_own_draft().unwrap().identity();
        let plain = model.identity();
        assert!(drafted.contains_key("draft"));
        assert_eq!(drafted.keys().find(|key| !told.contains_key(*key)), None);
        let required: Vec<_> = told.iter().filter(|(_, it)| it.required).map(|it| it.0).collect();
        assert_eq!(plain.keys().collect::<Vec<_>>(), required);
    }
}
