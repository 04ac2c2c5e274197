//! The presets against figures that were derived from the same configurations by other means.

use kvferry_models::{Model, Sort, Topology, presets, rules::vllm};
use serde_json::Value;

const DERIVED: &str = include_str!("data/DERIVED.json");

fn count(model: &Model, is: impl Fn(&Sort) -> bool) -> u64 {
    model.caches.iter().filter(|cache| is(&cache.sort)).count() as u64
}

#[test]
fn layer_counts_and_state_sizes_are_as_derived() {
    let derived: Value = serde_json::from_str(DERIVED).unwrap();
    for preset in presets::all() {
        let (model, facts) = (preset.model().unwrap(), &derived[preset.name]);
        assert!(facts.is_object(), "{} has no derived figures", preset.name);
        let number = |key: &str| facts[key].as_u64().unwrap_or(0);
        let full = count(&model, |sort| *sort == Sort::Attention { window: None });
        assert_eq!(full, number("full"), "{}: attention layers", preset.name);
        let sliding = count(&model, |sort| matches!(sort, Sort::Attention { window: Some(_) }));
        assert_eq!(sliding, number("swa"), "{}: sliding layers", preset.name);
        let latent = count(&model, |sort| matches!(sort, Sort::Latent { .. }));
        assert_eq!(latent, number("mla"), "{}: latent layers", preset.name);
        assert_eq!(count(&model, Sort::is_recurrent), number("lin"), "{}", preset.name);
        if let Some(total) = facts["total"].as_u64() {
            assert_eq!(u64::from(model.layers), total, "{}: layers", preset.name);
        }
        for cache in &model.caches {
            let lengths = |suffix: &str| -> Option<Vec<u64>> {
                let state = cache.states().find(|state| state.name.ends_with(suffix))?;
                Some(state.kind.axes.iter().map(|axis| axis.length).collect())
            };
            let numbers = |key: &str| -> Vec<u64> {
                let list = facts[key].as_array().unwrap_or_else(|| panic!("{key}"));
                list.iter().map(|value| value.as_u64().unwrap()).collect()
            };
            match &cache.sort {
                Sort::Attention { window } => {
                    let expected = numbers(if window.is_some() { "kv_swa" } else { "kv" });
                    assert_eq!(lengths("/k").unwrap(), expected[..2], "{}", preset.name);
                    let value = *expected.last().unwrap();
                    assert_eq!(lengths("/v").unwrap(), [expected[0], value], "{}", preset.name);
                    if let Some(window) = window {
                        assert_eq!(*window, number("window"), "{}", preset.name);
                    }
                }
                Sort::Latent { indexed } => {
                    assert_eq!(lengths("/latent").unwrap(), [number("latent")], "{}", preset.name);
                    assert_eq!(*indexed, facts["indexer"].as_u64().is_some(), "{}", preset.name);
                }
                // 128 numbers of 8 bits and one 32-bit scale.
                Sort::Indexer => assert_eq!(cache.entry_bytes(), 132, "{}", preset.name),
                Sort::Recurrent(kind) => {
                    let ssm = &facts["ssm"];
                    let elements = |filter: &dyn Fn(&str) -> bool| -> u64 {
                        let states = cache.states().filter(|state| filter(&state.name));
                        states
                            .map(|state| {
                                state.kind.axes.iter().map(|axis| axis.length).product::<u64>()
                            })
                            .sum()
                    };
                    let conv = elements(&|name| name.contains("/conv."));
                    let state = elements(&|name| name.ends_with("/ssm"));
                    assert_eq!(Some(conv), ssm["conv_elems"].as_u64(), "{}", preset.name);
                    assert_eq!(Some(state), ssm["ssm_elems"].as_u64(), "{}", preset.name);
                    let word = match kind.word() {
                        "short conv" => "short_conv",
                        "linear" => "lightning",
                        other => other,
                    };
                    assert_eq!(Some(word), ssm["kind"].as_str(), "{}", preset.name);
                }
            }
        }
        if let Some(layers) = facts["attn_idx"].as_array() {
            let expected: Vec<u64> = layers.iter().map(|value| value.as_u64().unwrap()).collect();
            let found: Vec<u64> = model
                .caches
                .iter()
                .filter(|cache| !cache.sort.is_recurrent())
                .map(|cache| cache.layer.into())
                .collect();
            assert_eq!(found, expected, "{}", preset.name);
        }
    }
}

#[test]
fn every_preset_names_its_source() {
    for preset in presets::all() {
        let source = preset.source();
        assert!(!source.source.is_empty() && !source.confidence.is_empty(), "{}", preset.name);
    }
}

