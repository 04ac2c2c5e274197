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
        if facts["swa_only"].is_number() {
            // Compressed latents: see below.
            continue;
        }
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
                Sort::Latent { indexed, .. } => {
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
fn compressed_latents_are_as_derived() {
    let derived: Value = serde_json::from_str(DERIVED).unwrap();
    let mut seen = 0;
    for (name, facts) in derived.as_object().unwrap() {
        let Some(alone) = facts["swa_only"].as_u64() else { continue };
        seen += 1;
        let model = presets::find(name).unwrap().model().unwrap();
        let number = |key: &str| facts[key].as_u64().unwrap_or(0);
        let compressed = |tokens: u64| {
            let latents = model.caches.iter().filter(|cache| {
                matches!(cache.sort, Sort::Latent { window: None, .. })
                    && cache.tokens_per_entry() == tokens
            });
            latents.count() as u64
        };
        for (tokens, key) in [(1, "csa1"), (2, "csa2"), (4, "csa4"), (128, "hca128")] {
            assert_eq!(compressed(tokens), number(key), "{name}: {key}");
        }
        let kept: u64 = ["csa1", "csa2", "csa4", "hca128"].map(number).iter().sum();
        assert_eq!(u64::from(model.layers), alone + kept, "{name}");
        // Every layer keeps the latents of its last tokens.
        let windows =
            model.caches.iter().filter(|cache| cache.window().tokens == Some(number("window")));
        let windows = windows.filter(|cache| cache.tensors[0].states.len() == 2).count() as u64;
        assert_eq!(windows, u64::from(model.layers), "{name}");
    }
    assert_eq!(seen, 3);
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
        ("deepseek-v4-flash", "block=128", "blocks of 256 tokens"),
        ("deepseek-v4-flash", "block=512", "cannot be split"),
        ("deepseek-v4-flash", "kernel=64", "blocks of 256 tokens"),
        ("deepseek-v4-flash", "layout=LBHNC", "take BLHNC or BLNHC"),
        ("deepseek-v4-flash", "tp=16", "8 groups of output heads do not divide by 16"),
        ("deepseek-v4-flash", "hma=off", "cannot keep the latents of a window in full"),
        ("deepseek-v4-pro", "tp=8,dcp=8", "sliding window"),
        ("deepseek-v4.1", "pp=3", "reads what layer 8 keeps, on another stage"),
        ("deepseek-v4-flash", "kv=fp8_e5m2", "fp8 (what its kernels prefer) or fp8_ds_mla"),
        ("deepseek-v4-flash", "kv=nvfp4_ds_mla", "fp8 (what its kernels prefer) or fp8_ds_mla"),
        ("deepseek-v4.1", "kv=nvfp4", "or fp8_ds_mla or nvfp4_ds_mla"),
        ("deepseek-v3", "kv=int8_per_token_head", "no kernels that keep latents so"),
        ("deepseek-v3", "kv=fp8_ds_mla", "with a sparse-attention indexer"),
        ("llama-3.1-8b", "kv=nvfp4_ds_mla", "no kernels that keep keys and values so"),
        ("mimo-v2-flash", "kv=nvfp4", "keys and values of 192 and 128 numbers cannot share slots"),
        ("llama-3.1-8b", "kv=nvfp4,layout=LBNHC", "keeps each head in one piece"),
        ("llama-3.1-8b", "tp=1,blocks=4294967295", "larger than any machine's memory"),
    ] {
        let found = error(name, topology);
        assert!(found.contains("cannot run") && found.contains(part), "{name} {topology}: {found}");
    }
}

/// Latents that are records of their own: `fp8` means what there is without a word, as does the name of
/// what the kernels prefer.
#[test]
fn records_of_their_own_are_what_fp8_means() {
    for (name, preferred) in [
        ("deepseek-v4-flash", "fp8_ds_mla"),
        ("deepseek-v4-pro", "fp8_ds_mla"),
        ("deepseek-v4.1", "nvfp4_ds_mla"),
    ] {
        let model = presets::find(name).unwrap().model().unwrap();
        let made =
            |topology: &str| vllm::manifests(&model, &topology.parse().unwrap(), "engine").unwrap();
        assert_eq!(made("tp=2,kv=fp8"), made("tp=2"), "{name}");
        assert_eq!(made(&format!("tp=2,kv={preferred}")), made("tp=2"), "{name}");
    }
}

