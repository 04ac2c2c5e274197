"""At its start an engine's own kernels are asked where they write, for everything that runs on a CPU."""

import gpu_asking
import patches
import pytest
import standins
import torch
from asked import answers, own_time, remember

#: Without it, vLLM's own answers for these models are wrong on a CPU.
NATIVE = {"compilation_config": {"custom_ops": ["none"]}}
LATENT = {**NATIVE, "attention_backend": "CPU_MLA", "block_size": 32}
CHANNELS_FIRST = patches.environment(VLLM_SSM_CONV_STATE_LAYOUT="DS")
GUESSES = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
MORE = pytest.mark.more
#: A model, how it runs, and the back ends that must have been asked.
ENGINES = {
    "attention": ("qwen3", {}, {"CPU_ATTN"}),
    "attention in two bytes": ("qwen3", {"dtype": "bfloat16"}, {"CPU_ATTN"}),
    "latents": ("deepseek", LATENT, {"CPU_MLA"}),
    "latents in two bytes": (
        "deepseek",
        {**NATIVE, "dtype": "bfloat16", "attention_backend": "AMX_MLA", "block_size": 32},
        {"AMX_MLA"},
    ),
    "mamba2": ("nemotron_h", {}, {"CPU_ATTN", "MAMBA2_ATTN"}),
    "mamba2, channels first": (
        "nemotron_h",
        {"prepare": [CHANNELS_FIRST]},
        {"CPU_ATTN", "MAMBA2_ATTN"},
    ),
    "delta net": ("qwen3_5", {"dtype": "bfloat16"}, {"CPU_ATTN", "GDN_ATTN"}),
    "delta net with columns for guesses": (
        "qwen3_5",
        {"dtype": "bfloat16", "speculative_config": GUESSES},
        {"CPU_ATTN", "GDN_ATTN"},
    ),
    "short convolution": ("lfm2", NATIVE, {"CPU_ATTN", "SHORT_CONV_ATTN"}),
    "kimi": (
        "kimi_linear",
        {**LATENT, "block_size": 128, "prepare": [patches.latent_blocks, standins.kimi]},
        {"CPU_MLA", "GDN_ATTN"},
    ),
}
if not torch.cpu._is_amx_tile_supported():
    # There are no such kernels to ask.
    del ENGINES["latents in two bytes"]
OFTEN = ("attention in two bytes", "latents", "mamba2, channels first", "delta net", "short convolution")
#: Seconds that a worker's start may take longer.
MOST = 1.0


@pytest.mark.parametrize(
    "engine", [name if name in OFTEN else pytest.param(name, marks=MORE) for name in ENGINES]
)
def test_every_kernel_is_asked_and_agrees(serve, engine):
    kind, options, wanted = ENGINES[engine]
    prepare = [*options.get("prepare", ()), remember, own_time]
    server = serve(kind, "kv_both", **options | {"prepare": prepare})
    asked, not_asked, seconds = server.call(answers)
    assert (asked, not_asked) == (wanted, {})
    assert seconds < MOST


def test_what_runs_on_a_gpu_does_not_rot(capsys):
    with gpu_asking.models() as models:
        assert gpu_asking.check(models, "attention", ("qwen3", {}, {"CPU_ATTN"}))
        # One that was not asked is an error.
        assert not gpu_asking.check(models, "other", ("qwen3", {}, {"FLASH_ATTN"}))
    right, wrong = capsys.readouterr().out.splitlines()
    assert right.startswith("attention: asked CPU_ATTN in ")
    assert wrong.startswith("other: WRONG: asked CPU_ATTN instead of FLASH_ATTN")
