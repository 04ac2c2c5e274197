//! Families with Mamba layers whose order no plain pattern gives.

use kvferry_layout::Format;
use serde_json::{Map, Value, json};

use super::parts::{Heads, attention_heads, columns, states};
use crate::config::Fields;
use crate::error::ConfigError;
use crate::facts::Description;
use crate::model::{Cache, Limit, Place};

/// Mamba2 states.
struct Mamba2 {
    format: Format,
    state_format: Format,
    inner: u64,
    heads: u64,
    head: u64,
    groups: u64,
    state: u64,
    columns: u64,
}

impl Mamba2 {
    fn sizes(&self) -> [(&'static str, u64); 6] {
        [
            ("inner", self.inner),
            ("heads", self.heads),
            ("head", self.head),
            ("groups", self.groups),
            ("state", self.state),
            ("columns", self.columns),
        ]
    }

    fn cache(&self, at: Place) -> Result<Cache, ConfigError> {
        let formats = [("model", &self.format), ("state", &self.state_format)];
        Ok(states().cache("mamba2", at, &self.sizes(), &formats, None)?)
    }

    fn limits(&self) -> Result<Vec<Limit>, ConfigError> {
        Ok(states().limits("mamba2", &self.sizes())?)
    }
}

/// The configuration of a checkpoint as `mamba_ssm` saves it, which has no `model_type`, in the form that
/// engines need; `None` where it is none. What it leaves out is as in that library.
pub(super) fn state_spaces(
    config: &Map<String, Value>,
) -> Result<Option<Map<String, Value>>, ConfigError> {
    let Some(Value::Object(states)) = config.get("ssm_cfg") else { return Ok(None) };
    if config.contains_key("model_type") {
        return Ok(None);
    }
    let fields = Fields::new(config, "mamba_ssm");
    let inner = Fields::new(states, "mamba_ssm");
    if let Some(Value::Array(layers)) = config.get("attn_layer_idx")
        && !layers.is_empty()
    {
        let found = format!("{} layers", layers.len());
        return Err(fields.bad(
            "attn_layer_idx",
            found,
            "empty: no engine runs attention beside it",
        ));
    }
    let size = |name, default| Ok::<_, ConfigError>(inner.count_if_any(name)?.unwrap_or(default));
    let (hidden, layers, expand) =
        (fields.count("d_model")?, fields.count("n_layer")?, size("expand", 2)?);
    let columns = size("d_conv", 4)?;
    let converted = match inner.text("layer")?.unwrap_or("Mamba1") {
        "Mamba1" => json!({
            "model_type": "mamba",
            "intermediate_size": expand * hidden,
            "state_size": size("d_state", 16)?,
        }),
        "Mamba2" => {
            let head = size("headdim", 64)?;
            json!({
                "model_type": "mamba2",
                "expand": expand,
                "head_dim": head,
                "num_heads": expand * hidden / head,
                "n_groups": size("ngroups", 1)?,
                "state_size": size("d_state", 128)?,
            })
        }
        other => return Err(inner.bad("ssm_cfg.layer", other, "Mamba1 or Mamba2")),
    };
    let Value::Object(mut converted) = converted else { return Ok(None) };
    for (name, value) in
        [("hidden_size", hidden), ("num_hidden_layers", layers), ("conv_kernel", columns)]
    {
        converted.insert(name.to_owned(), value.into());
    }
    Ok(Some(converted))
}

pub(super) fn nemotron_h(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let heads = Heads::read(fields)?;
    let blocks = nemotron_blocks(fields, "hybrid_override_pattern", "layers_block_type")?;
    let blocks = blocks.ok_or_else(|| fields.missing("hybrid_override_pattern"))?;
    let layers = fields.check_layers("layers_block_type", blocks.len() as u64)?;
    if let Some(stated) = fields.count_if_any("num_hidden_layers")?
        && stated != layers
    {
        let expected = format!("{layers}, the number of blocks in the layer pattern");
        return Err(fields.bad("num_hidden_layers", stated, expected));
    }
    // The engine keeps this family's state in 32 bits unless the configuration says otherwise.
    let state_format = states().format_in(fields, "mamba_ssm_cache_dtype")?;
    let (count, head) = (fields.count("mamba_num_heads")?, fields.count("mamba_head_dim")?);
    let mamba = Mamba2 {
        format: heads.format.clone(),
        state_format: state_format.unwrap_or_else(|| Format::new("f32", 4)),
        inner: count * head,
        heads: count,
        head,
        groups: fields.count("n_groups")?,
        state: fields.count("ssm_state_size")?,
        columns: columns(fields, "conv_kernel")?,
    };
    let cache = |at, block: Block| match block {
        Block::Mamba => Some(mamba.cache(at)),
        Block::Attention => Some(heads.cache(at, None)),
        Block::Other => None,
    };
    let layered = (0u64..).zip(&blocks);
    let caches = layered.filter_map(|(layer, &block)| cache(Place::Layer(layer), block));
    let caches = caches.collect::<Result<_, _>>()?;
    let drafts = nemotron_blocks(fields, "mtp_hybrid_override_pattern", "mtp_layers_block_type")?;
    let rounds = fields.number("num_nextn_predict_layers")?;
    if rounds > 0 {
        fields.check_layers("num_nextn_predict_layers", rounds)?;
    }
    let drafts = drafts.unwrap_or_default();
    fields.check_layers("num_nextn_predict_layers", 1 + rounds * drafts.len() as u64)?;
    let drafts = (0..rounds).flat_map(|_| drafts.iter().copied());
    let own_draft = drafts
        .zip(0u64..)
        .filter_map(|(block, number)| cache(Place::Draft { number, layers }, block))
        .collect::<Result<_, _>>()?;
    let mut limits = heads.limits(fields)?;
    limits.extend(mamba.limits()?);
    Ok(Description { format: heads.format.clone(), layers, caches, limits, own_draft })
}

#[derive(Clone, Copy)]
enum Block {
    Mamba,
    Attention,
    Other,
}

fn nemotron_blocks(
    fields: &Fields<'_>,
    pattern: &str,
    list: &str,
) -> Result<Option<Vec<Block>>, ConfigError> {
    if let Some(words) = fields.words(list)? {
        let block = |word: &str| match word {
            "mamba" | "linear_attention" => Ok(Block::Mamba),
            "attention" | "full_attention" => Ok(Block::Attention),
            "moe" | "mlp" => Ok(Block::Other),
            other => Err(fields.bad(list, other, "mamba, attention, moe or mlp")),
        };
        return words.into_iter().map(block).collect::<Result<_, _>>().map(Some);
    }
    let Some(letters) = fields.text(pattern)? else { return Ok(None) };
    let block = |letter| match letter {
        'M' => Ok(Block::Mamba),
        '*' => Ok(Block::Attention),
        'E' | '-' => Ok(Block::Other),
        other => Err(fields.bad(pattern, format!("'{other}'"), "made of M, *, E and -")),
    };
    letters.chars().map(block).collect::<Result<_, _>>().map(Some)
}

pub(super) fn zamba2(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let layers = fields.layers()?;
    // Every layer has a Mamba mixer. The "hybrid" ones also call one of the shared attention blocks,
    // which keeps keys and values for each of its calls.
    let heads = Heads { count: fields.count("num_attention_heads")?, ..Heads::read(fields)? };
    let words = fields.layer_words("layers_block_type", layers)?;
    let words = words.ok_or_else(|| fields.missing("layers_block_type"))?;
    let mamba = Mamba2 {
        state_format: heads.format.clone(),
        format: heads.format.clone(),
        inner: fields.count("mamba_expand")? * fields.count("hidden_size")?,
        heads: fields.count("n_mamba_heads")?,
        head: fields.count("mamba_headdim")?,
        groups: fields.count("mamba_ngroups")?,
        state: fields.count("mamba_d_state")?,
        columns: columns(fields, "mamba_d_conv")?,
    };
    let blocks = fields.count_if_any("num_mem_blocks")?.unwrap_or(1);
    let mut calls = vec![];
    for (layer, word) in (0u64..).zip(words) {
        match word.as_str() {
            "hybrid" => calls.push(layer),
            "mamba" | "linear_attention" => {}
            other => return Err(fields.bad("layers_block_type", other, "hybrid or mamba")),
        }
    }
    // The engine makes the shared blocks first, one after the other, each with all of its calls.
    let order = (0..blocks.min(layers)).flat_map(|block| {
        (0u64..)
            .zip(&calls)
            .filter(move |(call, _)| call % blocks == block)
            .map(|(_, layer)| *layer)
    });
    let attention = order.map(|layer| heads.cache(Place::Layer(layer), None));
    let mixers = (0..layers).map(|layer| mamba.cache(Place::Layer(layer)));
    let caches = attention.chain(mixers).collect::<Result<_, _>>()?;
    let mut limits = vec![attention_heads(fields)?];
    limits.extend(mamba.limits()?);
    Ok(Description { format: heads.format, layers, caches, limits, own_draft: vec![] })
}
