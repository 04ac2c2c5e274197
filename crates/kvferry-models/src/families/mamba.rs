//! Families with Mamba layers, of both generations.

use kvferry_layout::Format;

use super::Description;
use super::parts::{
    Heads, Place, Section, attention_heads, conv, expanded, kernel, mixed, recurrent,
};
use crate::config::Fields;
use crate::error::ConfigError;
use crate::model::{Cache, Limit, Recurrence, Rule, Sort};

/// Mamba2 states.
struct Mamba2 {
    format: Format,
    state_format: Format,
    inner: u64,
    heads: u64,
    head: u64,
    groups: u64,
    state: u64,
    kernel: u64,
}

impl Mamba2 {
    fn check(self, fields: &Fields<'_>, heads: &str) -> Result<Self, ConfigError> {
        if self.heads.checked_mul(self.head) != Some(self.inner) {
            let expected =
                format!("the inner width {} divided by the head size {}", self.inner, self.head);
            return Err(fields.bad(heads, self.heads, expected));
        }
        Ok(self)
    }

    fn cache(&self, at: Place) -> Cache {
        let section = |name, channels, units| Section { name, channels, units };
        let sections = [
            section("conv.x", self.inner, self.heads),
            section("conv.b", self.groups * self.state, self.groups),
            section("conv.c", self.groups * self.state, self.groups),
        ];
        let axes = [("head", self.heads), ("dim", self.head), ("state", self.state)];
        let tensors = vec![
            conv(at, &self.format, &sections, self.kernel, true),
            recurrent(at, &self.state_format, axes, self.heads),
        ];
        at.cache(Sort::Recurrent(Recurrence::Mamba2), tensors)
    }

    fn limits(&self) -> [Limit; 2] {
        [
            Limit { what: "Mamba heads", count: self.heads, rule: Rule::Divides },
            Limit { what: "Mamba groups", count: self.groups, rule: Rule::DividesOrOne },
        ]
    }
}

/// The Mamba2 fields that Bamba, Granite and Falcon share.
fn bamba_states(fields: &Fields<'_>, inner: u64) -> Result<Mamba2, ConfigError> {
    let heads = fields.count("mamba_n_heads")?;
    let head = match fields.text("mamba_d_head") {
        Ok(Some("auto")) => inner / heads,
        _ => fields.count("mamba_d_head")?,
    };
    let format = fields.format()?;
    Mamba2 {
        state_format: format.clone(),
        format,
        inner,
        heads,
        head,
        groups: fields.count("mamba_n_groups")?,
        state: fields.count("mamba_d_state")?,
        kernel: kernel(fields, "mamba_d_conv")?,
    }
    .check(fields, "mamba_n_heads")
}

pub(super) fn bamba(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let (layers, heads) = (fields.layers()?, Heads::read(fields)?);
    let mamba = bamba_states(fields, expanded(fields, "mamba_expand")?)?;
    let attention = fields.numbers("attn_layer_indices", layers)?.unwrap_or_default();
    let each = |layer| {
        let at = Place::Layer(layer);
        Ok(Some(match attention.contains(&layer) {
            true => heads.cache(at, None),
            false => mamba.cache(at),
        }))
    };
    mixed(fields, layers, &heads, each, mamba.limits())
}

pub(super) fn granite_hybrid(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let (layers, heads) = (fields.layers()?, Heads::read(fields)?);
    let mamba = bamba_states(fields, expanded(fields, "mamba_expand")?)?;
    let words = fields.layer_words("layer_types", layers)?;
    let words = words.ok_or_else(|| fields.missing("layer_types"))?;
    let each = |layer: u64| {
        let at = Place::Layer(layer);
        match words[layer as usize] {
            "attention" | "full_attention" => Ok(Some(heads.cache(at, None))),
            "mamba" | "linear_attention" => Ok(Some(mamba.cache(at))),
            other => Err(fields.bad("layer_types", other, "attention or mamba")),
        }
    };
    mixed(fields, layers, &heads, each, mamba.limits())
}

