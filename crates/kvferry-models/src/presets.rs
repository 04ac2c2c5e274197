//! Released models, as data.

use serde::Deserialize;

use crate::error::ConfigError;
use crate::families;
use crate::model::Model;
use crate::suggest;

const PRESETS: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/presets.rs"));
const SOURCES: &str = include_str!("../presets/SOURCES.json");

/// A released model's configuration, as far as it bears on its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// Its name.
    pub name: &'static str,
    /// Its `config.json`, with only the fields that matter here.
    pub config: &'static str,
}

/// Where a preset comes from.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// The model's name where it was released.
    pub hf_id: String,
    /// Where the values were found.
    pub source: String,
    /// How sure they are.
    pub confidence: String,
    /// What to know about it.
    pub notes: String,
}

impl Preset {
    /// Reads it.
    pub fn model(&self) -> Result<Model, ConfigError> {
        families::read(self.name, self.config)
    }

    /// Where it comes from.
    pub fn source(&self) -> Source {
        let mut sources: std::collections::HashMap<String, Source> =
            serde_json::from_str(SOURCES).expect("the shipped sources are well-formed");
        sources.remove(self.name).expect("every preset names its source")
    }
}

/// All presets, by name.
pub fn all() -> impl Iterator<Item = Preset> {
    PRESETS.iter().map(|&(name, config)| Preset { name, config })
}

/// The preset that `name` means: its whole name, or any part of it that no other preset has.
pub fn find(name: &str) -> Result<Preset, ConfigError> {
    let wanted = name.to_lowercase();
    if let Some(preset) = all().find(|preset| preset.name == wanted) {
        return Ok(preset);
    }
    let matches: Vec<Preset> = match wanted.is_empty() {
        true => vec![],
        false => all().filter(|preset| preset.name.contains(&wanted)).collect(),
    };
    match matches[..] {
        [preset] => Ok(preset),
        [] => Err(ConfigError::UnknownPreset {
            found: name.to_owned(),
            nearest: nearest(&wanted).map(str::to_owned),
        }),
        _ => Err(ConfigError::AmbiguousPreset {
            found: name.to_owned(),
            matches: matches.iter().map(|preset| preset.name.to_owned()).collect(),
        }),
    }
}

/// The preset whose name, or whose first words, are spelled most like `wanted`.
fn nearest(wanted: &str) -> Option<&'static str> {
    let starts = |name: &'static str| {
        let ends = name.match_indices('-').map(|(end, _)| end).chain([name.len()]);
        ends.map(|end| &name[..end])
    };
    let start = suggest::nearest(wanted, all().flat_map(|preset| starts(preset.name)))?;
    all().map(|preset| preset.name).find(|name| name.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelled_part_of_a_name_finds_the_preset() {
        assert_eq!(nearest("kimi-linaer"), Some("kimi-linear-48b-a3b"));
        assert_eq!(nearest("deepseek-v3.22"), Some("deepseek-v3.2"));
        assert_eq!(nearest("something else altogether"), None);
    }
}
