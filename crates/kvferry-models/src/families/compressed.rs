//! Families that compress latents: DeepSeek-V4 and V4.1.
//!
//! A layer keeps the latents of its last tokens. Some layers also keep one latent for several tokens, what
//! their compressor has not closed yet, and the keys of an indexer. Latents are records with their scales,
//! in the formats that the engine's kernels read.

use kvferry_layout::Format;

use super::parts::{attention_heads, states};
use crate::config::Fields;
use crate::error::ConfigError;
use crate::facts::Description;
use crate::model::{Cache, Limit, Place, Rule};

/// What a family's kernels keep, as vLLM has it.
struct Records {
    /// The engine's name for them.
    name: &'static str,
    /// Bytes of the latent of a window's token, and of its scales.
    window: (u32, u32),
    /// Bytes of a latent that stays, and of its scales.
    kept: (u32, u32),
    /// Bytes to a multiple of which every block is rounded up.
    align: u64,
    /// Tokens in a block of the sliding window.
    window_block: u64,
}

/// A size of latents that the kernels are written for.
const LATENT: u64 = 512;

impl Records {
    /// A latent for every `tokens` tokens.
    fn latent(&self, at: Place, tokens: u32, window: Option<u64>) -> Result<Cache, ConfigError> {
        let (data, scales) = if window.is_some() { self.window } else { self.kept };
        let name = format!("{} {}", self.name, data + scales);
        let formats = [
            ("record", &Format::new(&name, data)),
            ("scales", &Format::new(format!("{name} scales"), scales)),
        ];
        let mut cache = states().cache("latent planes", at, &[], &formats, window)?.every(tokens);
        cache.align = Some(self.align);
        cache.block = window.map(|_| self.window_block);
        Ok(cache)
    }

    fn indexer(&self, layer: u64, tokens: u32, size: u64) -> Result<Cache, ConfigError> {
        let at = Place::Layer(layer);
        let mut cache = states().cache("indexer", at, &[("size", size)], &[], None)?.every(tokens);
        cache.align = Some(self.align);
        Ok(cache)
    }

    /// The numbers and scores of the tokens that a compressor has not closed yet. Where its groups
    /// overlap, it looks at the group before, too, and keeps numbers and scores for both.
    fn open(&self, at: Place, size: u64, compression: Compression) -> Result<Cache, ConfigError> {
        let Compression { tokens, groups, block } = compression;
        let (sizes, window) = ([("size", 2 * groups * size)], groups * u64::from(tokens));
        let formats = [("model", &Format::new("f32", 4))];
        let mut cache = states().cache("latent", at, &sizes, &formats, Some(window))?;
        cache.align = Some(self.align);
        cache.block = Some(block);
        Ok(cache)
    }
}

/// How a compressor of DeepSeek-V4 works.
#[derive(Clone, Copy)]
struct Compression {
    /// Tokens in a group.
    tokens: u32,
    /// Groups that make a latent.
    groups: u64,
    /// Tokens in a block of what is still open.
    block: u64,
}

const COMPRESSIONS: [Compression; 2] = [
    Compression { tokens: 4, groups: 2, block: 4 },
    Compression { tokens: 128, groups: 1, block: 8 },
];

pub(super) fn deepseek_v4(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    let latent_bytes = (576, 8);
    let records = Records {
        name: "fp8_ds_mla",
        window: latent_bytes,
        kept: latent_bytes,
        align: 576,
        window_block: 64,
    };
    let (layers, size, window) =
        (fields.layers()?, latent(fields)?, fields.count("sliding_window")?);
    let ratios = ratios(fields, layers, &[0, 1, 4, 128])?;
    let mut caches = vec![];
    for (layer, &ratio) in (0u64..).zip(&ratios) {
        let module = |module| Place::Module { layer, module };
        let compression = COMPRESSIONS.into_iter().find(|it| it.tokens == ratio);
        let Some(compression) = compression else {
            caches.push(records.latent(Place::Layer(layer), 1, Some(window))?);
            continue;
        };
        // In the order in which the engine makes the modules. Only what is compressed a little has an
        // indexer.
        if compression.groups > 1 {
            let keys = fields.count("index_head_dim")?;
            caches.push(records.indexer(layer, ratio, keys)?);
            let at = module("attn.indexer.compressor.state_cache");
            caches.push(records.open(at, keys, compression)?);
        }
        caches.push(records.latent(module("attn.swa_cache"), 1, Some(window))?);
        caches.push(records.latent(module("attn"), ratio, None)?);
        caches.push(records.open(module("attn.compressor.state_cache"), size, compression)?);
    }
    let drafts = fields.number("num_nextn_predict_layers")?;
    if drafts > 0 {
        fields.check_layers("num_nextn_predict_layers", drafts)?;
    }
    let draft = |number| records.latent(Place::Draft { number, layers }, 1, Some(window));
    let own_draft = (0..drafts).map(draft).collect::<Result<_, _>>()?;
    let (format, limits) = (states().model_format(fields)?, limits(fields)?);
    Ok(Description { format, layers, caches, limits, own_draft })
}

