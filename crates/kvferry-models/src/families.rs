//! Reading the configurations of model families: the one place that branches on a model's type.

mod attention;
mod linear;
mod mamba;
mod parts;

use kvferry_layout::Format;
use serde_json::Value;

use self::attention::{dense, gemma, gemma4, gpt_oss, latent, mimo};
use self::linear::{delta_net, kimi_linear, lfm2, minimax};
use self::mamba::{bamba, falcon_h1, granite_hybrid, jamba, mamba1, mamba2, nemotron_h, zamba2};
use crate::config::Fields;
use crate::error::ConfigError;
use crate::model::{Cache, Limit, Model};
use crate::suggest;

type Reader = fn(&Fields<'_>) -> Result<Description, ConfigError>;

/// Families by `model_type`.
const FAMILIES: &[(&str, Reader)] = &[
    ("bamba", bamba),
    ("deepseek_v2", latent),
    ("deepseek_v3", latent),
    ("deepseek_v32", latent),
    ("falcon_h1", falcon_h1),
    ("falcon_mamba", mamba1),
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
    ("granitemoehybrid", granite_hybrid),
    ("jamba", jamba),
    ("kimi_k2", latent),
    ("kimi_k25", latent),
    ("kimi_k3", kimi_linear),
    ("kimi_linear", kimi_linear),
    ("lfm2", lfm2),
    ("lfm2_moe", lfm2),
    ("llama", dense),
    ("mamba", mamba1),
    ("mamba2", mamba2),
    ("mimo_v2_flash", mimo),
    ("minimax", minimax),
    ("minimax_text_01", minimax),
    ("mistral", dense),
    ("mixtral", dense),
    ("nemotron_h", nemotron_h),
    ("olmo2", dense),
    ("phi3", dense),
    ("qwen2", dense),
    ("qwen3", dense),
    ("qwen3_5", delta_net),
    ("qwen3_5_moe", delta_net),
    ("qwen3_5_moe_text", delta_net),
    ("qwen3_5_text", delta_net),
    ("qwen3_moe", dense),
    ("qwen3_next", delta_net),
    ("zamba2", zamba2),
];

/// Families that are known but cannot be described, and why.
const UNSUPPORTED: &[(&str, &str)] = &[
    (
        "deepseek_v4",
        "its compressed attention keeps ring buffers and pages whose packing depends on the attention \
         kernel, which is not described here yet",
    ),
    (
        "phi4flash",
        "its released configuration leaves out the sizes of its Mamba states, and vLLM carries it no \
         longer",
    ),
    ("rwkv7", "no engine that is described here runs it, so there is no page layout to describe"),
];

/// What a family's reader finds.
struct Description {
    format: Format,
    layers: u64,
    caches: Vec<Cache>,
    limits: Vec<Limit>,
    own_draft: Vec<Cache>,
}

/// The families that can be read.
pub fn families() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|(name, _)| *name)
}

/// Reads a `config.json`. `name` is the model's name in messages and in its identity.
pub fn read(name: &str, text: &str) -> Result<Model, ConfigError> {
    let value: Value =
        serde_json::from_str(text).map_err(|error| ConfigError::NotJson(error.to_string()))?;
    let Value::Object(outer) = &value else { return Err(ConfigError::NotAnObject) };
    let known = || families().collect::<Vec<_>>().join(", ");
    let family = match outer.get("model_type") {
        Some(Value::String(family)) => family.as_str(),
        Some(other) => {
            return Err(ConfigError::BadField {
                field: "model_type".to_owned(),
                found: other.to_string(),
                expected: "a string".to_owned(),
            });
        }
        None => return Err(ConfigError::NoFamily { known: known() }),
    };
    let fields = Fields::new(outer, family);
    let reader = |family: &str| {
        FAMILIES.iter().find(|(known, _)| *known == family).map(|(_, reader)| reader)
    };
    let reader =
        reader(family).or_else(|| reader(fields.text_family()?)).ok_or_else(
            || match UNSUPPORTED.iter().find(|(known, _)| *known == family) {
                Some((_, reason)) => ConfigError::Unsupported {
                    family: family.to_owned(),
                    reason: (*reason).to_owned(),
                },
                None => ConfigError::UnknownFamily {
                    found: family.to_owned(),
                    nearest: suggest::nearest(family, families()).map(str::to_owned),
                    known: known(),
                },
            },
        )?;
    let Description { format, layers, caches, limits, own_draft } = reader(&fields)?;
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
