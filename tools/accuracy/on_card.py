"""As `models`, for one GPU: both engines on the one card (TP 1), in bfloat16, with the kernels that vLLM chooses
there."""

import cards
import patches

from . import smollm2, wide
from .models import DS, LOOKED_UP, OWN, PREFIX, PUSH

DEVICE = "cuda"
USUAL = {
    "max_num_seqs": 32,
    "blocks": 600,
    "dtype": "bfloat16",
    "prepare": [patches.split_prompts],
    # Many engines share the card, and none may measure what is free while others start.
    "gpu_memory_utilization": 0.02,
    "kv_cache_memory_bytes": 2 << 30,
}
#: The layers of a delta net otherwise want a library that not everybody has.
FAMILIES = {
    "nemotron-h": {},
    "falcon-h1": {},
    "lfm2": {},
    "gemma3": {"block_size": 32},
    "deepseek": {"block_size": 64},
    "kimi-linear": {"block_size": 128},
    "qwen3.5": {"gdn_prefill_backend": "triton"},
}
REAL = {
    "smollm2": {"max_model_len": 1024, "block_size": 32, "logits_processors": ["accuracy.real:Forced"]},
}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
    },
}
MODULE = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
FP8 = {"kv_cache_dtype": "fp8"}
TRITON = {"attention_config": {"backend": "TRITON_ATTN"}}
TRITON_MLA = {"attention_config": {"backend": "TRITON_MLA"}}
CHUNKS = {"max_num_batched_tokens": 64}
EVERY = {"TP 1 → 1": ({}, {})}
WAYS = {
    f"over {transport}": tuple({"extra": {"transport": transport}} for _ in range(2)) for transport in ("nixl", "tcp")
}
PUSHED = {"push, chunks of 64": ({**PUSH, **CHUNKS}, {}, "push")}
ORDERS = {"convolution SD → DS": ({}, DS), "convolution DS → SD": (DS, {})}
GRAPHED = {"CUDA graphs on D": ({}, GRAPHS)}


def blocks(first, second):
    return {
        f"blocks of {one} → {other}": ({"block_size": one}, {"block_size": other})
        for one, other in ((first, second), (second, first))
    }


def both(name, options):
    return {name: (options, options)}


#: Through either connector.
CELLS = {
    "nemotron-h": EVERY | blocks(128, 256) | both("fp8 cache", FP8),
    "falcon-h1": EVERY | blocks(128, 256) | both("fp8 cache", FP8) | {"prefix hits": (PREFIX, PREFIX, "prefix")},
    "lfm2": EVERY,
    "gemma3": EVERY
    | blocks(32, 64)
    | both("fp8 cache", FP8)
    | both("guesses that are looked up", LOOKED_UP)
    | {"prefix hits": (PREFIX, PREFIX, "prefix")},
    "deepseek": EVERY
    | blocks(64, 128)
    | both("fp8 cache", {**FP8, **TRITON_MLA})
    | both("its module guesses (MTP)", MODULE)
    | {"prefix hits": (PREFIX, PREFIX, "prefix")},
    "kimi-linear": EVERY | blocks(128, 256),
    "qwen3.5": EVERY | blocks(640, 1280),
}
#: Through ours alone.
OURS = {
    "nemotron-h": WAYS | ORDERS | both("Triton", TRITON),
    "falcon-h1": WAYS | PUSHED | ORDERS | GRAPHED | both("Triton", TRITON) | {"drafts of their own": (OWN, OWN)},
    "lfm2": WAYS,
    "gemma3": WAYS | PUSHED | both("Triton", TRITON),
    "deepseek": WAYS | PUSHED | GRAPHED | both("Triton", TRITON_MLA),
    "kimi-linear": WAYS | PUSHED | ORDERS,
    "qwen3.5": WAYS | PUSHED | ORDERS | GRAPHED,
}
REAL_CELLS = EVERY | blocks(32, 64) | both("fp8 cache", FP8)
REAL_OURS = WAYS | GRAPHED | both("Triton", TRITON) | both("fp8 cache, Triton", {**FP8, **TRITON})
CONTROL = "TP 1 → 1"
DRAFTS = {"deepseek": "its module guesses (MTP)"}


def weights(folder, room):
    """As `models.weights`; models with latents get the heads that a GPU's kernels know."""
    if folder.name in REAL:
        return smollm2.weights()
    cards.checked(folder)
    return wide.heads(folder, room / folder.name) if folder.name in ("deepseek", "kimi-linear") else folder


