//! Models by the names that `vllm serve` takes: what Hugging Face's tools have fetched, and presets.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use kvferry_models::presets::{self, Preset};

/// What `OWNER/NAME` stands for.
pub(crate) enum Found {
    /// Its configuration, as it was fetched.
    Config(PathBuf),
    /// A preset that keeps the same of a prompt.
    Preset(Preset),
}

/// Whether a word is a name on the hub, rather than a path.
pub(crate) fn is_name(word: &str) -> bool {
    let parts: Vec<&str> = word.split('/').collect();
    let fits = |part: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        !part.starts_with('.') && !part.is_empty() && part.bytes().all(plain)
    };
    parts.len() == 2
        && parts.into_iter().all(fits)
        && !word.ends_with(".json")
        && !Path::new(word).exists()
}

/// Finds a model by its name on the hub: its own configuration, where that was fetched, and else a preset.
pub(crate) fn find(name: &str) -> Result<Found, String> {
    let cache = cache();
    if let Some(config) = cache.as_deref().and_then(|cache| fetched(cache, name)) {
        return Ok(Found::Config(config));
    }
    presets::released(name).map(Found::Preset).ok_or_else(|| {
        let cache = cache.map_or_else(String::new, |cache| format!(" ({})", cache.display()));
        format!(
            "{name} is no preset ('kvferry models' lists them), and its config.json is not in the hub's cache{cache}: \
             fetch those few kilobytes with 'hf download {name} config.json', then ask again"
        )
    })
}

/// Where Hugging Face's tools keep what they fetch.
fn cache() -> Option<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("HF_HUB_CACHE")
        .or_else(|| set("HF_HOME").map(|home| home.join("hub")))
        .or_else(|| set("XDG_CACHE_HOME").map(|root| root.join("huggingface/hub")))
        .or_else(|| set("HOME").map(|home| home.join(".cache/huggingface/hub")))
}

/// The configuration that was fetched last.
fn fetched(cache: &Path, name: &str) -> Option<PathBuf> {
    let folder = cache.join(format!("models--{}", name.replace('/', "--")));
    let commit = fs::read_to_string(folder.join("refs/main")).ok()?;
    let config = folder.join("snapshots").join(commit.trim()).join("config.json");
    config.is_file().then_some(config)
}