#[test]
fn every_preset_has_manifests() {
    for preset in presets::all() {
        let model = preset.model().unwrap();
        for topology in ["tp=1", "tp=2", "tp=2,conv=ds,spec=3", "tp=4,layout=BLHNC"] {
            let topology: Topology = topology.parse().unwrap();
            match vllm::manifests(&model, &topology, "engine") {
                Ok(ranks) => assert_eq!(ranks.len() as u32, topology.ranks(), "{}", preset.name),
                Err(error) => assert!(error.to_string().contains("cannot run"), "{error}"),
            }
        }
    }
}

/// The example of the source documents: an inflated block of 400 tokens, a convolution state of 3 by
/// 3328, a state of 48 by 64 by 128, keys and values of 4 heads of 128, and 18525 blocks.
#[test]
fn granite_tiny_is_laid_out_as_published() {
    let model = presets::find("granite-4.0-h-tiny").unwrap().model().unwrap();
    let topology: Topology = "tp=1,blocks=18525".parse().unwrap();
    let pools = vllm::pools(&model, &topology).unwrap();
    let attention = pools.groups.iter().find(|group| group.block.is_some()).unwrap();
    assert_eq!(attention.block, Some(400));
    let rank = &vllm::manifests(&model, &topology, "engine").unwrap()[0];
    let state = |name: &str| {
        let mut pieces = rank.groups().iter().flat_map(|group| &group.pieces);
        pieces.find(|piece| piece.state == name).unwrap()
    };
    let row = 2 * 3328;
    assert_eq!(state("layers.0/conv.x").view.axes, [2, row]);
    assert_eq!(state("layers.0/conv.b").view.offset, 2 * 3072);
    assert_eq!(state("layers.0/ssm").view.offset, 3 * row);
    assert_eq!(state("layers.0/ssm").bounds.volume(), 48 * 64 * 128);
    assert_eq!(state("layers.5/k").view.block, 400 * 4 * 256 * 2);
    assert_eq!(rank.regions()[0].bytes, 18525 * 4 * 400 * 4 * 256 * 2);
}

#[test]
fn speculative_columns_are_scratch() {
    let model = presets::find("qwen3-next").unwrap().model().unwrap();
    for (conv, run, dims) in [("sd", 2 * 8192 * 2, 0), ("ds", 2 * 2, 1)] {
        let topology: Topology = format!("tp=1,spec=2,conv={conv}").parse().unwrap();
        let rank = &vllm::manifests(&model, &topology, "engine").unwrap()[0];
        let group = rank.groups().iter().find(|group| !group.scratch.is_empty()).unwrap();
        assert_eq!(group.scratch[0].run, run);
        assert_eq!(group.scratch[0].dims.len(), dims);
        assert_eq!(group.pieces[0].bounds.0[1].len(), 3);
    }
}

#[test]
fn what_the_engine_cannot_run_is_named() {
    let error = |name: &str, topology: &str| {
        let model = presets::find(name).unwrap().model().unwrap();
        let topology: Topology = topology.parse().unwrap();
        vllm::manifests(&model, &topology, "engine").unwrap_err().to_string()
    };
    for (name, topology, part) in [
        ("kimi-k3", "tp=5", "96 attention heads do not divide by 5"),
        ("llama-3.1-8b", "tp=64", "32 attention heads do not divide by 64"),
        ("llama-3.1-8b", "tp=1,pp=33", "only 32 layers"),
        ("zamba2", "tp=4", "2 Mamba groups neither divide by 4 nor are one"),
        ("zamba2", "tp=1,pp=2", "does not support pipeline stages"),
        ("llama-3.1-8b", "tp=1,block=24", "multiples of 16"),
        ("kimi-linear", "tp=1,block=16", "blocks of 64 tokens"),
        ("llama-3.1-8b", "tp=1,block=128,kernel=16,layout=BLHNC", "cannot be split"),
        ("falcon-h1-7b", "tp=2,layout=LHBNC", "blocks lie together"),
        ("llama-3.1-8b", "tp=1,blocks=4294967295", "larger than any machine's memory"),
    ] {
        let found = error(name, topology);
        assert!(found.contains("cannot run") && found.contains(part), "{name} {topology}: {found}");
    }
}

#[test]
fn presets_are_found_by_any_part_of_their_name() {
    assert_eq!(presets::find("kimi-linear").unwrap().name, "kimi-linear-48b-a3b");
    assert_eq!(presets::find("kimi-k3").unwrap().name, "kimi-k3");
    let error = |name: &str| presets::find(name).unwrap_err().to_string();
    assert!(error("qwen3.5").contains("qwen3.5-27b"));
    assert!(error("kimi-liner-48b-a3b").contains("did you mean 'kimi-linear-48b-a3b'?"));
    assert!(error("").contains("there is no preset"));
}
