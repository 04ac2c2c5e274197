//! Configurations that cannot be read: each says which field, and what it should be.

use kvferry_models::families;
use serde_json::{Value, json};

fn error(config: &Value) -> String {
    families::read("test", &config.to_string()).unwrap_err().to_string()
}

fn llama() -> Value {
    json!({
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "torch_dtype": "bfloat16",
    })
}

fn with(key: &str, value: Value) -> Value {
    let mut config = llama();
    config[key] = value;
    config
}

#[test]
fn text_that_is_no_configuration_is_refused() {
    let error = |text: &str| families::read("test", text).unwrap_err().to_string();
    assert!(error("{\"model_type\": ").contains("not JSON"));
    assert!(error("[]").contains("not a JSON object"));
    assert!(error("{}").contains("no field 'model_type'") && error("{}").contains("llama"));
}

/// As released, without `model_type`; the preset is the same model as engines load it.
#[test]
fn checkpoints_of_mamba_ssm_need_no_model_type() {
    let read = |config: Value| families::read("test", &config.to_string());
    let config = |states: Value| json!({ "d_model": 2560, "n_layer": 64, "ssm_cfg": states });
    let model = read(config(json!({ "layer": "Mamba2" }))).unwrap();
    let preset = kvferry_models::presets::find("mamba2-2.7b").unwrap().model().unwrap();
    assert_eq!((model.family.as_str(), model.layers), ("mamba2", preset.layers));
    for (cache, other) in model.caches.iter().zip(&preset.caches) {
        for (state, other) in cache.states().zip(other.states()) {
            assert_eq!((&state.name, &state.kind.axes), (&other.name, &other.kind.axes));
        }
    }
    let first = read(config(json!({}))).unwrap();
    let sizes: Vec<u64> =
        first.caches[0].states().map(kvferry_models::State::entry_bytes).collect();
    assert_eq!((first.family.as_str(), sizes), ("mamba", vec![5120 * 3 * 2, 5120 * 16 * 2]));
    let error = |config: Value| read(config).unwrap_err().to_string();
    assert!(error(config(json!({ "layer": "Mamba3" }))).contains("Mamba1 or Mamba2"));
    let mut mixed = config(json!({ "layer": "Mamba2" }));
    mixed["attn_layer_idx"] = json!([3, 9]);
    assert!(error(mixed).contains("'attn_layer_idx' of the configuration is 2 layers"));
}

#[test]
fn unknown_types_suggest_the_nearest() {
    let found = error(&with("model_type", json!("lama")));
    assert!(found.contains("did you mean 'llama'?") && found.contains("qwen3_next"), "{found}");
    assert!(error(&with("model_type", json!(7))).contains("'model_type'"));
    assert!(error(&with("model_type", json!("rwkv7"))).contains("not supported"));
    assert!(error(&with("model_type", json!("phi4flash"))).contains("not supported"));
}

#[test]
fn fields_are_checked() {
    for (key, value, part) in [
        ("num_hidden_layers", json!(null), "no field 'num_hidden_layers'"),
        ("num_hidden_layers", json!(0), "'num_hidden_layers'"),
        ("num_hidden_layers", json!("two"), "'num_hidden_layers'"),
        ("num_hidden_layers", json!(100_000), "layers"),
        ("num_attention_heads", json!(-4), "'num_attention_heads'"),
        ("num_attention_heads", json!(5), "a multiple of 'num_attention_heads'"),
        ("num_key_value_heads", json!(1.5), "'num_key_value_heads'"),
        ("hidden_size", json!(u64::MAX), "'hidden_size'"),
        ("torch_dtype", json!("int3"), "bfloat16, float16 or float32"),
        ("layer_types", json!(["full_attention"]), "one entry for each of 2 layers"),
        ("layer_types", json!(["full_attention", "odd"]), "sliding_attention or full_attention"),
        ("layer_types", json!(["full_attention", "sliding_attention"]), "'sliding_window'"),
    ] {
        let found = error(&with(key, value.clone()));
        assert!(found.contains(part), "{key}={value}: {found}");
    }
}

#[test]
fn families_say_what_they_miss() {
    for (family, field) in [
        ("deepseek_v3", "kv_lora_rank"),
        ("kimi_linear", "kv_lora_rank"),
        ("qwen3_next", "linear_num_key_heads"),
        ("nemotron_h", "hybrid_override_pattern"),
        ("falcon_h1", "mamba_expand"),
        ("jamba", "mamba_expand"),
        ("lfm2", "conv_L_cache"),
        ("minimax_text_01", "attn_type_list"),
        ("zamba2", "layers_block_type"),
        ("granitemoehybrid", "mamba_expand"),
    ] {
        let found = error(&with("model_type", json!(family)));
        assert!(found.contains(&format!("no field '{field}'")), "{family}: {found}");
        assert!(found.contains(family), "{family}: {found}");
    }
}

#[test]
fn contradictions_inside_a_configuration_are_found() {
    let nemotron = json!({
        "model_type": "nemotron_h", "num_hidden_layers": 3, "hybrid_override_pattern": "M*",
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
    });
    assert!(error(&nemotron).contains("num_hidden_layers"));
    let mut odd = nemotron;
    odd["hybrid_override_pattern"] = json!("M?");
    assert!(error(&odd).contains("made of M, *, E and -"));
    let kimi = json!({
        "model_type": "kimi_linear", "num_hidden_layers": 2, "kv_lora_rank": 8,
        "qk_rope_head_dim": 8, "num_attention_heads": 4,
        "linear_attn_config": {
            "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4,
            "kda_layers": [1], "full_attn_layers": [1],
        },
    });
    let found = error(&kimi);
    assert!(found.contains("layer 1 is in both lists"), "{found}");
}

/// Whatever is left out of a real configuration or put into it, reading it ends in a model or an
/// error, never in a panic.
#[test]
fn nothing_panics() {
    let odd = [
        json!(null),
        json!(0),
        json!(1),
        json!(-1),
        json!(1 << 20),
        json!(u64::MAX),
        json!(0.5),
        json!(""),
        json!("x"),
        json!([]),
        json!([0]),
        json!(["x"]),
        json!({}),
        json!(true),
    ];
    for preset in kvferry_models::presets::all() {
        let config: Value = serde_json::from_str(preset.config).unwrap();
        for outer in [None, Some("text_config"), Some("linear_attn_config")] {
            let part = match outer {
                None => &config,
                Some(key) => &config[key],
            };
            let Value::Object(fields) = part else { continue };
            for key in fields.keys() {
                for value in &odd {
                    let mut changed = config.clone();
                    let part = match outer {
                        None => &mut changed,
                        Some(outer) => &mut changed[outer],
                    };
                    part[key] = value.clone();
                    if let Ok(model) = families::read("test", &changed.to_string()) {
                        let topology = "tp=2".parse().unwrap();
                        let _ = kvferry_models::rules::vllm::pools(&model, &topology);
                        let _ = model.footprint();
                    }
                }
            }
        }
    }
}