pub(super) fn falcon_h1(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let (layers, heads) = (fields.layers()?, Heads::read(fields)?);
    let inner = match fields.count_if_any("mamba_d_ssm")? {
        Some(inner) => inner,
        None => expanded(fields, "mamba_expand")?,
    };
    let mamba = bamba_states(fields, inner)?;
    let each = |layer| {
        let at = Place::Layer(layer);
        [heads.cache(at, None), mamba.cache(at)]
    };
    let mut limits = heads.limits(fields)?;
    limits.extend(mamba.limits());
    Ok(Description {
        caches: (0..layers).flat_map(each).collect(),
        limits,
        format: heads.format,
        layers,
        own_draft: vec![],
    })
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
    let state_format = fields.text("mamba_ssm_cache_dtype")?.unwrap_or("float32");
    let (count, head) = (fields.count("mamba_num_heads")?, fields.count("mamba_head_dim")?);
    let mamba = Mamba2 {
        format: fields.format()?,
        state_format: fields.format_named("mamba_ssm_cache_dtype", state_format)?,
        inner: count * head,
        heads: count,
        head,
        groups: fields.count("n_groups")?,
        state: fields.count("ssm_state_size")?,
        kernel: kernel(fields, "conv_kernel")?,
    };
    let cache = |at, block: Block| match block {
        Block::Mamba => Some(mamba.cache(at)),
        Block::Attention => Some(heads.cache(at, None)),
        Block::Other => None,
    };
    let each = |layer: u64| Ok(cache(Place::Layer(layer), blocks[layer as usize]));
    let mut description = mixed(fields, layers, &heads, each, mamba.limits())?;
    let drafts = nemotron_blocks(fields, "mtp_hybrid_override_pattern", "mtp_layers_block_type")?;
    let rounds = fields.number("num_nextn_predict_layers")?;
    if rounds > 0 {
        fields.check_layers("num_nextn_predict_layers", rounds)?;
    }
    let drafts = drafts.unwrap_or_default();
    fields.check_layers("num_nextn_predict_layers", 1 + rounds * drafts.len() as u64)?;
    let drafts = (0..rounds).flat_map(|_| drafts.iter().copied());
    description.own_draft = drafts
        .zip(0u64..)
        .filter_map(|(block, number)| cache(Place::Draft { number, layers }, block))
        .collect();
    Ok(description)
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
    let format = fields.format()?;
    let mamba = Mamba2 {
        state_format: format.clone(),
        format,
        inner: expanded(fields, "mamba_expand")?,
        heads: fields.count("n_mamba_heads")?,
        head: fields.count("mamba_headdim")?,
        groups: fields.count("mamba_ngroups")?,
        state: fields.count("mamba_d_state")?,
        kernel: kernel(fields, "mamba_d_conv")?,
    }
    .check(fields, "n_mamba_heads")?;
    let blocks = fields.count_if_any("num_mem_blocks")?.unwrap_or(1);
    let mut calls = vec![];
    for (layer, word) in (0u64..).zip(words) {
        match word {
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
    let mut caches: Vec<Cache> =
        order.map(|layer| heads.cache(Place::Layer(layer), None)).collect();
    caches.extend((0..layers).map(|layer| mamba.cache(Place::Layer(layer))));
    let mut limits = vec![attention_heads(fields)?];
    limits.extend(mamba.limits());
    Ok(Description { format: heads.format, layers, caches, limits, own_draft: vec![] })
}

pub(super) fn mamba2(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let layers = fields.layers()?;
    let format = fields.format()?;
    let mamba = Mamba2 {
        state_format: format.clone(),
        format,
        inner: expanded(fields, "expand")?,
        heads: fields.count("num_heads")?,
        head: fields.count("head_dim")?,
        groups: fields.count("n_groups")?,
        state: fields.count("state_size")?,
        kernel: kernel(fields, "conv_kernel")?,
    }
    .check(fields, "num_heads")?;
    let caches = (0..layers).map(|layer| mamba.cache(Place::Layer(layer))).collect();
    let limits = mamba.limits().to_vec();
    Ok(Description { format: mamba.format, layers, caches, limits, own_draft: vec![] })
}

/// Mamba1 states.
struct Mamba1 {
    format: Format,
    inner: u64,
    state: u64,
    kernel: u64,
}

impl Mamba1 {
    fn cache(&self, at: Place) -> Cache {
        let sections = [Section { name: "conv.x", channels: self.inner, units: self.inner }];
        // The engine keeps no columns for speculative tokens here.
        let conv = conv(at, &self.format, &sections, self.kernel, false);
        let axes = [("channel", self.inner), ("state", self.state)];
        let tensors = vec![conv, recurrent(at, &self.format, axes, self.inner)];
        at.cache(Sort::Recurrent(Recurrence::Mamba1), tensors)
    }

    fn limit(&self) -> Limit {
        Limit { what: "Mamba channels", count: self.inner, rule: Rule::Divides }
    }
}

pub(super) fn mamba1(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let layers = fields.layers()?;
    let inner = match fields.count_if_any("intermediate_size")? {
        Some(inner) => inner,
        None => expanded(fields, "expand")?,
    };
    let mamba = Mamba1 {
        format: fields.format()?,
        inner,
        state: fields.count("state_size")?,
        kernel: kernel(fields, "conv_kernel")?,
    };
    let caches = (0..layers).map(|layer| mamba.cache(Place::Layer(layer))).collect();
    let limits = vec![mamba.limit()];
    Ok(Description { format: mamba.format, layers, caches, limits, own_draft: vec![] })
}

pub(super) fn jamba(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let (layers, heads) = (fields.layers()?, Heads::read(fields)?);
    let (period, offset) =
        (fields.count("attn_layer_period")?, fields.number("attn_layer_offset")?);
    let mamba = Mamba1 {
        format: fields.format()?,
        inner: expanded(fields, "mamba_expand")?,
        state: fields.count("mamba_d_state")?,
        kernel: kernel(fields, "mamba_d_conv")?,
    };
    let each = |layer| {
        let at = Place::Layer(layer);
        Ok(Some(match layer % period == offset {
            true => heads.cache(at, None),
            false => mamba.cache(at),
        }))
    };
    mixed(fields, layers, &heads, each, [mamba.limit()])
}
