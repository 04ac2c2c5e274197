"""Tiny models with random numbers, of the shapes that real ones have."""

import json
import math

import safetensors.torch
import torch


def save_model(kind, folder, latent_head=32):
    """A tiny model with random numbers that are lively enough for greedy answers to differ. Heads that are
    made of latents have `latent_head` numbers: GPU kernels know 128 only."""
    import transformers

    common = dict(vocab_size=512, hidden_size=128, num_hidden_layers=4, num_attention_heads=4)
    kinds = {
        "qwen3": lambda: transformers.Qwen3Config(
            **common, num_key_value_heads=2, head_dim=32, intermediate_size=256
        ),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **common,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=256,
            sliding_window=48,
            layer_types=["sliding_attention", "full_attention"] * 2,
            # Or it would repeat a token for ever, whatever its windows hold.
            tie_word_embeddings=False,
        ),
        # The last two layers keep nothing: they read what the third and the fourth keep.
        "gemma3n": lambda: transformers.Gemma3nTextConfig(
            **common | dict(num_hidden_layers=6),
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=256,
            sliding_window=48,
            layer_types=["sliding_attention", "full_attention"] * 3,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=512,
            hidden_size_per_layer_input=32,
            laurel_rank=16,
            activation_sparsity_pattern=[0.0] * 6,
        ),
        "nemotron_h": lambda: transformers.NemotronHConfig(
            **common | dict(num_hidden_layers=6),
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=256,
            layers_block_type=["mamba", "attention", "mamba", "mlp", "mamba", "attention"],
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=2,
            ssm_state_size=16,
            conv_kernel=4,
        ),
        "falcon_h1": lambda: transformers.FalconH1Config(
            **common,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=256,
            mamba_d_ssm=128,
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_n_groups=1,
            mamba_d_state=16,
            mamba_d_conv=4,
        ),
        "deepseek": lambda: transformers.DeepseekV3Config(
            **common,
            intermediate_size=256,
            first_k_dense_replace=4,
            q_lora_rank=64,
            # The only sizes that vLLM's CPU kernel knows.
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=latent_head,
            v_head_dim=latent_head,
            num_mtp_layers=0,
        ),
        "qwen3_5": lambda: transformers.Qwen3_5TextConfig(
            **common,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=256,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            layer_types=["linear_attention", "full_attention"] * 2,
        ),
        "lfm2": lambda: transformers.Lfm2Config(
            **common,
            num_key_value_heads=2,
            intermediate_size=256,
            layer_types=["conv", "full_attention", "conv", "full_attention"],
            block_auto_adjust_ff_dim=False,
            # vLLM reads these under their old names.
            conv_dim=128,
            block_dim=128,
        ),
        "kimi_linear": lambda: transformers.KimiLinearConfig(
            **common,
            intermediate_size=256,
            mlp_layer_types=["dense"] * 4,
            # The only sizes that vLLM's CPU kernel knows.
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=latent_head,
            v_head_dim=latent_head,
            mla_use_nope=True,
            linear_attn_config={
                "kda_layers": [1, 3],
                "full_attn_layers": [2, 4],
                "num_heads": 4,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
            },
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        ),
    }
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(kinds[kind]())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                # States that forget slowly: a missing one must change the answer.
                weight.fill_(math.log(0.05))
            elif name.endswith("dt_bias"):
                weight.zero_()
            elif name.endswith(("conv.weight", "conv1d.weight")):
                weight.normal_(std=0.5)
            elif weight.dim() >= 2:
                # A token's own vector must not outweigh what the layers make of the past.
                weight.normal_(std=0.05 if "embed" in name else 0.1)
    model.save_pretrained(folder)
    if kind == "kimi_linear":
        _without_experts(folder)
    return folder


def _without_experts(folder):
    """transformers saves every layer of Kimi-Linear as one with experts."""
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    renamed = {name.replace("block_sparse_moe", "mlp"): weights[name] for name in weights}
    safetensors.torch.save_file(renamed, path, metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts": None}))
