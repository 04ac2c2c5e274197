"""A pair that cannot work costs the request, says why, and nothing else."""

import random

import pytest
from exact import hand_over, nothing_left, prompts
from heard import everything_said, listen, said

MORE = pytest.mark.more
HALF = {"dtype": "bfloat16"}
#: By what differs: P, D, and what D must say of it.
PAIRS = {
    "the model": ("qwen3", {}, "gemma3", {}, ["'family' differs", "'qwen3'", "'gemma3_text'"]),
    "the format": ("qwen3", {}, "qwen3", HALF, ["'format' differs", "'f32'", "'bf16'"]),
    "the format of a state": (
        "qwen3_5",
        {**HALF, "mamba_ssm_cache_dtype": "float32"},
        "qwen3_5",
        {**HALF, "mamba_ssm_cache_dtype": "bfloat16"},
        ["layers.0/ssm", "f32", "bf16"],
    ),
}


@pytest.mark.parametrize(
    ("differs", "policy"),
    [
        ("the model", "fail"),
        ("the format of a state", "recompute"),
        pytest.param("the model", "recompute", marks=MORE),
        pytest.param("the format of a state", "fail", marks=MORE),
        pytest.param("the format", "fail", marks=MORE),
        pytest.param("the format", "recompute", marks=MORE),
    ],
)
def test_a_pair_that_cannot_work_is_refused_by_name(serve, differs, policy):
    kind, p, other, d, words = PAIRS[differs]
    prefill = serve(kind, "kv_producer", **p)
    decode = serve(other, "kv_consumer", failure=policy, **d)
    decode.call(listen)
    (prompt,) = prompts(random.Random(3), [70])
    alone, _ = decode.generate(prompt)
    moved = hand_over(prefill, decode, prompt)
    assert moved == (alone if policy == "recompute" else [])
    why = decode.call(said, "the load failed")
    assert why is not None, decode.call(everything_said)
    for word in words:
        assert word in why
    # The engine is none the worse.
    assert decode.generate(prompt)[0] == alone
    nothing_left(prefill, decode)
