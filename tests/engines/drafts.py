"""Tiny drafts with random numbers, for the tiny Qwen3 of `tiny`."""

import json

import safetensors.torch
import torch

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
