"""Prefill on one real vLLM engine, decode on another: the same tokens as one engine alone.

Tiny random models in float32, so that equal means equal. Every pair has a control: D's prompt is
changed everywhere but in its last token, and P's answer must come out all the same, which only P's
state can do.
"""

import random

import pytest
from exact import check, prompts
from serving import REMOTE_DECODE

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
    "nemotron-h, TP 1 to 2": ("nemotron_h", {}, {"tensor_parallel_size": 2, **MANY}),
    "falcon-h1, one group, TP 2 to 1": ("falcon_h1", {"tensor_parallel_size": 2, **MANY}, {}),
    "falcon-h1, one group": ("falcon_h1", {}, {"block_size": 96}),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_tokens_are_those_of_one_engine_alone(serve, pair):
    kind, p, d = PAIRS[pair]
    check(serve(kind, "kv_producer", **p), serve(kind, "kv_consumer", **d), seed=pair)


def test_a_dead_prefill_engine_costs_its_requests_alone(serve):
    prefill = serve("qwen3", "kv_producer", block_size=32)
    decode = serve(
        "qwen3", "kv_consumer", block_size=32, failure="recompute", extra={"handshake": 1.0}
    )
    (prompt,) = prompts(random.Random(5), [70])
    alone, _ = decode.generate(prompt)
    _, params = prefill.generate(prompt, 1, dict(REMOTE_DECODE))
    prefill.close()
    assert decode.generate(prompt, params=params)[0] == alone
    assert decode.generate(prompt)[0] == alone
    assert decode.used_blocks() == 0
