"""D has kvferry, and P runs vLLM's stock NixlConnector: the same tokens as one engine alone, P's blocks freed, and
what cannot be read refused by name.

As in `test_pairs.py`, engines of a family are started once. Only what every run needs is not marked `more`.
"""

import patches
import pytest
from exact import LENGTHS, check

MORE = pytest.mark.more
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
#: The stock connector serves states in this order only.
CHANNELS_FIRST = patches.environment(VLLM_SSM_CONV_STATE_LAYOUT="DS")
STOCK = {"stock": True}
FERRY = {"extra": {"transport": "nixl"}}
NATIVE = {"compilation_config": {"custom_ops": ["none"]}}
LATENT = {**NATIVE, "attention_backend": "CPU_MLA", "prepare": [patches.latent_blocks]}

#: By family: the model, its engines by name, and the pairs of them.
FAMILIES = {
    "qwen3": (
        "qwen3",
        {
            "stock": {"block_size": 32, **STOCK},
            "stock, larger blocks": {"block_size": 96, **STOCK},
            "stock, two ranks": {"block_size": 64, **RANKS, **STOCK},
            "one": {"block_size": 32, **FERRY},
            "larger blocks": {"block_size": 96, **FERRY},
            "two ranks": {"block_size": 64, **RANKS, **FERRY},
        },
        [
            ("stock", "one"),
            pytest.param("stock", "larger blocks", marks=MORE),
            pytest.param("stock, larger blocks", "one", marks=MORE),
            pytest.param("stock", "two ranks", marks=MORE),
            pytest.param("stock, two ranks", "one", marks=MORE),
        ],
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "stock": {"prepare": [CHANNELS_FIRST], **STOCK},
            "stock, two ranks": {"prepare": [CHANNELS_FIRST], **RANKS, **STOCK},
            "stock, larger blocks": {"prepare": [CHANNELS_FIRST], "block_size": 256, **STOCK},
            "one": FERRY,
            "two ranks": {**FERRY, **RANKS},
        },
        [
            pytest.param("stock", "one", marks=MORE),
            pytest.param("stock, larger blocks", "one", marks=MORE),
            pytest.param("stock", "two ranks", marks=MORE),
            pytest.param("stock, two ranks", "one", marks=MORE),
        ],
    ),
    # Prompts are longer than the window, of 48 tokens.
    "gemma3": (
        "gemma3",
        {
            "stock": {"block_size": 32, **STOCK},
            "stock, two ranks": {"block_size": 64, **RANKS, **STOCK},
            "larger blocks": {"block_size": 64, **FERRY},
            "two ranks": {"block_size": 32, **RANKS, **FERRY},
        },
        [
            pytest.param("stock", "larger blocks", marks=MORE),
            pytest.param("stock", "two ranks", marks=MORE),
            pytest.param("stock, two ranks", "larger blocks", marks=MORE),
        ],
    ),
    "deepseek": (
        "deepseek",
        {
            "stock": {"block_size": 32, **LATENT, **STOCK},
            "stock, two ranks": {"block_size": 64, **RANKS, **LATENT, **STOCK},
            "larger blocks": {"block_size": 96, **LATENT, **FERRY},
            "two ranks": {"block_size": 64, **RANKS, **LATENT, **FERRY},
        },
        [
            pytest.param("stock", "larger blocks", marks=MORE),
            pytest.param("stock", "two ranks", marks=MORE),
            pytest.param("stock, two ranks", "larger blocks", marks=MORE),
        ],
    ),
}


def _cases():
    for family, (_, _, pairs) in FAMILIES.items():
        for pair in pairs:
            p, d = getattr(pair, "values", pair)
            marks = getattr(pair, "marks", ())
            yield pytest.param(family, p, d, id=f"{family}: {p} to {d}", marks=marks)


@pytest.mark.parametrize(("family", "p", "d"), list(_cases()))
def test_tokens_are_those_of_one_engine_alone(fleet, family, p, d):
    kind, engines, _ = FAMILIES[family]
    prefill, decode = fleet(kind, engines, p), fleet(kind, engines, d)
    check(prefill, decode, LENGTHS, seed=f"stock {family}: {p} to {d}")
