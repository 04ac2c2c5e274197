//! Reading the configurations of model families: the one place that branches on a model's type.

use kvferry_layout::{Format, Law};
use serde_json::Value;

use crate::config::Fields;
use crate::error::ConfigError;
use crate::model::{
    Cache, Limit, Model, Packing, Recurrence, Rule, Sort, Split, State, Tensor, kind,
};
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

/// Where a cache stands.
#[derive(Clone, Copy)]
enum Place {
    Layer(u64),
    /// The n-th draft layer of a model with so many layers.
    Draft {
        number: u64,
        layers: u64,
    },
}

impl Place {
    fn state(self, name: &str) -> String {
        match self {
            Self::Layer(layer) => format!("layers.{layer}/{name}"),
            Self::Draft { number, .. } => format!("draft/layers.{number}/{name}"),
        }
    }

    fn cache(self, sort: Sort, tensors: Vec<Tensor>) -> Cache {
        let (layer, draft) = match self {
            Self::Layer(layer) => (layer, false),
            Self::Draft { layers, .. } => (layers - 1, true),
        };
        let layer = u32::try_from(layer).expect("the number of layers is limited");
        Cache { layer, draft, sort, tensors }
    }
}

/// Heads that attention layers keep.
#[derive(Clone)]
struct Heads {
    format: Format,
    count: u64,
    key: u64,
    value: u64,
}

impl Heads {
    fn read(fields: &Fields<'_>) -> Result<Self, ConfigError> {
        let attention = fields.count("num_attention_heads")?;
        let size = match fields.count_of(&["head_dim", "attention_head_dim"])? {
            Some(size) => size,
            None => divide(fields, "hidden_size", "num_attention_heads")?,
        };
        Ok(Self {
            format: fields.format()?,
            count: fields.count_if_any("num_key_value_heads")?.unwrap_or(attention),
            key: size,
            value: size,
        })
    }

    fn cache(&self, at: Place, window: Option<u64>) -> Cache {
        let state = |name, size| State {
            name: at.state(name),
            kind: kind(&self.format, [("head", self.count), ("dim", size)], Law::PER_TOKEN),
            split: Some(Split { axis: 0, units: self.count }),
        };
        let states = vec![state("k", self.key), state("v", self.value)];
        at.cache(Sort::Attention { window }, vec![Tensor { states, packing: Packing::Plain }])
    }

    fn limits(&self, fields: &Fields<'_>) -> Result<Vec<Limit>, ConfigError> {
        Ok(vec![attention_heads(fields)?, self.limit("KV heads")])
    }

    fn limit(&self, what: &'static str) -> Limit {
        Limit { what, count: self.count, rule: Rule::EitherDivides }
    }
}

fn attention_heads(fields: &Fields<'_>) -> Result<Limit, ConfigError> {
    let count = fields.count("num_attention_heads")?;
    Ok(Limit { what: "attention heads", count, rule: Rule::Divides })
}

fn divide(fields: &Fields<'_>, whole: &str, parts: &str) -> Result<u64, ConfigError> {
    let (size, count) = (fields.count(whole)?, fields.count(parts)?);
    if size % count != 0 {
        return Err(fields.bad(whole, size, format!("a multiple of '{parts}', which is {count}")));
    }
    Ok(size / count)
}

/// The sliding window where the configuration switches it on.
fn window(fields: &Fields<'_>) -> Result<Option<u64>, ConfigError> {
    fields.count_if_any("sliding_window")
}

/// Whether each layer's window slides, from `layer_types`.
fn sliding_layers(fields: &Fields<'_>, layers: u64) -> Result<Option<Vec<bool>>, ConfigError> {
    let Some(words) = fields.layer_words("layer_types", layers)? else { return Ok(None) };
    let slides = |word: &&str| match *word {
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
        caches: caches.collect(),
        limits: heads.limits(fields)?,
        format: heads.format,
        layers,
        own_draft: vec![],
    })
}

fn dense(fields: &Fields<'_>) -> Result<Description, ConfigError> {
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

fn gemma(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let layers = fields.layers()?;
    if let Some(slides) = sliding_layers(fields, layers)? {
        return attention_model(fields, |layer| slides[layer as usize]);
    }
    let default = if fields.text_family() == Some("gemma2") { 2 } else { 6 };
    let pattern = fields.count_of(&["sliding_window_pattern", "_sliding_window_pattern"])?;
    let pattern = pattern.unwrap_or(default);
    attention_model(fields, |layer| (layer + 1) % pattern != 0)
}

fn gpt_oss(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let slides = sliding_layers(fields, fields.layers()?)?;
    attention_model(fields, |layer| match &slides {
        Some(slides) => slides[layer as usize],
        None => layer % 2 == 0,
    })
}

fn gemma4(fields: &Fields<'_>) -> Result<Description, ConfigError> {
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
        caches: caches.collect(),
        limits,
        format: heads.format,
        layers,
        own_draft: vec![],
    })
}

fn mimo(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let layers = fields.layers()?;
    let tokens = fields.count("sliding_window")?;
    let format = fields.format()?;
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
        what: "attention heads of sliding layers",
        count: fields.count("swa_num_attention_heads")?,
        rule: Rule::Divides,
    };
    let limits = vec![
        attention_heads(fields)?,
        full.limit("KV heads"),
        swa_heads,
        sliding.limit("KV heads of sliding layers"),
    ];
    Ok(Description { caches: caches.collect(), limits, format, layers, own_draft: vec![] })
}

