"""Prefill on a real vLLM engine and decode on a real SGLang engine, and the other way round: the tokens of vLLM alone. What no
other project does; so each family that is taken by default is here."""

import json

import faults
import mixed
import patches
import pytest
import safetensors.torch
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
KV, MAMBA2, GDN = ("k", "v"), ("conv.x", "conv.b", "conv.c", "ssm"), ("conv.q", "conv.k", "conv.v", "ssm")
#: What states are called, by layer: a contract between engines. A name that changes in one of them is no longer found by another.
STATES = {
    "qwen3": [KV] * 4,
    "nemotron_h": [MAMBA2, KV, MAMBA2, (), MAMBA2, KV],
    "falcon_h1": [KV + MAMBA2] * 4,
    "lfm2": [("conv.x",), KV] * 2,
    "deepseek": [("latent",)] * 4,
    "gemma3_tied": [KV] * 4,
    "qwen3_5": [GDN, KV] * 2,
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in ("qwen3", "nemotron_h") else MORE) for kind in FAMILIES])
def test_both_ways_the_tokens_are_those_of_one_engine(start, tmp_path, kind):
    options, p, d = FAMILIES[kind]
    near = "dtype" in options
    told = {"KVFERRY_DUMP_MANIFEST": str(tmp_path)}

    def begin(role, side):
        return None if side is None else start(kind, role, **side | {"environment": told | side.get("environment", {})})

    prefill, decode = begin("prefill", p), begin("decode", d)
    vllm = start.vllm(kind, **options | {"prepare": [*options.get("prepare", ()), patches.environment(**told)]})
    if decode is not None:
        mixed.check_to_sglang(vllm, decode.ready(), prompts(21, LENGTHS), near)
    if prefill is not None:
        mixed.check_to_vllm(prefill.ready(), vllm, prompts(22, LENGTHS), near)
    mixed.check_controls(prefill, vllm, decode)
    expected = {f"layers.{layer}/{name}" for layer, names in enumerate(STATES[kind]) for name in names}
    manifests = [json.loads(path.read_text())["manifest"] for path in tmp_path.glob("*.json")]
    assert len(manifests) == 1 + (p is not None) + (d is not None)
    for manifest in manifests:
        assert {piece["state"] for group in manifest["groups"] for piece in group["pieces"]} == expected, manifest["engine"]
        assert "weights" in manifest["identity"]


@MORE
def test_two_models_of_one_configuration_are_refused(start, folder):
    vllm = start.vllm("lfm2", **NATIVE)
    path = folder / "lfm2" / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    trained = {name: weight + 1e-3 for name, weight in weights.items()}
    safetensors.torch.save_file(trained, path, metadata={"format": "pt"})
    try:
        decode = start("lfm2", "decode").ready()
        (answer,) = mixed.to_sglang(vllm, decode, prompts(23, (20,)))
        assert "'weights' differs" in answer["error"]
    finally:
        safetensors.torch.save_file(weights, path, metadata={"format": "pt"})


@MORE
def test_a_family_that_was_not_shown_is_refused_by_name_or_tried(start):
    vllm = start.vllm("qwen3", block_size=32, prepare=[faults.nothing_shown])
    given = prompts(24, (20,))
    decode = start("qwen3", "decode", prepare=[faults.nothing_shown]).ready()
    (answer,) = mixed.to_sglang(vllm, decode, given)
    assert "'engine' differs" in answer["error"] and "'other_engines'" in answer["error"]
    brave = start("qwen3", "decode", prepare=[faults.nothing_shown], settings={"other_engines": "try", "audit": "off"}).ready()
    mixed.check_to_sglang(vllm, brave, given, False)
    assert brave.said("verified: what landed here")
