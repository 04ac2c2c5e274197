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

/// Words in the names of releases that say how a model was trained on, by whom, or how its weights are stored: what it
/// keeps of a prompt is the same.
const SAME_MEMORY: &[&str] = &[
    "ai21", "meta", "nvidia", "base", "chat", "instruct", "it", "thinking", "hf", "bf16", "fp8",
    "fp4", "nvfp4", "mxfp4", "int4", "int8", "w4a16", "w8a8", "4bit", "8bit", "awq", "gptq", "bnb",
    "dynamic",
];

/// The preset of a model that is named as on the hub, `OWNER/NAME`: by the name alone, whoever copied it, and whatever
/// form of its weights it is.
///
/// ```
/// use kvferry_models::presets;
///
/// let preset = presets::released("meta-llama/Llama-3.1-70B-Instruct").unwrap();
/// assert_eq!(preset.name, "llama-3.1-70b");
/// assert_eq!(presets::released("Qwen/Qwen3-8B"), None);
/// ```
pub fn released(id: &str) -> Option<Preset> {
    let wanted = release(id);
    all().find(|preset| release(preset.name) == wanted || release(&preset.source().hf_id) == wanted)
}

/// The words of a release's name that its memory depends on.
fn release(id: &str) -> Vec<String> {
    let name = id.rsplit('/').next().unwrap_or(id).to_lowercase();
    // A source may say more about where it is from.
    let name = name.split([' ', ',']).next().unwrap_or_default();
    let date = |word: &str| word.len() >= 4 && word.bytes().all(|byte| byte.is_ascii_digit());
    let words = name.split(['-', '_']);
    words.filter(|word| !SAME_MEMORY.contains(word) && !date(word)).map(str::to_owned).collect()
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
    fn every_release_is_one_preset() {
        for preset in all() {
            let id = preset.source().hf_id;
            assert_eq!(released(&id), Some(preset), "{id}");
            assert_eq!(released(&format!("somebody/{}-FP8", preset.name)), Some(preset));
        }
    }

    #[test]
    fn a_misspelled_part_of_a_name_finds_the_preset() {
        assert_eq!(nearest("kimi-linaer"), Some("kimi-linear-48b-a3b"));
        assert_eq!(nearest("deepseek-v3.22"), Some("deepseek-v3.2"));
        assert_eq!(nearest("something else altogether"), None);
    }
}