/// V4.1 keeps latents of 4 bits unless it is told otherwise, or has no kernels for them.
#[test]
fn the_kernels_of_four_bits_want_eight_heads_for_a_group() {
    let config = include_str!("../presets/deepseek-v4.1-flash.json");
    let read = |heads: &str| {
        let text = config.replace("\"num_attention_heads\": 64", heads);
        kvferry_models::families::read("v41", &text).unwrap()
    };
    let (eight, sixteen) =
        (read("\"num_attention_heads\": 64"), read("\"num_attention_heads\": 128"));
    let records = |model: &Model, topology: &str| -> Vec<(String, u32)> {
        let rank = &vllm::manifests(model, &topology.parse().unwrap(), "engine").unwrap()[0];
        // What stays of layer 2, and what its window holds.
        let format = |name: &str| {
            let name = format!("model.layers.2.{name}/latent");
            let mut pieces = rank.groups().iter().flat_map(|group| &group.pieces);
            let piece = pieces.find(|piece| piece.state == name).unwrap();
            let format = &rank.kinds()[piece.kind as usize].format;
            (format.name.clone(), format.bytes)
        };
        ["attn", "attn.swa_cache"].map(format).into()
    };
    let named =
        |names: [(&str, u32); 2]| names.map(|(name, bytes)| (name.to_owned(), bytes)).to_vec();
    let (fp4, fp8) = (("nvfp4_ds_mla 288", 256), ("fp8_ds_mla 528", 512));
    assert_eq!(records(&eight, "tp=2"), named([fp4, ("nvfp4_ds_mla 528", 512)]));
    assert_eq!(records(&eight, "tp=2,kv=fp8_ds_mla"), named([fp8; 2]));
    assert_eq!(records(&sixteen, "tp=2,kv=fp8"), named([fp8; 2]));
    let topology = "tp=2,kv=nvfp4_ds_mla".parse().unwrap();
    let refused = vllm::manifests(&sixteen, &topology, "engine").unwrap_err().to_string();
    assert!(refused.contains("8 attention heads for each group"), "{refused}");
}

/// Bytes of a block of 16 tokens on one of 2 ranks, and of every state of a token and head there.
#[test]
fn quantised_pages_hold_what_engines_say() {
    let model = presets::find("llama-3.1-8b").unwrap().model().unwrap();
    let (scaled, int4) = ("fp8_e4m3, keys times 0.5, values times 2", "int4_per_token_head");
    for (kv, page, states) in [
        ("auto", 2 * 128 * 2, vec![("k", "bf16", 2), ("v", "bf16", 2)]),
        ("fp8,kscale=0.5,vscale=2", 2 * 128, vec![("k", scaled, 1), ("v", scaled, 1)]),
        (int4, 64 + 64 + 8, vec![("kv", "int4_per_token_head 128+128 int4_per_token_head", 136)]),
        (
            "nvfp4",
            2 * (64 + 8),
            vec![
                ("k", "nvfp4 128+128 nvfp4", 64),
                ("k.scale", "nvfp4 128+128 nvfp4 scales", 8),
                ("v", "nvfp4 128+128 nvfp4", 64),
                ("v.scale", "nvfp4 128+128 nvfp4 scales", 8),
            ],
        ),
    ] {
        let topology: Topology = format!("tp=2,kv={kv}").parse().unwrap();
        let pools = vllm::pools(&model, &topology).unwrap();
        assert_eq!(pools.groups[0].pages[0], page * 4 * 16, "{kv}");
        let rank = &vllm::manifests(&model, &topology, "engine").unwrap()[1];
        let found: Vec<_> = rank.groups()[0]
            .pieces
            .iter()
            .filter_map(|piece| {
                let name = piece.state.strip_prefix("layers.3/")?;
                assert_eq!(piece.bounds.0[0], (4..8).into(), "{kv}");
                let format = &rank.kinds()[piece.kind as usize].format;
                Some((name, format.name.as_str(), format.bytes))
            })
            .collect();
        assert_eq!(found, states, "{kv}");
    }
    // The numbers of all heads and tokens come first, then their scales, then the values'.
    let topology: Topology = "tp=2,kv=nvfp4".parse().unwrap();
    let rank = &vllm::manifests(&model, &topology, "engine").unwrap()[0];
    let views: Vec<_> = rank.groups()[0].pieces.iter().take(4).map(|piece| &piece.view).collect();
    let (numbers, scales) = (4 * 16 * 64, 4 * 16 * 8);
    let offsets: Vec<u64> = views.iter().map(|view| view.offset).collect();
    assert_eq!(offsets, [0, numbers, numbers + scales, 2 * numbers + scales]);
    assert_eq!((views[0].axes[0], views[0].entry), (16 * 64, 64));
    assert_eq!((views[1].axes[0], views[1].entry), (16 * 8, 8));
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
