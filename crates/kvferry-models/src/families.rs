//! Reading the configurations of model families: the one place that branches on a model's type.
//!
//! Most families are data (`facts/families.json`). Those whose configurations are irregular are read by
//! code here, and build their states from the same facts.

mod attention;
mod compressed;
mod latent;
mod mamba;
mod parts;

use serde_json::Value;

use self::attention::{dense, gemma, gemma4, gpt_oss, mimo};
use self::compressed::{deepseek_v4, deepseek_v41};
use self::latent::{kimi_linear, latent};
use self::mamba::{nemotron_h, state_spaces, zamba2};
use crate::config::Fields;
use crate::error::ConfigError;
use crate::facts::{Description, Facts};
use crate::model::Model;
use crate::suggest;

type Reader = fn(&Fields<'_>) -> Result<Description, ConfigError>;

/// Families that are read by code, by `model_type`.
const FAMILIES: &[(&str, Reader)] = &[
    ("deepseek_v2", latent),
    ("deepseek_v3", latent),
    ("deepseek_v32", latent),
    ("deepseek_v4", deepseek_v4),
    ("deepseek_v41", deepseek_v41),
    ("gemma2", gemma),
    ("gemma3", gemma),
    ("gemma3_text", gemma),
    ("gemma4", gemma4),
    ("gemma4_text", gemma4),
    ("gemma4_unified", gemma4),
    ("gemma4_unified_text", gemma4),
    ("glm_moe_dsa", latent),
    ("gpt_oss", gpt_oss),
    ("granite", dense),
    ("kimi_k2", latent),
    ("kimi_k25", latent),
    ("kimi_k3", kimi_linear),
    ("kimi_linear", kimi_linear),
    ("llama", dense),
    ("mimo_v2_flash", mimo),
    ("mistral", dense),
    ("mixtral", dense),
    ("nemotron_h", nemotron_h),
    ("olmo2", dense),
    ("phi3", dense),
    ("qwen2", dense),
    ("qwen3", dense),
    ("qwen3_moe", dense),
    ("zamba2", zamba2),
];

/// Families that are known but cannot be described, and why.
const UNSUPPORTED: &[(&str, &str)] = &[
    (
        "phi4flash",
        "its released configuration leaves out the sizes of its Mamba states, and vLLM carries it no \
         longer",
    ),
    ("rwkv7", "no engine that is described here runs it, so there is no page layout to describe"),
];

/// The families that can be read without any facts of the user's.
pub fn families() -> impl Iterator<Item = &'static str> {
    known(Facts::shipped()).into_iter()
}

fn known(facts: &Facts) -> Vec<&str> {
    let mut names: Vec<&str> = FAMILIES.iter().map(|(name, _)| *name).collect();
    names.extend(facts.families());
    names.sort_unstable();
    names
}

/// Reads a `config.json`. `name` is the model's name in messages and in its identity.
pub fn read(name: &str, text: &str) -> Result<Model, ConfigError> {
    read_with(Facts::shipped(), name, text)
}

/// Reads a `config.json` with the help of the user's facts: see [`Facts::with`].
pub fn read_with(facts: &Facts, name: &str, text: &str) -> Result<Model, ConfigError> {
    let value: Value =
        serde_json::from_str(text).map_err(|error| ConfigError::NotJson(error.to_string()))?;
    let Value::Object(outer) = &value else { return Err(ConfigError::NotAnObject) };
    let converted = state_spaces(outer)?;
    let outer = converted.as_ref().unwrap_or(outer);
    let family = match outer.get("model_type") {
        Some(Value::String(family)) => family.as_str(),
        Some(other) => {
            return Err(ConfigError::BadField {
                field: "model_type".to_owned(),
                found: other.to_string(),
                expected: "a string".to_owned(),
            });
        }
        None => return Err(ConfigError::NoFamily { known: known(facts).join(", ") }),
    };
    let fields = Fields::new(outer, family);
    let described = |family: &str| {
        let code = FAMILIES.iter().find(|(known, _)| *known == family);
        code.map(|(_, reader)| reader(&fields)).or_else(|| facts.read(family, &fields))
    };
    let described = described(family).or_else(|| described(fields.text_family()?));
    let Description { format, layers, caches, limits, own_draft } =
        described.unwrap_or_else(|| Err(unknown(facts, family)))?;
    Ok(Model {
        name: name.to_owned(),
        family: family.to_owned(),
        format,
        layers: u32::try_from(layers).expect("the number of layers is limited"),
        caches,
        limits,
        draft: None,
        own_draft,
    })
}

fn unknown(facts: &Facts, family: &str) -> ConfigError {
    match UNSUPPORTED.iter().find(|(known, _)| *known == family) {
        Some((_, reason)) => {
            ConfigError::Unsupported { family: family.to_owned(), reason: (*reason).to_owned() }
        }
        None => ConfigError::UnknownFamily {
            found: family.to_owned(),
            nearest: suggest::nearest(family, known(facts)).map(str::to_owned),
            known: known(facts).join(", "),
        },
    }
}
