"""The models that are handed over: as small as can be, and as much memory a token as shows."""

import transformers

# Enough memory a token for its transfer to show: 64 KiB of keys and values.
COMMON = dict(
    vocab_size=512, hidden_size=256, num_attention_heads=8, num_key_value_heads=8, head_dim=128
)
MODELS = {
    "qwen3": lambda: transformers.Qwen3Config(
        **COMMON, num_hidden_layers=8, intermediate_size=256, architectures=["Qwen3ForCausalLM"]
    ),
    # As much memory, in as many layers as most models have.
    "qwen3-deep": lambda: transformers.Qwen3Config(
        **COMMON | {"num_attention_heads": 2, "num_key_value_heads": 2},
        num_hidden_layers=32,
        intermediate_size=256,
        architectures=["Qwen3ForCausalLM"],
    ),
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **COMMON,
        num_hidden_layers=12,
        intermediate_size=256,
        layers_block_type=["mamba", "attention", "mlp"] * 4,
        mamba_num_heads=16,
        mamba_head_dim=32,
        n_groups=2,
        ssm_state_size=128,
        conv_kernel=4,
        architectures=["NemotronHForCausalLM"],
    ),
    # For a GPU: 144 KiB a token in bfloat16, as an 8B has, and a fifth of its weights.
    "qwen3-wide": lambda: transformers.Qwen3Config(
        **COMMON | {"hidden_size": 2048},
        num_hidden_layers=36,
        intermediate_size=6144,
        max_position_embeddings=65536,
        architectures=["Qwen3ForCausalLM"],
    ),
}


def hybrid(model):
    """Whether it has states."""
    return "nemotron" in model
