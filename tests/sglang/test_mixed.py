"""Prefill on a real vLLM engine and decode on a real SGLang engine, and the other way round: the tokens of vLLM alone. What no
other project does; so each family that is taken by default is here."""

import mixed
import patches
import pytest
from exact import prompts
from families import LATENT, NATIVE

MORE = pytest.mark.more
PAGES = {"options": {"page_size": 16}}
#: The only format that vLLM's CPU kernels know.
HALF = {"dtype": "bfloat16", "prepare": [patches.split_prompts]}
CHUNKS = {"options": {"page_size": 16, "chunked_prefill_size": 32}}

#: By family: vLLM's options, SGLang's as P and as D; None: not in this direction.
FAMILIES = {
    "qwen3": ({"block_size": 32}, CHUNKS, {}),
    "nemotron_h": ({}, {}, PAGES),
    "falcon_h1": ({}, {}, {}),
    "lfm2": (NATIVE, {}, PAGES),
    # SGLang computes no prompt of a model with MLA on a CPU.
    "deepseek": ({"block_size": 32, **LATENT}, None, {}),
    "gemma3_tied": ({"block_size": 32}, {}, PAGES),
    "qwen3_5": (HALF, *[{"environment": {"SGLANG_MAMBA_CONV_DTYPE": "bfloat16"}}] * 2),
}
LENGTHS = (2, 31, 33, 100)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in ("qwen3", "nemotron_h") else MORE) for kind in FAMILIES])
def test_both_ways_the_tokens_are_those_of_one_engine(start, folder, kind):
    options, p, d = FAMILIES[kind]
    near = "dtype" in options
    prefill = start(kind, "prefill", **p) if p is not None else None
    decode = start(kind, "decode", **d) if d is not None else None
    vllm = start.vllm(kind, **options)
    if decode is not None:
        mixed.check_to_sglang(vllm, decode.ready(), prompts(21, LENGTHS), near)
    if prefill is not None:
        mixed.check_to_vllm(prefill.ready(), vllm, prompts(22, LENGTHS), near)
    mixed.check_controls(prefill, vllm, decode)
