"""Trained models (`models/tiny`) answer questions about what P has read as one engine does, and worse where one kind of
state is spoiled in D's memory: what a hand-over that is wrong in one state costs is seen here, and nowhere else.

A part of what `tools/accuracy.sh` prints as tables, with fewer questions; with `--all` every cell of it that is ours,
and every control.
"""

import sys
from pathlib import Path

import pytest
from families import MORE

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from accuracy import asking, control, spoil  # noqa: E402
from accuracy.models import CELLS, CONTROL, FAMILIES, OURS  # noqa: E402
from accuracy.table import TASKS, costs, whole, wilson  # noqa: E402

PAIRS = {family: CELLS[family] | OURS.get(family, {}) for family in FAMILIES}
#: What every run has: by family, a cell, and what is spoiled in it.
ALWAYS = {
    "falcon-h1": ("TP 1 → 2", ["convolution", "recurrent state"]),
    "kimi-linear": ("TP 2 → 1", ["convolution", "recurrent state"]),
}
#: By family: what is kept for a request.
MAMBA = ["keys", "values", "convolution", "recurrent state"]
KEPT = {
    "nemotron-h": MAMBA,
    "falcon-h1": MAMBA,
    "lfm2": ["keys", "values", "convolution"],
    "gemma3": ["keys", "values", "window keys", "window values"],
    "deepseek": ["latents"],
    "kimi-linear": ["latents", "convolution", "recurrent state"],
    "qwen3.5": MAMBA,
}
#: What a model was trained to answer without: docs/trained.md says so, and no hand-over is tested by it.
UNUSED = [("kimi-linear", "latents"), ("qwen3.5", "keys"), ("qwen3.5", "values")]


def always(family, cell, kind=None):
    there = ALWAYS.get(family, ("", []))
    return () if there[0] == cell and (kind is None or kind in there[1]) else MORE


def cases():
    for family, cells in PAIRS.items():
        for cell in cells:
            yield pytest.param(family, cell, marks=always(family, cell), id=f"{family}: {cell}")


def controls():
    for family, kinds in KEPT.items():
        cell = ALWAYS.get(family, [CONTROL])[0]
        for kind in kinds:
            yield pytest.param(family, cell, kind, marks=always(family, cell, kind), id=f"{family}: {kind}")


@pytest.fixture(scope="module")
def family():
    """Engines of a family, as long as tests ask for them; the questions, and what one engine alone answers."""
    now = {}

    def of(name):
        if now.get("name") != name:
            if now:
                now["engines"].__exit__()
            now.update(name=name, engines=asking.Engines(name), asked=asking.Questions(4))
            now["alone"] = asking.answers(now["engines"].alone(), now["asked"])
        return now["engines"], now["asked"], now["alone"]

    yield of
    if now:
        now["engines"].__exit__()


def pair(engines, cell):
    p, d, *how = PAIRS[engines.family][cell]
    return *engines.ours(p, d), how


@pytest.mark.parametrize(("name", "cell"), list(cases()))
def test_answers_are_those_of_one_engine(family, name, cell):
    engines, asked, alone = family(name)
    prefill, decode, how = pair(engines, cell)
    made = asking.handed_over(prefill, decode, asked, *how)
    right, of = whole(asked.right(alone))
    assert right >= 0.95 * of, "one engine answers no better"
    if FAMILIES[name].get("dtype") == "bfloat16":
        # Two ranks round otherwise than one.
        assert whole(asked.right(made))[0] / of >= wilson(right, of)[0]
    else:
        assert made == alone


@pytest.mark.parametrize(("name", "cell", "kind"), list(controls()))
def test_a_state_that_is_spoiled_costs_answers(family, name, cell, kind):
    engines, asked, alone = family(name)
    prefill, decode, _ = pair(engines, cell)
    assert sorted(decode.call(spoil.kinds)) == sorted(KEPT[name])
    right, _, count = control.spoiled(prefill, decode, asked, alone, kind, "all")
    assert count, "nothing was spoiled"
    lost = {"right": right, "unspoilt": whole(asked.right(alone))[0]}
    assert costs(lost) == ((name, kind) not in UNUSED), right


@MORE
def test_a_draft_s_state_that_is_spoiled_costs_guesses(family):
    engines, _, _ = family("deepseek")
    (found,) = (one for one in control.draft(engines, asking.Questions(4, tasks=["echo"]), ["all"]))
    assert found["spoilt"] and costs(found), found
    assert found["differ"] == 0


def test_there_are_questions_of_each_kind():
    asked = asking.Questions(4)
    assert {task: asked.tasks.count(task) for task in TASKS} == dict.fromkeys(TASKS, 4)
    assert asked.right(asked.answers) == dict.fromkeys(TASKS, [4, 4])
