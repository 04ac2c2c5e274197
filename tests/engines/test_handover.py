"""Prefill on one real vLLM engine, decode on another: the same tokens as one engine alone.

Tiny random models in float32, so that equal means equal. Every pair has a control: D's prompt is
changed everywhere but in its last token, and P's answer must come out all the same, which only P's
state can do.
"""

import pytest
from exact import check

MANY = {"distributed_executor_backend": "mp"}
PAIRS = {
    "qwen3": ("qwen3", {"block_size": 32}, {"block_size": 32}),
    "qwen3, larger blocks on D": ("qwen3", {"block_size": 32}, {"block_size": 96}),
    "qwen3, larger blocks on P, local": (
        "qwen3",
        {"block_size": 96, "extra": {"transport": "local"}},
        {"block_size": 64, "extra": {"transport": "local"}},
    ),
    "gemma3, a prompt longer than the window": ("gemma3", {"block_size": 32}, {"block_size": 64}),
    "gemma3, each token of a window counts": (
        "gemma3",
        {"block_size": 32, "hf_overrides": {"sliding_window": 8}},
        {"block_size": 32, "hf_overrides": {"sliding_window": 8}},
    ),
    "nemotron-h": ("nemotron_h", {}, {}),
    "qwen3, TP 1 to 2": ("qwen3", {"block_size": 32}, {"tensor_parallel_size": 2, **MANY}),
    "gemma3, TP 2 to 1": ("gemma3", {"tensor_parallel_size": 2, **MANY}, {"block_size": 32}),
    "falcon-h1, one group, TP 1 to 2": ("falcon_h1", {}, {"tensor_parallel_size": 2, **MANY}),
    "nemotron-h, TP 1 to 2": ("nemotron_h", {}, {"tensor_parallel_size": 2, **MANY}),
    "falcon-h1, one group, TP 2 to 1": ("falcon_h1", {"tensor_parallel_size": 2, **MANY}, {}),
    "falcon-h1, one group": ("falcon_h1", {}, {"block_size": 96}),
}

#: For `tools/test.sh --all`.
MORE = ("qwen3, TP 1 to 2", "gemma3, TP 2 to 1")


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=[pytest.mark.more] * (pair in MORE)) for pair in PAIRS]
)
def test_tokens_are_those_of_one_engine_alone(serve, pair):
    kind, p, d = PAIRS[pair]
    check(serve(kind, "kv_producer", **p), serve(kind, "kv_consumer", **d), seed=pair)
