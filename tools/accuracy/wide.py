"""A model with latents whose heads are as wide as a GPU's kernels want them (128 numbers of each key without its
position, and
of each value): what is added is zero, so that all chances stay what they were but for rounding.

What is kept for a request is the latents, which do not change.
"""

import json
import math

import safetensors
import safetensors.torch
import torch

WIDTH = 128


def heads(folder, into):
    """The model of `folder`, in `into`."""
    into.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    count, nope, rope = (config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    value = config["v_head_dim"]
    # What a key and a query agree by is divided by the root of their width.
    scale = math.sqrt((WIDTH + rope) / (nope + rope))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    for name, given in weights.items():
        layer, _, part = name.partition(".self_attn.")
        if f"{layer}.self_attn.kv_b_proj.weight" not in weights:
            continue
        if part in ("q_b_proj.weight", "q_proj.weight"):
            key, position = given.view(count, nope + rope, -1).split([nope, rope], 1)
            made = torch.cat([_more(key, WIDTH, 1), position], 1) * scale
            weights[name] = made.flatten(0, 1).contiguous()
        elif part == "kv_b_proj.weight":
            both = given.view(count, nope + value, -1).split([nope, value], 1)
            weights[name] = torch.cat([_more(one, WIDTH, 1) for one in both], 1).flatten(0, 1).contiguous()
        elif part == "o_proj.weight":
            made = _more(given.view(len(given), count, value), WIDTH, 2)
            weights[name] = made.flatten(1).contiguous()
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        said = file.metadata()
    safetensors.torch.save_file(weights, into / "model.safetensors", metadata=said)
    config |= {"qk_nope_head_dim": WIDTH, "qk_head_dim": WIDTH + rope, "v_head_dim": WIDTH}
    (into / "config.json").write_text(json.dumps(config, indent=2))
    return into


def _more(given, width, axis):
    shape = list(given.shape)
    shape[axis] = width - shape[axis]
    return torch.cat([given, given.new_zeros(shape)], axis)
