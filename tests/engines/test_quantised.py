"""Caches that vLLM quantises on a CPU: to 8 bits, with scales of the layer, and to nothing else."""

import pytest
from exact import check, check_refused
from serving import Server
from tiny import save_model
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

#: vLLM quantises on a CPU that has AVX-512.
pytestmark = pytest.mark.more

WAYS = {
    "plain": {"block_size": 32},
    "fp8": {"kv_cache_dtype": "fp8", "block_size": 32},
    "fp8, larger blocks": {"kv_cache_dtype": "fp8", "block_size": 64},
    "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2", "block_size": 32},
}


def test_the_answer_is_that_of_one_engine(fleet):
    check(fleet("qwen3", WAYS, "fp8"), fleet("qwen3", WAYS, "fp8, larger blocks"))


@pytest.mark.parametrize(
    ("p", "d", "words"),
    [
        ("fp8", "plain", ["fp8_e4m3, keys times 1, values times 1 (1 bytes)", "f32 (4 bytes)"]),
        ("fp8", "fp8_e5m2", ["fp8_e4m3", "fp8_e5m2"]),
    ],
)
def test_another_format_is_refused_with_both(fleet, p, d, words):
    check_refused(fleet("qwen3", WAYS, p), fleet("qwen3", WAYS, d), words)


@pytest.mark.parametrize("mode", ["int8_per_token_head", "nvfp4"])
def test_others_are_refused_by_name_when_an_engine_starts(folder, mode):
    """vLLM's CPU back end does not name them among those that it takes, but does not look."""
    assert not CPUAttentionBackend.supports_kv_cache_dtype(mode)
    with pytest.raises(AssertionError, match=f"{mode} caches of the CPU back end are not described"):
        Server(save_model("qwen3", folder / mode), "kv_both", kv_cache_dtype=mode, block_size=32)
