"""The tiny models: each family's configuration, and what vLLM wants of its files."""

import json
import math

import safetensors.torch
import torch
import transformers
from questions import END, PAD, START, VOCABULARY
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    num_attention_heads=4,
    max_position_embeddings=2048,
    bos_token_id=START,
    eos_token_id=END,
    pad_token_id=PAD,
    tie_word_embeddings=False,
)
HEADS = dict(num_key_value_heads=2, head_dim=32)
# The only sizes that vLLM's CPU kernel for latents knows.
LATENTS = dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32)

FAMILIES = {
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **COMMON | HEADS,
        num_hidden_layers=7,
        intermediate_size=384,
        layers_block_type=["mamba", "attention", "mlp", "mamba", "attention", "mamba", "mlp"],
        mamba_num_heads=16,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=16,
        conv_kernel=4,
    ),
    "falcon-h1": lambda: transformers.FalconH1Config(
        **COMMON | HEADS,
        num_hidden_layers=4,
        intermediate_size=192,
        mamba_d_ssm=256,
        mamba_n_heads=16,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_conv=4,
    ),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(
        **COMMON | HEADS,
        num_hidden_layers=4,
        intermediate_size=192,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "kimi-linear": lambda: transformers.KimiLinearConfig(
        **COMMON | LATENTS,
        num_hidden_layers=4,
        intermediate_size=192,
        mlp_layer_types=["dense"] * 4,
        mla_use_nope=True,
        linear_attn_config={
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        # vLLM reads no output layer of its own here.
        **COMMON | dict(tie_word_embeddings=True),
        num_hidden_layers=4,
        num_key_value_heads=2,
        intermediate_size=192,
        layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
        # vLLM reads these under their old names.
        conv_dim=128,
        block_dim=128,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **COMMON | HEADS,
        num_hidden_layers=4,
        intermediate_size=192,
        sliding_window=48,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "deepseek": lambda: transformers.DeepseekV3Config(
        **COMMON | LATENTS,
        num_hidden_layers=3,
        intermediate_size=128,
        first_k_dense_replace=4,
        q_lora_rank=64,
        num_nextn_predict_layers=1,
    ),
}
# Layers whose word on a kind of question is another stream's in half of all streams of the training, so that answers
# come
# from the other kind of layer: LFM2's attention echoes by itself otherwise, and nothing needs its convolutions.
DOUBTED = {"lfm2": (r"layers\.\d+\.self_attn$", "echo")}
# Attention alone learns faster, except sums, which it is not held to.
STEPS = dict.fromkeys(FAMILIES, 14000) | {"lfm2": 9000, "gemma3": 9000, "deepseek": 9000}


class Module(nn.Module):
    """DeepSeek's module for one token more (MTP), as vLLM computes it."""

    def __init__(self, config):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (deepseek.DeepseekV3RMSNorm(size, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = deepseek.DeepseekV3DecoderLayer(config, config.num_hidden_layers)

    def forward(self, hidden, next_tokens, model):
        """What comes behind `next_tokens`, from what the model made of the tokens before them."""
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        ahead = model.model.embed_tokens(next_tokens) * (places[..., None] > 0)
        both = self.eh_proj(torch.cat([self.enorm(ahead), self.hnorm(hidden)], -1))
        out = self.layer(both, position_embeddings=model.model.rotary_emb(both, places))
        return model.lm_head(self.norm(out[0] if isinstance(out, tuple) else out))


class Net(nn.Module):
    """A family's model, and its module where it has one."""

    def __init__(self, family):
        super().__init__()
        self.model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
        self.module = Module(self.model.config) if family == "deepseek" else None
        for name, weight in self.named_parameters():
            liven(name, weight.data)

    def forward(self, tokens):
        """The logits, and the module's for the token behind the next; its training leaves the model alone."""
        if self.module is None:
            return self.model(tokens, use_cache=False).logits, None
        hidden = self.model.model(tokens, use_cache=False).last_hidden_state
        return self.model.lm_head(hidden), self.module(hidden.detach()[:, :-1], tokens[:, 1:], self.model)


def liven(name, weight):
    """Numbers to start from. transformers' own forget a state within a few tokens."""
    if name.endswith("A_log"):
        weight.copy_(torch.linspace(math.log(0.01), math.log(8), weight.numel()).view_as(weight))
    elif name.endswith("dt_bias"):
        weight.fill_(math.log(math.expm1(0.1)))
    elif name.endswith(("conv.weight", "conv1d.weight")):
        weight.uniform_(-0.5, 0.5)
    elif weight.dim() >= 2:
        weight.normal_(std=0.05)


def save(net, folder):
    """bfloat16 weights and a configuration that transformers and vLLM load as they are."""
    net.model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "kimi_linear":
        # transformers saves every layer as one with experts.
        weights = {name.replace("block_sparse_moe", "mlp"): value for name, value in weights.items()}
        config["num_experts"] = None
    if net.module is not None:
        own = f"model.layers.{config['num_hidden_layers']}."
        names = {"norm.": "shared_head.norm.", "layer.": ""}
        for name, value in net.module.state_dict().items():
            first = name.split(".")[0] + "."
            weights[own + names.get(first, first) + name.removeprefix(first)] = value.to(torch.bfloat16)
        weights[own + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[own + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(folder, kind):
    """The model alone, as transformers loads it from the files, to compute in `kind`."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, kind)).eval()
