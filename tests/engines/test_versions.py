"""P and D of different versions of vLLM, in both directions: the tokens of one engine alone.

`tools/test-versions.sh` makes an environment for each version, and names them in KVFERRY_OTHER_VLLM as
VERSION=PYTHON, with a space between two.
"""

import contextlib
import os
import sys

import elsewhere
import patches
import pytest
from exact import LENGTHS, check
from tiny import save_model

pytestmark = pytest.mark.more

OTHERS = dict(one.split("=") for one in os.environ.get("KVFERRY_OTHER_VLLM", "").split())
#: What the other tests run with; each of the others with it, with each other, and the last, which no other test sees,
#: with itself.
HERE = "here"
VERSIONS = [HERE, *OTHERS]
PAIRS = [(one, other) for at, one in enumerate(VERSIONS) for other in VERSIONS[at + 1 :]] + [(VERSIONS[-1],) * 2]
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


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, folder):
    """Engines of a family: the first and the second of a pair, of each version, once they are asked for."""
    kind, options = FAMILIES[request.param]
    if not (folder / kind).exists():
        save_model(kind, folder / kind)
    running = {}

    def engine(version, second):
        if (version, second) not in running:
            larger = {"block_size": 96} if second and request.param == "other block sizes" else {}
            python = OTHERS.get(version, sys.executable)
            server = elsewhere.server(python, folder / kind, "kv_both", **options | larger)
            running[version, second] = closing.enter_context(contextlib.closing(server))
            assert version in (HERE, server.call(version_of))
        return running[version, second]

    with contextlib.ExitStack() as closing:
        yield request.param, engine


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_a_pair_of_versions_hands_over_both_ways(family, pair):
    name, engine = family
    one, other = engine(pair[0], False), engine(pair[1], True)
    lengths = LENGTHS[2:] if name == "hybrid" else LENGTHS
    check(one, other, lengths, seed=f"{name}, {pair} there")
    check(other, one, lengths, seed=f"{name}, {pair} back")


# In the engine's process.


def version_of(engine):
    import vllm

    return vllm.__version__.partition("+")[0]
