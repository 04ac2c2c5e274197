"""Prefill on one real vLLM engine, decode on another: the same tokens as one engine alone, for pairs that
look alike and pairs that look nothing alike, in every family of models.

Tiny random models, in float32 where there are kernels for it, so that equal means equal. Every pair has a
control: D's prompt is changed everywhere but in its last token, and P's answer must come out all the same,
which only P's state can do.

An engine takes long to start and little time to answer: those of a family are started once, and
each may be P for one pair and D for another.
"""

import patches
import pytest
import standins
from exact import LENGTHS, check, check_close
from families import CHANNELS_FIRST, LATENT, MORE, NATIVE, RANKS, cases

STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
BLOCKS_OUTERMOST = {
    "prepare": [patches.blocks_outermost, patches.environment(VLLM_KV_CACHE_LAYOUT="BLHNC")]
}
ONE_LAYER_LAST = patches.environment(VLLM_PP_LAYER_PARTITION="5,1")
LOCAL = {"extra": {"transport": "local"}}
NIXL = {"extra": {"transport": "nixl"}}
NARROW = {"block_size": 32, "hf_overrides": {"sliding_window": 8}}
KIMI = {**LATENT, "prepare": [patches.latent_blocks, standins.kimi]}
#: The only format that vLLM's CPU kernels know.
HALF = {"dtype": "bfloat16", "prepare": [patches.split_prompts]}


def guesses(count):
    """Speculative tokens, looked up in what was said before."""
    return {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": count,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
    }


#: By family: the model, its engines by name, and the pairs of them.
FAMILIES = {
    "nemotron-h": (
        "nemotron_h",
        {
            "one": {},
            "another": {},
            "two ranks": RANKS,
            "two stages": STAGES,
            "larger blocks on two ranks": {"block_size": 256, **RANKS},
            "channels first": {"prepare": [CHANNELS_FIRST]},
            "a stage without states": {**STAGES, "prepare": [ONE_LAYER_LAST]},
            "two stages of two ranks": {**RANKS, **STAGES},
        },
        [
            ("another", "one"),
            ("one", "two ranks"),
            ("two stages", "one"),
            ("one", "two stages"),
            ("two stages", "larger blocks on two ranks"),
            ("larger blocks on two ranks", "one"),
            ("channels first", "one"),
            pytest.param("larger blocks on two ranks", "channels first", marks=MORE),
            pytest.param("two stages", "a stage without states", marks=MORE),
            pytest.param("a stage without states", "larger blocks on two ranks", marks=MORE),
            pytest.param("two stages of two ranks", "one", marks=MORE),
            pytest.param("a stage without states", "two stages of two ranks", marks=MORE),
        ],
    ),
    "qwen3": (
        "qwen3",
        {
            "one": {"block_size": 32},
            "another": {"block_size": 32},
            "larger blocks": {"block_size": 96},
            "blocks outermost": {"block_size": 64, **BLOCKS_OUTERMOST},
            "two ranks": RANKS,
        },
        [
            ("another", "one"),
            ("one", "larger blocks"),
            ("one", "blocks outermost"),
            ("blocks outermost", "one"),
            pytest.param("one", "two ranks", marks=MORE),
        ],
    ),
    "qwen3, local": (
        "qwen3",
        {"larger blocks": {"block_size": 96, **LOCAL}, "smaller": {"block_size": 64, **LOCAL}},
        [("larger blocks", "smaller")],
    ),
    # Prompts are longer than the window, of 48 tokens.
    "gemma3": (
        "gemma3",
        {"one": {"block_size": 32}, "larger blocks": {"block_size": 64}, "two ranks": RANKS},
        [("one", "larger blocks"), pytest.param("two ranks", "one", marks=MORE)],
    ),
    "gemma3, each token of a window counts": (
        "gemma3",
        {"one": NARROW, "another": NARROW},
        [("another", "one")],
    ),
    "falcon-h1, one group": (
        "falcon_h1",
        {"one": {}, "larger blocks": {"block_size": 96}, "two ranks": RANKS},
        [("one", "larger blocks"), ("one", "two ranks"), ("two ranks", "one")],
    ),
    "qwen3 over nixl": (
        "qwen3",
        {"one": {"block_size": 32, **NIXL}, "larger blocks": {"block_size": 96, **NIXL}},
        [("one", "larger blocks"), ("larger blocks", "one")],
    ),
    "nemotron-h over nixl": (
        "nemotron_h",
        {"one": NIXL, "another": NIXL, "two ranks": {**NIXL, **RANKS}},
        [
            ("another", "one"),
            pytest.param("one", "two ranks", marks=MORE),
            pytest.param("two ranks", "one", marks=MORE),
        ],
    ),
    "deepseek": (
        "deepseek",
        {
            "one": {"block_size": 32, **LATENT},
            "larger blocks": {"block_size": 96, **LATENT},
            "two ranks": {"block_size": 64, **RANKS, **LATENT},
        },
        [
            ("one", "larger blocks"),
            ("two ranks", "one"),
            ("larger blocks", "two ranks"),
        ],
    ),
    "kimi-linear": (
        "kimi_linear",
        {
            "one": {"block_size": 128, **KIMI},
            "two ranks": {"block_size": 256, **KIMI, **RANKS},
        },
        [("two ranks", "one"), ("one", "two ranks")],
    ),
    "qwen3.5": (
        "qwen3_5",
        {
            "one": HALF,
            "another": HALF,
            "two ranks": {**HALF, **RANKS},
            "one guess": {**HALF, **guesses(1)},
            "three guesses": {**HALF, **guesses(3)},
        },
        [
            ("another", "one"),
            ("two ranks", "one"),
            ("one", "two ranks"),
            ("one", "three guesses"),
            pytest.param("three guesses", "one guess", marks=MORE),
            pytest.param("three guesses", "two ranks", marks=MORE),
        ],
    ),
    "lfm2": (
        "lfm2",
        {"one": NATIVE, "two ranks": {**RANKS, **NATIVE}},
        [("two ranks", "one"), ("one", "two ranks")],
    ),
}


@pytest.mark.parametrize(("family", "p", "d"), list(cases(FAMILIES)))
def test_tokens_are_those_of_one_engine_alone(fleet, family, p, d):
    kind, engines, _ = FAMILIES[family]
    prefill, decode = fleet(kind, engines, p), fleet(kind, engines, d)
    if kind != "qwen3_5":
        check(prefill, decode, seed=f"{family}: {p} to {d}")
        return
    # vLLM's CPU kernels cannot start with a single token of a gated delta net, and with guesses
    # they are wrong by themselves from the third token on.
    if engines[p] == engines[d]:
        check(prefill, decode, LENGTHS[2:])
    else:
        check_close(prefill, decode, LENGTHS[2:], tokens=2 if "guess" in d else 6)