pub(super) fn deepseek_v41(fields: &Fields<'_>) -> Result<Description, ConfigError> {
    // As on GPUs of the Blackwell generation; on others the records are those of V4. The kernels that
    // the engine prefers there read latents of 4 bits.
    let heads = fields.count("num_attention_heads")?;
    let preferred = heads == fields.count("o_groups")? * HEADS_OF_A_GROUP;
    let (name, kept) =
        if preferred { ("nvfp4_ds_mla", (256, 32)) } else { ("fp8_ds_mla", (512, 16)) };
    let records = Records { name, window: (512, 16), kept, align: 512, window_block: 32 };
    let (layers, size, window) =
        (fields.layers()?, latent(fields)?, fields.count("sliding_window")?);
    let ratios = ratios(fields, layers, &[0, 1, 2])?;
    let sources = fields.numbers("kv_source_layer_ids", layers)?;
    let sources = sources.ok_or_else(|| fields.missing("kv_source_layer_ids"))?;
    let mut caches = vec![];
    for (layer, &ratio) in (0u64..).zip(&ratios) {
        if !sources.contains(&layer) || ratio == 0 {
            caches.push(records.latent(Place::Layer(layer), 1, Some(window))?);
            continue;
        }
        let module = |module| Place::Module { layer, module };
        // The layers up to the next source read what this one keeps.
        let next = sources.iter().copied().filter(|other| *other > layer).min().unwrap_or(layers);
        let readers = (layer..next).rev().find(|it| ratios[usize::try_from(*it).unwrap_or(0)] > 0);
        let read_until = u32::try_from(readers.unwrap_or(layer)).unwrap_or(u32::MAX);
        let mut shared = vec![
            records.latent(module("attn"), ratio, None)?,
            records.indexer(layer, ratio, fields.count("index_head_dim")?)?,
        ];
        for cache in &mut shared {
            cache.read_until = read_until;
        }
        caches.append(&mut shared);
        caches.push(records.latent(module("attn.swa_cache"), 1, Some(window))?);
        if ratio > 1 {
            // One ring for a sequence: a power of two that holds a step's drafts.
            let sizes = [("parts", 1), ("slots", RING_SLOTS), ("size", 2 * size)];
            let formats = [("model", &Format::new("f32", 4))];
            let at = Place::Layer(layer);
            caches.push(states().cache("ring", at, &sizes, &formats, None)?);
        }
    }
    let (format, limits) = (states().model_format(fields)?, limits(fields)?);
    // What its draft keeps is not described here.
    Ok(Description { format, layers, caches, limits, own_draft: vec![] })
}

/// Attention heads for each group of output heads, as the kernels have it that V4.1 prefers.
const HEADS_OF_A_GROUP: u64 = 8;

/// Slots of a ring, without speculation. Engines keep more where a step has more tokens.
const RING_SLOTS: u64 = 8;

fn latent(fields: &Fields<'_>) -> Result<u64, ConfigError> {
    match fields.count("head_dim")? {
        LATENT => Ok(LATENT),
        other => Err(fields.bad("head_dim", other, LATENT.to_string())),
    }
}

/// The compression of every layer; entries behind the last layer are for drafts.
fn ratios(fields: &Fields<'_>, layers: u64, known: &[u32]) -> Result<Vec<u32>, ConfigError> {
    let field = "compress_ratios";
    let found = fields.numbers(field, 1 << 20)?.ok_or_else(|| fields.missing(field))?;
    let ratio = |ratio: &u64| {
        let known_one = known.iter().copied().find(|it| u64::from(*it) == *ratio);
        known_one.ok_or_else(|| {
            let known: Vec<_> = known.iter().map(u32::to_string).collect();
            fields.bad(field, ratio, format!("made of {}", known.join(", ")))
        })
    };
    let ratios: Vec<u32> = found.iter().map(ratio).collect::<Result<_, _>>()?;
    match ratios.get(..usize::try_from(layers).unwrap_or(usize::MAX)) {
        Some(own) => Ok(own.to_vec()),
        None => {
            let found = format!("{} entries", ratios.len());
            Err(fields.bad(field, found, format!("at least one entry for each of {layers} layers")))
        }
    }
}

fn limits(fields: &Fields<'_>) -> Result<Vec<Limit>, ConfigError> {
    let groups = Limit {
        what: "groups of output heads".to_owned(),
        count: fields.count("o_groups")?,
        rule: Rule::Divides,
    };
    Ok(vec![attention_heads(fields)?, groups])
}
