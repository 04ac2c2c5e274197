//! What the families are made of: heads, latents, convolutions, recurrent states.

use kvferry_layout::{Format, Law};

use super::Description;
use crate::config::Fields;
use crate::error::ConfigError;
use crate::model::{Cache, Limit, Packing, Rule, Sort, Split, State, Tensor, kind};

/// Where a cache stands.
#[derive(Clone, Copy)]
pub(super) enum Place {
    Layer(u64),
    /// The n-th draft layer of a model with so many layers.
    Draft {
        number: u64,
        layers: u64,
    },
}

impl Place {
    pub(super) fn state(self, name: &str) -> String {
        match self {
            Self::Layer(layer) => format!("layers.{layer}/{name}"),
            Self::Draft { number, .. } => format!("draft/layers.{number}/{name}"),
        }
    }

    pub(super) fn cache(self, sort: Sort, tensors: Vec<Tensor>) -> Cache {
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
pub(super) struct Heads {
    pub(super) format: Format,
    pub(super) count: u64,
    pub(super) key: u64,
    pub(super) value: u64,
}

impl Heads {
    pub(super) fn read(fields: &Fields<'_>) -> Result<Self, ConfigError> {
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

    pub(super) fn cache(&self, at: Place, window: Option<u64>) -> Cache {
        let state = |name, size| State {
            name: at.state(name),
            kind: kind(&self.format, [("head", self.count), ("dim", size)], Law::PER_TOKEN),
            split: Some(Split { axis: 0, units: self.count }),
        };
        let states = vec![state("k", self.key), state("v", self.value)];
        at.cache(Sort::Attention { window }, vec![Tensor { states, packing: Packing::Plain }])
    }

    pub(super) fn limits(&self, fields: &Fields<'_>) -> Result<Vec<Limit>, ConfigError> {
        Ok(vec![attention_heads(fields)?, self.limit("KV heads")])
    }

    pub(super) fn limit(&self, what: &'static str) -> Limit {
        Limit { what, count: self.count, rule: Rule::EitherDivides }
    }
}

pub(super) fn attention_heads(fields: &Fields<'_>) -> Result<Limit, ConfigError> {
    let count = fields.count("num_attention_heads")?;
    Ok(Limit { what: "attention heads", count, rule: Rule::Divides })
}

pub(super) fn divide(fields: &Fields<'_>, whole: &str, parts: &str) -> Result<u64, ConfigError> {
    let (size, count) = (fields.count(whole)?, fields.count(parts)?);
    if size % count != 0 {
        return Err(fields.bad(whole, size, format!("a multiple of '{parts}', which is {count}")));
    }
    Ok(size / count)
}

/// Multi-head latent attention, with an indexer where the configuration has one.
pub(super) struct Latents {
    pub(super) format: Format,
    pub(super) size: u64,
    pub(super) indexer: Option<u64>,
}

impl Latents {
    pub(super) fn read(fields: &Fields<'_>) -> Result<Self, ConfigError> {
        Ok(Self {
            format: fields.format()?,
            size: fields.count("kv_lora_rank")? + fields.count("qk_rope_head_dim")?,
            indexer: fields.count_if_any("index_head_dim")?,
        })
    }

    pub(super) fn caches(&self, at: Place, into: &mut Vec<Cache>) {
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

/// A section of a convolution's input, split in units.
pub(super) struct Section {
    pub(super) name: &'static str,
    pub(super) channels: u64,
    pub(super) units: u64,
}

pub(super) fn conv(
    at: Place,
    format: &Format,
    sections: &[Section],
    kernel: u64,
    grows: bool,
) -> Tensor {
    let state = |section: &Section| State {
        name: at.state(section.name),
        kind: kind(format, [("channel", section.channels), ("column", kernel - 1)], Law::SNAPSHOT),
        split: Some(Split { axis: 0, units: section.units }),
    };
    Tensor { states: sections.iter().map(state).collect(), packing: Packing::Convolution { grows } }
}

pub(super) fn recurrent<const N: usize>(
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
pub(super) fn kernel(fields: &Fields<'_>, field: &str) -> Result<u64, ConfigError> {
    let width = fields.count(field)?;
    if width < 2 {
        return Err(fields.bad(field, width, "at least 2"));
    }
    Ok(width)
}

pub(super) fn expanded(fields: &Fields<'_>, expand: &str) -> Result<u64, ConfigError> {
    Ok(fields.count(expand)? * fields.count("hidden_size")?)
}

/// A model whose layers keep attention or something recurrent, or nothing.
pub(super) fn mixed(
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
