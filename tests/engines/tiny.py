"""Tiny models with random numbers, of the shapes that real ones have."""

import torch


def save_model(kind, folder):
    """A tiny model with random numbers that are lively enough for greedy answers to differ."""
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
    }
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(kinds[kind]())
    # Gemma scales its embeddings up by itself.
    embedding = 0.05 if kind == "gemma3" else 0.6
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "conv" not in name:
                weight.normal_(std=embedding if "embed" in name else 0.1)
    model.save_pretrained(folder)
    return folder
