"""What is said of a soak: wrong answers, differences, what is held or grows, and the picture."""

import importlib.util
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest


def loaded(name):
    """One file of the tool: its package wants vLLM."""
    path = Path(__file__).parents[2] / "tools" / "soak" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


JUDGE, PLOT = loaded("judge"), loaded("plot")
ROUTER = {"memory": 300.0, "threads": 60, "files": 150}
TAKEN = ROUTER | {"blocks": 5}


def sample(at, matched, **changed):
    servers = {"decode": TAKEN | {"audits": {"matched": matched, "mismatched": 0}} | changed, "router": ROUTER}
    return {"at": at, "answers": {"right": int(at)}, "servers": servers}


def run(samples, events=(), **answers):
    return {
        "answers": {"right": 9} | answers,
        "audits": JUDGE.audits(samples),
        "flat": JUDGE.flat(samples, events),
        "samples": samples,
        "events": events,
    }


def quiet(at, matched=7, **changed):
    return sample(at, matched, **{"blocks": 0} | changed)


def test_a_soak_that_is_right():
    assert JUDGE.verdict(run([sample(30, 3), quiet(60)])) == []


@pytest.mark.parametrize(
    ("samples", "answers", "said"),
    [
        ([sample(30, 3), quiet(60)], {"wrong": 2}, "2 wrong answers"),
        ([sample(30, 0), quiet(60, 0)], {}, "nothing was audited"),
        ([sample(30, 3), sample(60, 7)], {}, "decode holds 5 blocks"),
        ([sample(30, 3), quiet(60, threads=70)], {}, "decode has 70 threads, and had 60"),
        ([sample(30, 3), quiet(60, files=159)], {}, "decode has 159 files, and had 150"),
        ([sample(30, 3), quiet(60, audits={"matched": 7, "mismatched": 1})], {}, "1 audits found a difference"),
    ],
)
def test_what_is_wrong_is_said(samples, answers, said):
    (wrong,) = JUDGE.verdict(run(samples, **answers))
    assert wrong.startswith(said)


def test_audits_of_servers_that_were_started_again_count():
    assert JUDGE.audits([sample(0, 5), sample(5, 9), sample(10, 2), sample(15, 4)])["matched"] == 13


def test_a_server_is_compared_with_itself_since_its_last_start():
    events = [{"at": 40, "what": "decode is back"}]
    samples = [sample(30, 3, files=400), sample(50, 0, files=10), sample(65, 1), quiet(90)]
    assert JUDGE.flat(samples, events)["decode"]["from"] == 65


def test_the_picture_has_a_line_for_each_server_and_thing():
    events = [{"at": 12, "what": "kill decode"}, {"at": 20, "what": "decode is back"}]
    gone = {"at": 15, "answers": {"right": 5}, "servers": {"router": ROUTER}}
    drawn = PLOT.plot(run([sample(0, 1), sample(10, 1), gone, sample(30, 1), quiet(60)], events))
    parts = ElementTree.fromstring(drawn)
    names = [part.tag.rpartition("}")[2] for part in parts]
    # Answers; the router's three things and decode's four, which are cut in two where it is gone.
    assert names.count("polyline") == 1 + 3 + 4 * 2
    assert "kill decode" in [part.text for part in parts]