/// Multi-head latent attention, with an indexer where the configuration has one.
struct Latents {
    format: Format,
    size: u64,
    indexer: Option<u64>,
}

impl Latents {
    fn read(fields: &Fields<'_>) -> Result<Self, ConfigError> {
        Ok(Self {
            format: fields.format()?,
            size: fields.count("kv_lora_rank")? + fields.count("qk_rope_head_dim")?,
            indexer: fields.count_if_any("index_head_dim")?,
        })
    }

    fn caches(&self, at: Place, into: &mut Vec<Cache>) {
        let one = |name, kind| Tensor {
            states: vec![State { name: at.state(name), kind, split: None }],
            packing: Packing::Plain,
        };
        let latent = kind(&self.format, [("dim", self.size)], Law::PER_TOKEN);
        let sort = Sort::Latent { indexed: self.indexer.is_some() };
        if let Some(size) = self.indexer {
            // A token's key in 8 bits and one 32-bit scale for every 128 of its numbers. The kernels
            // keep a block's keys together, and its scales behind them.
            let state = |name, format, axis, length| State {
                name: at.state(name),
                kind: kind(&format, [(axis, length)], Law::PER_TOKEN),
                split: None,
            };
            let states = vec![
                state("indexer", Format::new("fp8_e4m3", 1), "dim", size),
                state("indexer.scale", Format::new("f32", 4), "scale", size.div_ceil(128)),
            ];
            let keys = Tensor { states, packing: Packing::Planes };
            into.push(at.cache(Sort::Indexer, vec![keys]));
        }
        into.push(at.cache(sort, vec![one("latent", latent)]));
    }
}

fn latent(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let (layers, latents) = (fields.layers()?, Latents::read(fields)?);
    let (mut caches, mut own_draft) = (vec![], vec![]);
    for layer in 0..layers {
        latents.caches(Place::Layer(layer), &mut caches);
    }
    let drafts = fields.number("num_nextn_predict_layers")?;
    if drafts > 0 {
        fields.check_layers("num_nextn_predict_layers", drafts)?;
    }
    for number in 0..drafts {
        latents.caches(Place::Draft { number, layers }, &mut own_draft);
    }
    let limits = vec![attention_heads(fields)?];
    Ok(Description { format: latents.format, layers, caches, limits, own_draft })
}

/// A section of a convolution's input, split in units.
struct Section {
    name: &'static str,
    channels: u64,
    units: u64,
}

fn conv(at: Place, format: &Format, sections: &[Section], kernel: u64, grows: bool) -> Tensor {
    let state = |section: &Section| State {
        name: at.state(section.name),
        kind: kind(format, [("channel", section.channels), ("column", kernel - 1)], Law::SNAPSHOT),
        split: Some(Split { axis: 0, units: section.units }),
    };
    Tensor { states: sections.iter().map(state).collect(), packing: Packing::Convolution { grows } }
}

fn recurrent<const N: usize>(
    at: Place,
    format: &Format,
    axes: [(&str, u64); N],
    units: u64,
) -> Tensor {
    let state = State {
        name: at.state("ssm"),
        kind: kind(format, axes, Law::SNAPSHOT),
        split: Some(Split { axis: 0, units }),
    };
    Tensor { states: vec![state], packing: Packing::Plain }
}

/// The width of a convolution; at least 2, so that there is something to keep.
fn kernel(fields: &Fields<'_>, field: &str) -> Result<u64, ConfigError> {
    let width = fields.count(field)?;
    if width < 2 {
        return Err(fields.bad(field, width, "at least 2"));
    }
    Ok(width)
}

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

fn expanded(fields: &Fields<'_>, expand: &str) -> Result<u64, ConfigError> {
    Ok(fields.count(expand)? * fields.count("hidden_size")?)
}

/// A model whose layers keep attention or something recurrent, or nothing.
fn mixed(
    fields: &Fields<'_>,
    layers: u64,
    heads: &Heads,
    mut each: impl FnMut(u64) -> Result<Option<Cache>, ConfigError>,
    limits: impl IntoIterator<Item = Limit>,
) -> Result<Description, ConfigError> {
    let mut caches = vec![];
    for layer in 0..layers {
        caches.extend(each(layer)?);
    }
    let mut all = heads.limits(fields)?;
    all.extend(limits);
    Ok(Description { format: heads.format.clone(), layers, caches, limits: all, own_draft: vec![] })
}

fn bamba(fields: &Fields<'_>) -> Result<Description, ConfigError> {
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

fn granite_hybrid(fields: &Fields<'_>) -> Result<Description, ConfigError> {
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

fn falcon_h1(fields: &Fields<'_>) -> Result<Description, ConfigError> {
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

fn nemotron_h(fields: &Fields<'_>) -> Result<Description, ConfigError> {
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

fn zamba2(fields: &Fields<'_>) -> Result<Description, ConfigError> {
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

fn mamba2(fields: &Fields<'_>) -> Result<Description, ConfigError> {
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

fn mamba1(fields: &Fields<'_>) -> Result<Description, ConfigError> {
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

fn jamba(fields: &Fields<'_>) -> Result<Description, ConfigError> {
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

fn delta_net(fields: &Fields<'_>) -> Result<Description, ConfigError> {
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

fn kimi_linear(fields: &Fields<'_>) -> Result<Description, ConfigError> {
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

fn lfm2(fields: &Fields<'_>) -> Result<Description, ConfigError> {
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

fn minimax(fields: &Fields<'_>) -> Result<Description, ConfigError> {
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
