"""The trained models' files, the arithmetic of the accuracy table, and that pages say what was measured."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ROOT / "models" / "tiny"


def loaded(path):
    """One file of a tool: its package wants vLLM."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CARDS = loaded(ROOT / "tools" / "train" / "cards.py")
TABLE = loaded(ROOT / "tools" / "accuracy" / "table.py")


@pytest.mark.parametrize("family", sorted(folder.name for folder in TINY.iterdir()))
def test_weights_are_those_of_their_card(family):
    assert CARDS.checked(TINY / family)["family"] == family


def test_weights_that_are_missing_or_changed_are_named(tmp_path):
    folder = tmp_path / "lfm2"
    shutil.copytree(TINY / "lfm2", folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    said = json.loads((folder / "card.json").read_text())["sha256"]
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CARDS.Spoilt) as changed:
        CARDS.checked(folder)
    assert str(weights) in str(changed.value) and said in str(changed.value) and "git checkout" in str(changed.value)
    for name in ("model.safetensors", "config.json", "card.json"):
        (folder / name).unlink()
        with pytest.raises(CARDS.Spoilt, match=f"{name} is missing"):
            CARDS.checked(folder)


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    # From tables of Wilson's interval.
    [(80, 80, 0.9542, 1.0), (0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_intervals_are_wilson_s(right, of, low, high):
    assert TABLE.wilson(right, of) == pytest.approx((low, high), abs=1e-4)


def line(through, right, differ=None, **facts):
    made = {"family": "m", "cell": "TP 1 → 1", "through": through, "right": {task: right for task in TABLE.TASKS}}
    return made | ({} if differ is None else {"differ": differ}) | facts


def test_of_several_runs_the_last_one_counts_for_each_model():
    runs = [{"cells": [{"family": name, "run": run} for name in names]} for run, names in enumerate(("aab", "ac"))]
    assert [(one["family"], one["run"]) for one in TABLE.latest(runs, "cells")] == [("b", 0), ("a", 1), ("c", 1)]


def test_a_control_that_costs_nothing_is_said():
    lost = dict(family="m", cell="c", state="latents", part="all", spoilt=9, unspoilt=8)
    found = [{**lost, "right": {task: [2, 2] for task in TABLE.TASKS}, "differ": 0}]
    assert "does not test it" in list(TABLE.controls(found))[-1]
    found[0]["right"]["echo"] = [0, 2]
    assert list(TABLE.controls(found))[-1].endswith("| echo: 0.000 |")
    found[0]["spoilt"] = 0
    assert "| – |" in list(TABLE.controls(found))[-1]


def test_what_differs_without_an_error_stands_out():
    found = [line("one engine", [5, 5], cell="–"), line("kvferry", [5, 5], 0), line("NixlConnector", [4, 5], 4)]
    assert list(TABLE.summary(found))[-1] == "| m | 1.000 | 1.000 | 0.800, 4 of 20 differ |"
    assert list(TABLE.accuracy(found))[-1].endswith("| **4** of 20 |")
    found[-1] = {"family": "m", "cell": "TP 1 → 1", "through": "NixlConnector", "error": "AssertionError"}
    assert list(TABLE.summary(found))[-1].endswith("| does not run |")
    assert list(TABLE.accuracy(found))[-1] == "1. `AssertionError`"


@pytest.mark.parametrize(
    ("page", "made", "files"),
    [
        ("README.md", "summary", "accuracy-20*.json"),
        ("docs/trained.md", "accuracy", "accuracy-20*.json"),
        ("docs/trained.md", "controls", "accuracy-20*.json"),
        ("docs/trained.md", "accuracy", "accuracy-h200-20*.json"),
        ("docs/trained.md", "controls", "accuracy-h200-20*.json"),
    ],
)
def test_tables_on_pages_are_those_of_the_last_run(page, made, files):
    kept = [json.loads(path.read_text()) for path in sorted((ROOT / "docs" / "measured").glob(files))]
    rows = getattr(TABLE, made)(TABLE.latest(kept, "controls" if made == "controls" else "cells"))
    assert "\n".join(rows) in (ROOT / page).read_text()
