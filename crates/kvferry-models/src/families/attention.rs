//! Families that only attend, with or without sliding windows.

use super::parts::{Heads, attention_heads, states};
use crate::config::Fields;
use crate::error::ConfigError;
use crate::facts::Description;
use crate::model::{Limit, Place, Rule};

/// The sliding window where the configuration switches it on.
fn window(fields: &Fields<'_>) -> Result<Option<u64>, ConfigError> {
    fields.count_if_any("sliding_window")
}

/// Whether each layer's window slides, from `layer_types`.
fn sliding_layers(fields: &Fields<'_>, layers: u64) -> Result<Option<Vec<bool>>, ConfigError> {
    let Some(words) = fields.layer_words("layer_types", layers)? else { return Ok(None) };
    let slides = |word: &String| match word.as_str() {
        "sliding_attention" => Ok(true),
        "full_attention" | "attention" => Ok(false),
        other => Err(fields.bad("layer_types", other, "sliding_attention or full_attention")),
    };
    words.iter().map(slides).collect::<Result<_, _>>().map(Some)
}

fn attention_model(
    fields: &Fields<'_>,
    slides: impl Fn(u64) -> bool,
) -> Result<Description, ConfigError> {
    let (layers, heads) = (fields.layers()?, Heads::read(fields)?);
    let tokens = window(fields)?;
    let window = |layer| if slides(layer) { tokens } else { None };
    if tokens.is_none() && (0..layers).any(&slides) {
        return Err(fields.missing("sliding_window"));
    }
    let caches = (0..layers).map(|layer| heads.cache(Place::Layer(layer), window(layer)));
    Ok(Description {
        caches: caches.collect::<Result<_, _>>()?,
        limits: heads.limits(fields)?,
        format: heads.format,
        layers,
        own_draft: vec![],
    })
}

pub(super) fn dense(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let layers = fields.layers()?;
    let has_window = window(fields)?.is_some();
    if let Some(slides) = sliding_layers(fields, layers)? {
        return attention_model(fields, |layer| slides[layer as usize]);
    }
    // Where a family can switch its window on and off, it is off unless it says otherwise, and it
    // covers the layers from `max_window_layers` on.
    let from = match fields.flag("use_sliding_window")? {
        Some(false) => layers,
        Some(true) => fields.number("max_window_layers")?,
        None if fields.has("max_window_layers") => layers,
        None => 0,
    };
    attention_model(fields, |layer| has_window && layer >= from)
}

pub(super) fn gemma(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let layers = fields.layers()?;
    if let Some(slides) = sliding_layers(fields, layers)? {
        return attention_model(fields, |layer| slides[layer as usize]);
    }
    let default = if fields.text_family() == Some("gemma2") { 2 } else { 6 };
    let pattern = fields.count_of(&["sliding_window_pattern", "_sliding_window_pattern"])?;
    let pattern = pattern.unwrap_or(default);
    attention_model(fields, |layer| (layer + 1) % pattern != 0)
}

pub(super) fn gpt_oss(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let slides = sliding_layers(fields, fields.layers()?)?;
    attention_model(fields, |layer| match &slides {
        Some(slides) => slides[layer as usize],
        None => layer % 2 == 0,
    })
}

pub(super) fn gemma4(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let (layers, heads) = (fields.layers()?, Heads::read(fields)?);
    let slides = sliding_layers(fields, layers)?.ok_or_else(|| fields.missing("layer_types"))?;
    let tokens = fields.count("sliding_window")?;
    let size = fields.count_if_any("global_head_dim")?.unwrap_or(heads.key);
    let count = fields.count_if_any("num_global_key_value_heads")?.unwrap_or(heads.count);
    let global = Heads { count, key: size, value: size, ..heads.clone() };
    // The last layers may read the memory of earlier ones and keep none.
    let shared = fields.number("num_kv_shared_layers")?;
    if shared >= layers {
        return Err(fields.bad("num_kv_shared_layers", shared, format!("less than {layers}")));
    }
    let caches = (0..layers - shared).map(|layer| match slides[layer as usize] {
        true => heads.cache(Place::Layer(layer), Some(tokens)),
        false => global.cache(Place::Layer(layer), None),
    });
    let mut limits = heads.limits(fields)?;
    limits.push(global.limit("global KV heads"));
    Ok(Description {
        caches: caches.collect::<Result<_, _>>()?,
        limits,
        format: heads.format,
        layers,
        own_draft: vec![],
    })
}

pub(super) fn mimo(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let layers = fields.layers()?;
    let tokens = fields.count("sliding_window")?;
    let format = states().model_format(fields)?;
    let full = Heads {
        format: format.clone(),
        count: fields.count("num_key_value_heads")?,
        key: fields.count("head_dim")?,
        value: fields.count("v_head_dim")?,
    };
    let sliding = Heads {
        format: format.clone(),
        count: fields.count("swa_num_key_value_heads")?,
        key: fields.count("swa_head_dim")?,
        value: fields.count("swa_v_head_dim")?,
    };
    let pattern = fields.numbers("hybrid_layer_pattern", 2)?;
    let pattern = pattern.ok_or_else(|| fields.missing("hybrid_layer_pattern"))?;
    if pattern.len() as u64 != layers {
        let found = format!("{} entries", pattern.len());
        return Err(fields.bad("hybrid_layer_pattern", found, format!("{layers} entries")));
    }
    let caches = (0..layers).map(|layer| match pattern[layer as usize] {
        0 => full.cache(Place::Layer(layer), None),
        _ => sliding.cache(Place::Layer(layer), Some(tokens)),
    });
    let swa_heads = Limit {
        what: "attention heads of sliding layers".to_owned(),
        count: fields.count("swa_num_attention_heads")?,
        rule: Rule::Divides,
    };
    let limits = vec![
        attention_heads(fields)?,
        full.limit("KV heads"),
        swa_heads,
        sliding.limit("KV heads of sliding layers"),
    ];
    Ok(Description {
        caches: caches.collect::<Result<_, _>>()?,
        limits,
        format,
        layers,
        own_draft: vec![],
    })
}
