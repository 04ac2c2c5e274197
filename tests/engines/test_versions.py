"""P and D of different versions of vLLM, in both directions: the tokens of one engine alone.

`tools/test-versions.sh` makes an environment for each version, and names them in KVFERRY_OTHER_VLLM as
VERSION=PYTHON, with a space between two.
"""

import contextlib
import os

import elsewhere
import patches
import pytest
from exact import LENGTHS, check
from tiny import save_model

pytestmark = pytest.mark.more

OTHERS = dict(one.split("=") for one in os.environ.get("KVFERRY_OTHER_VLLM", "").split())
#: By family: the model and its engines. 0.31's CPU kernels for convolutions know no float32.
FAMILIES = {
    "qwen3": ("qwen3", {"block_size": 32}),
    "other block sizes": ("qwen3", {"block_size": 32}),
    "windows": ("gemma3", {"block_size": 32}),
    "hybrid": ("nemotron_h", {"dtype": "bfloat16", "prepare": [patches.split_prompts]}),
    "latents": (
        "deepseek",
        {
            "block_size": 32,
            "compilation_config": {"custom_ops": ["none"]},
            "attention_backend": "CPU_MLA",
            "prepare": [patches.latent_blocks],
        },
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("version", OTHERS)
def test_a_pair_of_versions_hands_over_both_ways(serve, folder, version, family):
    kind, options = FAMILIES[family]
    here = serve(kind, "kv_both", **options)
    larger = {"block_size": 96} if family == "other block sizes" else {}
    other = elsewhere.server(OTHERS[version], folder / kind, "kv_both", **options | larger)
    try:
        assert other.call(version_of) == version
        lengths = LENGTHS[2:] if family == "hybrid" else LENGTHS
        check(here, other, lengths, seed=f"{family}, to {version}")
        check(other, here, lengths, seed=f"{family}, from {version}")
    finally:
        other.close()


@pytest.mark.parametrize("family", ["qwen3", "hybrid"])
def test_two_other_versions_hand_over_to_each_other(folder, family):
    assert len(OTHERS) >= 2, "tools/test-versions.sh names two"
    kind, options = FAMILIES[family]
    if not (folder / kind).exists():
        save_model(kind, folder / kind)
    with contextlib.ExitStack() as opened:
        servers = []
        for version, python in list(OTHERS.items())[:2]:
            servers.append(elsewhere.server(python, folder / kind, "kv_both", **options))
            opened.callback(servers[-1].close)
            assert servers[-1].call(version_of) == version
        lengths = LENGTHS[2:] if family == "hybrid" else LENGTHS
        for p, d in (servers, servers[::-1]):
            check(p, d, lengths, seed=f"{family}, between others")


# In the engine's process.


def version_of(engine):
    import vllm

    return vllm.__version__.partition("+")[0]
