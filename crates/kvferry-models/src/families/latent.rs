//! Families with latent attention: alone, with a sparse indexer, or beside delta attention.

use kvferry_layout::Format;

use super::parts::{attention_heads, columns, states};
use crate::config::Fields;
use crate::error::ConfigError;
use crate::facts::Description;
use crate::model::{Cache, Place, Sort};

/// Multi-head latent attention, with an indexer where the configuration has one.
struct Latents {
    format: Format,
    size: u64,
    indexer: Option<u64>,
}

impl Latents {
    fn read(fields: &Fields<'_>) -> Result<Self, ConfigError> {
        Ok(Self {
            format: states().model_format(fields)?,
            size: fields.count("kv_lora_rank")? + fields.count("qk_rope_head_dim")?,
            indexer: fields.count_if_any("index_head_dim")?,
        })
    }

    fn caches(&self, at: Place, into: &mut Vec<Cache>) -> Result<(), ConfigError> {
        if let Some(size) = self.indexer {
            into.push(states().cache("indexer", at, &[("size", size)], &[], None)?);
        }
        let formats = [("model", &self.format)];
        let mut latent = states().cache("latent", at, &[("size", self.size)], &formats, None)?;
        latent.sort = Sort::Latent { indexed: self.indexer.is_some(), window: None };
        into.push(latent);
        Ok(())
    }
}

pub(super) fn latent(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let (layers, latents) = (fields.layers()?, Latents::read(fields)?);
    let (mut caches, mut own_draft) = (vec![], vec![]);
    for layer in 0..layers {
        latents.caches(Place::Layer(layer), &mut caches)?;
    }
    let drafts = fields.number("num_nextn_predict_layers")?;
    if drafts > 0 {
        fields.check_layers("num_nextn_predict_layers", drafts)?;
    }
    for number in 0..drafts {
        latents.caches(Place::Draft { number, layers }, &mut own_draft)?;
    }
    let limits = vec![attention_heads(fields)?];
    Ok(Description { format: latents.format, layers, caches, limits, own_draft })
}

pub(super) fn kimi_linear(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let (layers, latents) = (fields.layers()?, Latents::read(fields)?);
    let linear = fields.object("linear_attn_config")?;
    let sizes = [
        ("heads", linear.count("num_heads")?),
        ("size", linear.count("head_dim")?),
        ("columns", columns(&linear, "short_conv_kernel_size")?),
    ];
    // The engine keeps this state in 32 bits.
    let formats = [("model", &latents.format), ("state", &Format::new("f32", 4))];
    // Both lists count layers from one.
    let list = |field| linear.numbers(field, layers + 1)?.ok_or_else(|| linear.missing(field));
    let (full, kda) = (list("full_attn_layers")?, list("kda_layers")?);
    let mut caches = vec![];
    for layer in 0..layers {
        let at = Place::Layer(layer);
        match (full.contains(&(layer + 1)), kda.contains(&(layer + 1))) {
            (true, false) => latents.caches(at, &mut caches)?,
            (false, true) => caches.push(states().cache("kda", at, &sizes, &formats, None)?),
            _ => {
                let found = format!("such that layer {} is in both lists or in none", layer + 1);
                let expected = "such that every layer, counted from 1, is in one of 'kda_layers' \
                                and 'full_attn_layers'";
                return Err(linear.bad("kda_layers", found, expected));
            }
        }
    }
    let mut limits = vec![attention_heads(fields)?];
    limits.extend(states().limits("kda", &sizes)?);
    Ok(Description { format: latents.format.clone(), layers, caches, limits, own_draft: vec![] })
}
