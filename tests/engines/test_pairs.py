"""Pairs of engines that look nothing alike, in every family of models.

An engine takes long to start and little time to answer: those of a family are started once, and each
may be P for one pair and D for another.
"""

import pytest
from exact import check

MORE = pytest.mark.more
STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}

#: By family: the model, its engines by name, and the pairs of them.
FAMILIES = {
    "nemotron-h": (
        "nemotron_h",
        {"one": {}, "two stages": STAGES, "two ranks": RANKS},
        [
            ("two stages", "one"),
            ("one", "two stages"),
            pytest.param("two stages", "two ranks", marks=MORE),
            pytest.param("two ranks", "two stages", marks=MORE),
        ],
    ),
}


def _cases():
    for name, (kind, engines, pairs) in FAMILIES.items():
        for pair in pairs:
            p, d = getattr(pair, "values", pair)
            marks = getattr(pair, "marks", ())
            yield pytest.param((kind, engines), p, d, id=f"{name}: {p} to {d}", marks=marks)


@pytest.mark.parametrize(("fleet", "p", "d"), _cases(), indirect=["fleet"], scope="module")
def test_tokens_are_those_of_one_engine_alone(fleet, p, d):
    check(fleet[p], fleet[d])
