//! Quantised caches: what the engine keeps instead of the model's own numbers.
//!
//! Keys and values (or latents) become numbers of 8 bits whose scales belong to the layer, records of a
//! token and head with their scales, or slots of 4-bit numbers and scales. Names of formats are those that
//! running engines give them, so that the two can be compared.

use std::borrow::Cow;

use kvferry_layout::Format;

use super::error::cannot_run;
use super::spec::OwnKernels;
use crate::error::{FactsError, RulesError};
use crate::facts::Facts;
use crate::model::{Cache, Model, Packing, Sort, State, Tensor};
use crate::rules::topology::{CacheType, Topology};

/// What becomes of a cache.
enum How {
    /// Numbers of this format, whose scales belong to the layer.
    Numbers(&'static str),
    /// A record for each token and head: so many bits for each number, and two scales of 4 bytes.
    Records(u64),
    /// Slots of 4-bit numbers and a scale of a byte for every 16 of them: a power of two is not needed.
    Slots,
    /// A record of so many bytes for each token.
    Record(u32),
}

/// By the type of cache: what becomes of keys and values, and of latents. Without an entry the engine
/// has no kernels for it.
const TYPES: [(CacheType, Option<How>, Option<How>); 8] = [
    (CacheType::Fp8, Some(How::Numbers("fp8_e4m3")), Some(How::Numbers("fp8_e4m3"))),
    (CacheType::Fp8E5m2, Some(How::Numbers("fp8_e5m2")), None),
    (CacheType::Fp8PerTokenHead, Some(How::Records(8)), None),
    (CacheType::Int8PerTokenHead, Some(How::Records(8)), None),
    (CacheType::Int4PerTokenHead, Some(How::Records(4)), None),
    (CacheType::Nvfp4, Some(How::Slots), None),
    (CacheType::Fp8DsMla, None, Some(How::Record(656))),
    (CacheType::Nvfp4DsMla, None, Some(How::Record(352))),
];

/// Numbers of 4 bits that share a scale of one byte.
const NUMBERS_PER_SCALE: u64 = 16;

/// What the engine makes of the type that it is told: kernels of a family's own choose where it is open.
pub(super) fn resolved(model: &Model, told: Option<CacheType>) -> Option<CacheType> {
    match (OwnKernels::of(model), told) {
        (Some(own), None | Some(CacheType::Fp8)) => Some(own.preferred(model)),
        _ => told,
    }
}

/// Quantises all keys, values and latents of a model.
pub(super) fn quantise(
    model: &mut Cow<'_, Model>,
    topology: &Topology,
    kv: CacheType,
) -> Result<(), RulesError> {
    let setting = || format!("kv={}", kv.name());
    if let Some(own) = OwnKernels::of(model) {
        return own_records(model, own, kv);
    }
    let (_, heads, latents) = TYPES.iter().find(|(known, ..)| *known == kv).expect("all are there");
    let mut caches = model.caches.clone();
    for cache in &mut caches {
        let (what, how) = match cache.sort {
            Sort::Attention { .. } => ("keys and values", heads),
            Sort::Latent { .. } => ("latents", latents),
            Sort::Indexer | Sort::Recurrent(_) => continue,
        };
        let Some(how) = how else {
            let reason = format!("it has no kernels that keep {what} so");
            return Err(cannot_run(model, setting(), reason));
        };
        if matches!(how, How::Record(_))
            && cache.sort != (Sort::Latent { indexed: true, window: None })
        {
            let reason = "only latents with a sparse-attention indexer are kept so".to_owned();
            return Err(cannot_run(model, setting(), reason));
        }
        let tensors = tensors(cache, how, topology, kv);
        let mut tensors =
            tensors.map_err(|problem| cannot_run(model, setting(), problem.to_string()))?;
        for (state, old) in states(&mut tensors).zip(std::iter::repeat(prefix(cache))) {
            state.name = format!("{old}/{}", state.name);
        }
        cache.tensors = tensors;
    }
    model.to_mut().caches = caches;
    Ok(())
}

/// The records of a family with kernels of its own: those of a window stay as they are, but are named
/// after the type, too.
fn own_records(
    model: &mut Cow<'_, Model>,
    own: &OwnKernels,
    kv: CacheType,
) -> Result<(), RulesError> {
    // Without another word the engine takes what its kernels prefer, which is what the model has.
    if kv == CacheType::Fp8 {
        return Ok(());
    }
    let setting = || format!("kv={}", kv.name());
    let Some(&(_, kept)) = own.records.iter().find(|(known, _)| *known == kv) else {
        let known: Vec<_> = own.records.iter().map(|(known, _)| known.name()).collect();
        let reason = format!(
            "its latents are records of their own: kv can be fp8 (what its kernels prefer) or {}",
            known.join(" or ")
        );
        return Err(cannot_run(model, setting(), reason));
    };
    // The first is what all of its kernels take.
    if kv != own.preferred(model) && kv != own.records[0].0 {
        let reason = "of its kernels only those read such records that take 8 attention heads for \
                      each group of output heads, and it has another number";
        return Err(cannot_run(model, setting(), reason.to_owned()));
    }
    let caches = model.to_mut().caches.iter_mut();
    for cache in caches.filter(|cache| matches!(cache.sort, Sort::Latent { .. })) {
        let stays = cache.sort.window().is_none();
        for tensor in cache.tensors.iter_mut().filter(|it| it.packing == Packing::Planes) {
            let [data, scales] = &mut tensor.states[..] else { continue };
            let sizes = (data.kind.format.bytes, scales.kind.format.bytes);
            let sizes = if stays { kept } else { sizes };
            let name = format!("{} {}", kv.name(), sizes.0 + sizes.1);
            scales.kind.format = Format::new(format!("{name} scales"), sizes.1);
            data.kind.format = Format::new(name, sizes.0);
        }
    }
    Ok(())
}

fn states(tensors: &mut [Tensor]) -> impl Iterator<Item = &mut State> {
    tensors.iter_mut().flat_map(|tensor| &mut tensor.states)
}

/// What the names of a cache's states start with.
fn prefix(cache: &Cache) -> String {
    let name = cache.states().next().map(|state| state.name.as_str()).unwrap_or_default();
    name.rsplit_once('/').map_or("", |(prefix, _)| prefix).to_owned()
}

fn tensors(
    cache: &Cache,
    how: &How,
    topology: &Topology,
    kv: CacheType,
) -> Result<Vec<Tensor>, FactsError> {
    let facts = Facts::shipped().states();
    let lengths =
        |state: &State| -> Vec<u64> { state.kind.axes.iter().map(|axis| axis.length).collect() };
    let all: Vec<Vec<u64>> = cache.states().map(lengths).collect();
    let (mode, name) = (kv.name(), kv.name());
    match (how, &all[..]) {
        (How::Numbers(format), sizes) => {
            let [keys, values] = topology.scales;
            let format =
                Format::new(format!("{format}, keys times {keys}, values times {values}"), 1);
            match sizes {
                [key, value] => {
                    let sizes = [("heads", key[0]), ("key", key[1]), ("value", value[1])];
                    facts.tensors("attention", &sizes, &[("model", &format)])
                }
                _ => facts.tensors("latent", &[("size", sizes[0][0])], &[("model", &format)]),
            }
        }
        (How::Records(bits), [key, value]) => {
            let bytes = key[1] * bits / 8 + value[1] * bits / 8 + 2 * 4;
            let format = record(format!("{mode} {}+{} {name}", key[1], value[1]), bytes)?;
            facts.tensors("attention records", &[("heads", key[0])], &[("record", &format)])
        }
        (How::Slots, [key, value]) => {
            if key[1] != value[1] || !key[1].is_multiple_of(NUMBERS_PER_SCALE) {
                return Err(unfit(format!(
                    "keys and values of {} and {} numbers cannot share slots",
                    key[1], value[1]
                )));
            }
            let name = format!("{mode} {}+{} {name}", key[1], value[1]);
            let scales = record(format!("{name} scales"), key[1] / NUMBERS_PER_SCALE)?;
            let numbers = record(name, key[1] / 2)?;
            let formats = [("numbers", &numbers), ("scales", &scales)];
            facts.tensors("attention slots", &[("heads", key[0])], &formats)
        }
        (How::Record(bytes), [_]) => {
            facts.tensors("latent records", &[], &[("record", &Format::new(name, *bytes))])
        }
        (How::Records(_) | How::Slots | How::Record(_), other) => {
            Err(unfit(format!("its layers keep {} states each", other.len())))
        }
    }
}

fn record(name: String, bytes: u64) -> Result<Format, FactsError> {
    let bytes = u32::try_from(bytes).ok().filter(|bytes| *bytes > 0);
    let bytes = bytes.ok_or_else(|| unfit(format!("a record of {name} is too large")))?;
    Ok(Format::new(name, bytes))
}

fn unfit(problem: String) -> FactsError {
    FactsError::Sizes { kind: "attention".to_owned(), problem }
}
