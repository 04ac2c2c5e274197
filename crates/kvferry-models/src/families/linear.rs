//! Families with delta rules, linear attention or short convolutions.

use kvferry_layout::Format;

use super::Description;
use super::parts::{
    Heads, Latents, Place, Section, attention_heads, conv, kernel, mixed, recurrent,
};
use crate::config::Fields;
use crate::error::ConfigError;
use crate::model::{Limit, Recurrence, Rule, Sort};

pub(super) fn delta_net(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let (layers, heads) = (fields.layers()?, Heads::read(fields)?);
    let format = fields.format()?;
    let state_format = match fields.text("mamba_ssm_dtype")? {
        Some(name) => fields.format_named("mamba_ssm_dtype", name)?,
        None => format.clone(),
    };
    let (keys, values) =
        (fields.count("linear_num_key_heads")?, fields.count("linear_num_value_heads")?);
    let (key, value) =
        (fields.count("linear_key_head_dim")?, fields.count("linear_value_head_dim")?);
    let width = kernel(fields, "linear_conv_kernel_dim")?;
    let words = fields.layer_words("layer_types", layers)?;
    let interval = match words {
        Some(_) => 0,
        None => fields.count("full_attention_interval")?,
    };
    let each = |layer: u64| {
        let at = Place::Layer(layer);
        let full = match &words {
            None => (layer + 1).is_multiple_of(interval),
            Some(words) => match words[layer as usize] {
                "full_attention" => true,
                "linear_attention" => false,
                other => {
                    let expected = "full_attention or linear_attention";
                    return Err(fields.bad("layer_types", other, expected));
                }
            },
        };
        if full {
            return Ok(Some(heads.cache(at, None)));
        }
        let section = |name, units, size| Section { name, channels: units * size, units };
        let sections = [
            section("conv.q", keys, key),
            section("conv.k", keys, key),
            section("conv.v", values, value),
        ];
        let axes = [("head", values), ("value", value), ("key", key)];
        let tensors = vec![
            conv(at, &format, &sections, width, true),
            recurrent(at, &state_format, axes, values),
        ];
        Ok(Some(at.cache(Sort::Recurrent(Recurrence::DeltaNet), tensors)))
    };
    let limits = [
        Limit { what: "delta-net key heads", count: keys, rule: Rule::Divides },
        Limit { what: "delta-net value heads", count: values, rule: Rule::Divides },
    ];
    let mut description = mixed(fields, layers, &heads, each, limits)?;
    let drafts = fields.number("mtp_num_hidden_layers")?;
    if drafts > 0 {
        fields.check_layers("mtp_num_hidden_layers", drafts)?;
    }
    description.own_draft =
        (0..drafts).map(|number| heads.cache(Place::Draft { number, layers }, None)).collect();
    Ok(description)
}

pub(super) fn kimi_linear(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let (layers, latents) = (fields.layers()?, Latents::read(fields)?);
    let linear = fields.object("linear_attn_config")?;
    let (heads, size) = (linear.count("num_heads")?, linear.count("head_dim")?);
    let width = kernel(&linear, "short_conv_kernel_size")?;
    // Both lists count layers from one.
    let list = |field| linear.numbers(field, layers + 1)?.ok_or_else(|| linear.missing(field));
    let (full, kda) = (list("full_attn_layers")?, list("kda_layers")?);
    let mut caches = vec![];
    for layer in 0..layers {
        let at = Place::Layer(layer);
        match (full.contains(&(layer + 1)), kda.contains(&(layer + 1))) {
            (true, false) => latents.caches(at, &mut caches),
            (false, true) => {
                let section = |name| Section { name, channels: heads * size, units: heads };
                let sections = [section("conv.q"), section("conv.k"), section("conv.v")];
                let axes = [("head", heads), ("value", size), ("key", size)];
                // The engine keeps this state in 32 bits.
                let tensors = vec![
                    conv(at, &latents.format, &sections, width, true),
                    recurrent(at, &Format::new("f32", 4), axes, heads),
                ];
                caches.push(at.cache(Sort::Recurrent(Recurrence::Kda), tensors));
            }
            _ => {
                let found = format!("such that layer {} is in both lists or in none", layer + 1);
                let expected = "such that every layer, counted from 1, is in one of 'kda_layers' \
                                and 'full_attn_layers'";
                return Err(linear.bad("kda_layers", found, expected));
            }
        }
    }
    let limits = vec![
        attention_heads(fields)?,
        Limit { what: "delta-attention heads", count: heads, rule: Rule::Divides },
    ];
    Ok(Description { format: latents.format, layers, caches, limits, own_draft: vec![] })
}

pub(super) fn lfm2(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let (layers, heads) = (fields.layers()?, Heads::read(fields)?);
    let channels = fields.count_if_any("conv_dim")?;
    let channels = channels.map_or_else(|| fields.count("hidden_size"), Ok)?;
    let width = kernel(fields, "conv_L_cache")?;
    let words = fields.layer_words("layer_types", layers)?;
    let full = fields.numbers("full_attn_idxs", layers)?;
    if words.is_none() && full.is_none() {
        return Err(fields.missing("layer_types"));
    }
    let each = |layer: u64| {
        let at = Place::Layer(layer);
        let attends = match (&words, &full) {
            (Some(words), _) => match words[layer as usize] {
                "full_attention" => true,
                "conv" => false,
                other => return Err(fields.bad("layer_types", other, "full_attention or conv")),
            },
            (None, full) => full.as_ref().is_some_and(|full| full.contains(&layer)),
        };
        if attends {
            return Ok(Some(heads.cache(at, None)));
        }
        let sections = [Section { name: "conv.x", channels, units: channels }];
        let tensors = vec![conv(at, &heads.format, &sections, width, true)];
        Ok(Some(at.cache(Sort::Recurrent(Recurrence::ShortConv), tensors)))
    };
    let limit = Limit { what: "convolution channels", count: channels, rule: Rule::Divides };
    mixed(fields, layers, &heads, each, [limit])
}

pub(super) fn minimax(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let (layers, heads) = (fields.layers()?, Heads::read(fields)?);
    let linear = fields.count("num_attention_heads")?;
    let attends: Vec<bool> = match fields.layer_words("layer_types", layers)? {
        Some(words) => words.iter().map(|word| *word == "full_attention").collect(),
        None => {
            let list = fields.numbers("attn_type_list", 2)?;
            let list = list.ok_or_else(|| fields.missing("attn_type_list"))?;
            if list.len() as u64 != layers {
                let found = format!("{} entries", list.len());
                return Err(fields.bad("attn_type_list", found, format!("{layers} entries")));
            }
            list.iter().map(|&entry| entry == 1).collect()
        }
    };
    let each = |layer: u64| {
        let at = Place::Layer(layer);
        if attends[layer as usize] {
            return Ok(Some(heads.cache(at, None)));
        }
        let axes = [("head", linear), ("key", heads.key), ("value", heads.key)];
        let tensors = vec![recurrent(at, &heads.format, axes, linear)];
        Ok(Some(at.cache(Sort::Recurrent(Recurrence::Linear), tensors)))
    };
    mixed(fields, layers, &heads, each, [])
}
