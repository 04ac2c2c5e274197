"""Tiny drafts with random numbers: for the tiny Qwen3 of `tiny`, and modules of the tiny DeepSeek itself."""

import json

import safetensors.torch
import torch
from tiny import save_model

SIZES = dict(
    vocab_size=512,
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=256,
)


def save_draft(folder, seed):
    """A model of one layer."""
    import transformers

    config = transformers.Qwen3Config(**SIZES, num_hidden_layers=1)
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def save_eagle(folder, seed):
    """A head that reads hidden states of three of the model's layers."""
    folder.mkdir()
    config = dict(
        architectures=["LlamaForCausalLMEagle3"],
        model_type="llama",
        **SIZES,
        num_hidden_layers=1,
        draft_vocab_size=512,
        # Three of four layers: those that vLLM would choose are not all different in so small a model.
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        hidden_act="silu",
        tie_word_embeddings=False,
        torch_dtype="float32",
        bos_token_id=1,
        eos_token_id=2,
    )
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "fc.weight": (128, 384),
        "lm_head.weight": (512, 128),
        "midlayer.self_attn.q_proj.weight": (128, 256),
        "midlayer.self_attn.k_proj.weight": (64, 256),
        "midlayer.self_attn.v_proj.weight": (64, 256),
        "midlayer.self_attn.o_proj.weight": (128, 128),
        "midlayer.mlp.gate_proj.weight": (256, 128),
        "midlayer.mlp.up_proj.weight": (256, 128),
        "midlayer.mlp.down_proj.weight": (128, 256),
    }
    weights = {
        name: torch.randn(*shape, generator=generator) * 0.1 for name, shape in shapes.items()
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"midlayer.{name}.weight"] = torch.ones(128)
    weights["norm.weight"] = torch.ones(128)
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_modules(folder, seed, count=2):
    """A tiny DeepSeek with `count` modules behind its layers, each of which guesses one token more (MTP)."""
    save_model("deepseek", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    layers = config["num_hidden_layers"]
    # The modules have no experts either.
    config |= {"num_nextn_predict_layers": count, "first_k_dense_replace": layers + count}
    path.write_text(json.dumps(config))
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    generator = torch.Generator().manual_seed(seed)
    last = f"model.layers.{layers - 1}."
    for number in range(layers, layers + count):
        own = f"model.layers.{number}."
        for name in [name for name in weights if name.startswith(last)]:
            like = weights[name]
            made = torch.randn(like.shape, generator=generator) * 0.1 if like.dim() > 1 else like.clone()
            weights[name.replace(last, own)] = made
        weights[f"{own}eh_proj.weight"] = torch.randn(128, 256, generator=generator) * 0.1
        for name in ("enorm", "hnorm", "shared_head.norm"):
            weights[f"{own}{name}.weight"] = torch.ones(128)
        weights[f"{own}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{own}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    return folder


def save_latent_eagle(folder, seed, model):
    """A head as that of `save_eagle` that keeps latents, as `model` does."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    config |= dict(
        # Of a V3, vLLM would take it for modules.
        model_type="deepseek_v2",
        architectures=["Eagle3DeepseekV2ForCausalLM"],
        num_hidden_layers=1,
        num_nextn_predict_layers=0,
        draft_vocab_size=512,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
    )
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights = {"norm.weight": torch.ones(128), "midlayer.hidden_norm.weight": torch.ones(128)}
    shapes = {"fc.weight": (128, 384), "lm_head.weight": (512, 128)}
    first = "model.layers.0."
    for name, like in safetensors.torch.load_file(model / "model.safetensors").items():
        own = name.replace(first, "midlayer.")
        if like.dim() == 1 and own != name:
            weights[own] = torch.ones_like(like)
        elif own != name:
            # Its layer reads a token's vector beside the hidden states.
            reads = 2 if "q_a_proj" in name or "kv_a_proj" in name else 1
            shapes[own] = (like.shape[0], reads * like.shape[1])
    weights |= {name: torch.randn(*shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
