"""Prefill on one real SGLang engine, decode on another: the tokens of one engine alone, for every family that runs on a CPU
with the stand-ins, in pairs that look alike and pairs that do not.

Tiny random models, in float32 where there are kernels for it. SGLang's decode engine never computes a prompt: what it answers
it can only have from P. The controls show it all the same, and that a spoiled number is seen.
"""

import pytest
from exact import check

MORE = pytest.mark.more
RANKS = {"options": {"tp_size": 2}}
PAGES = {"options": {"page_size": 16}}
CHUNKS = {"options": {"page_size": 16, "chunked_prefill_size": 32}}

#: By family: engines by their names, and pairs of them.
FAMILIES = {
    "qwen3": (
        {
            "chunks": ("prefill", CHUNKS),
            "one": ("decode", {}),
            "early": ("decode", {"options": {"page_size": 32}, "settings": {"pages": "early"}}),
            "p": ("prefill", {}),
            "p of two": ("prefill", RANKS),
            "two": ("decode", {"options": {"tp_size": 2, "page_size": 4}}),
        },
        [
            pytest.param("chunks", "one", marks=MORE),
            ("chunks", "early"),
            ("p", "two"),
            pytest.param("p of two", "one", marks=MORE),
            pytest.param("p of two", "two", marks=MORE),
        ],
    ),
    "nemotron_h": (
        {
            "p": ("prefill", {"options": {"chunked_prefill_size": 32}}),
            "one": ("decode", PAGES),
            "p of two": ("prefill", RANKS),
            "two": ("decode", RANKS),
        },
        [
            pytest.param("p", "one", marks=MORE),
            ("p", "two"),
            ("p of two", "one"),
            pytest.param("p of two", "two", marks=MORE),
        ],
    ),
    # One group, which both ranks hold: where SGLang's own back ends write into the neighbour's slot.
    "falcon_h1": (
        {
            "p": ("prefill", {}),
            "one": ("decode", {}),
            "p of two": ("prefill", RANKS),
            "two": ("decode", RANKS),
        },
        [("p", "two"), pytest.param("p of two", "one", marks=MORE), pytest.param("p", "one", marks=MORE)],
    ),
    "qwen3_5": (
        {
            "p": ("prefill", {}),
            "one": ("decode", {}),
        },
        [("p", "one")],
    ),
    "lfm2": (
        {
            "p": ("prefill", {}),
            "one": ("decode", PAGES),
            "two": ("decode", RANKS),
        },
        [pytest.param("p", "one", marks=MORE), pytest.param("p", "two", marks=MORE)],
    ),
    "gemma3": (
        {"p": ("prefill", {}), "one": ("decode", PAGES)},
        [pytest.param("p", "one", marks=MORE)],
    ),
}
CASES = [
    pytest.param(family, *(pair.values if hasattr(pair, "values") else pair), marks=getattr(pair, "marks", ()))
    for family, (_, pairs) in FAMILIES.items()
    for pair in pairs
]


@pytest.mark.parametrize(("family", "prefill", "decode"), CASES)
def test_a_pair_answers_as_one_engine(fleet, family, prefill, decode):
    engines, _ = FAMILIES[family]
    three = fleet(family, {name: engines[name] for name in (prefill, decode)})
    # In bfloat16.
    check(*three, together=family != "qwen3_5")
