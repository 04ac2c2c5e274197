"""`python -m kvferry.vllm.selfcheck` says what works here, and notices what does not."""

import ast
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from kvferry import _loopback
from kvferry.vllm import selfcheck, versions


RUN = [sys.executable, "-m", "kvferry.vllm.selfcheck"]


@pytest.fixture(scope="module")
def said():
    """What it finds here. A process of its own imports vLLM, which takes long: one does."""
    answer = subprocess.run([*RUN, "--mib", "4", "--json"], capture_output=True, timeout=300, text=True)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


def test_it_finds_this_environment_ready(said):
    assert said["works"]
    fits = {finding["what"]: finding["fits"] for finding in said["findings"]}
    for what in ("vllm", "plug-in", "connector", "local", "tcp", "nixl"):
        assert fits[what] == "yes", said
    (kernels,) = [one["details"] for one in said["findings"] if one["what"] == "kernels"]
    # Known to be side by side, and not to be asked; states that nobody knows how to ask.
    assert "HPC_ATTN (its cache is written in the midst" in kernels
    assert "LINEAR (its kernels cannot be called alone; known by their code)" in kernels
    assert "CPU_ATTN" not in kernels


def test_what_it_finds_is_shown(said, monkeypatch, capsys):
    found = [selfcheck.Finding(**one) for one in said["findings"]]
    monkeypatch.setattr(selfcheck, "look", lambda *_: iter(found))
    monkeypatch.setattr(selfcheck, "log_to", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["selfcheck"])
    assert selfcheck.main() == 0
    shown = capsys.readouterr().out.splitlines()
    assert all(len(line) < 250 for line in shown) and not any("HPC_ATTN" in line for line in shown), shown
    assert len([line for line in shown if line.startswith("  ok  ")]) >= 6, shown
    # What it ends with is what README.md gives to the servers.
    commands = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    for line in shown[-2:]:
        assert json.loads(line.split("'")[1]) in [json.loads(one) for one in re.findall(r"'(\{.*?\})'", commands)], line


def test_nothing_to_move_is_refused():
    wrong = subprocess.run([*RUN, "--mib", "0"], capture_output=True, timeout=300, text=True)
    assert wrong.returncode == 2 and "--mib is 0, but must be 1 or more" in wrong.stderr


def test_what_an_environment_below_brings_is_found():
    """NIXL is in the environment that this one lies over, and no variable says where anything is."""
    assert not importlib.util.find_spec("nixl").origin.startswith(sys.prefix)
    look = "from kvferry.vllm import selfcheck; print(vars(selfcheck.moved('nixl', 'cpu', 4, False)))"
    answer = subprocess.run([sys.executable, "-c", look], capture_output=True, timeout=300, text=True, env={})
    assert answer.returncode == 0, answer.stderr
    found = ast.literal_eval(answer.stdout.splitlines()[-1])
    assert found["fits"] == "yes", found


@pytest.mark.parametrize("found", ["0.31.0", "0.32.2+cpu", "0.33.1.dev3"])
def test_a_vllm_that_was_tried_is_fine(monkeypatch, found):
    monkeypatch.setattr(selfcheck, "version", lambda package: found)
    first = next(selfcheck.look(1))
    assert (first.what, first.fits) == ("vllm", "yes")
    assert first.says.startswith(found) and "0.31, 0.32, 0.33 (0.33 without its compiled code)" in first.says


def test_without_vllm_it_says_which_to_install(monkeypatch):
    monkeypatch.setattr(selfcheck, "version", lambda package: None)
    first = next(selfcheck.look(1))
    assert (first.what, first.fits) == ("vllm", "no")
    assert "not installed" in first.says and "pip install 'vllm==0.32.*'" in first.advice


@pytest.mark.parametrize("found", ["0.29.1", "0.34.0rc1", "1.0", "dev"])
def test_a_vllm_that_nobody_tried_is_named_with_what_still_holds(monkeypatch, found):
    monkeypatch.setattr(selfcheck, "version", lambda package: found)
    looked = selfcheck.look(1)
    first = next(looked)
    assert (first.what, first.fits) == ("vllm", "?")
    assert f"vLLM {found} has not been tried" in first.says and "0.31, 0.32, 0.33" in first.says
    assert "hooks are compared" in first.says and "every plan is proven" in first.says
    assert "kvferry.vllm.canary" in first.advice
    # All that can be looked at without trust in the version still is.
    assert [next(looked).what for _ in range(3)] == ["plug-in", "connector", "kernels"]


def test_a_plug_in_that_is_left_out_is_named():
    """In a process of its own: vLLM looks for plug-ins once in each."""
    look = "from kvferry.vllm import selfcheck; print([vars(selfcheck.plugin()), selfcheck.config('decode')])"
    environment = os.environ | {"VLLM_PLUGINS": "other", "VLLM_LOGGING_LEVEL": "ERROR"}
    run = [sys.executable, "-c", look]
    answer = subprocess.run(run, capture_output=True, timeout=300, text=True, env=environment)
    assert answer.returncode == 0, answer.stderr
    finding, config = ast.literal_eval(answer.stdout.splitlines()[-1])
    assert finding["fits"] == "-" and "VLLM_PLUGINS is 'other', which leaves it out" in finding["says"]
    assert "add 'kvferry' to VLLM_PLUGINS" in finding["advice"]
    assert config["kv_connector_module_path"] == "kvferry.vllm"


def test_a_hook_that_vllm_calls_otherwise_is_named():
    class Theirs:
        def hook(self, request, blocks, **more):
            pass

    class Ours(Theirs):
        def hook(self, request, **rest):
            pass

        def forgotten(self):
            pass

    assert versions.differences(Ours) == [
        "vLLM calls hook(self, request, blocks), not (self, request)",
        "vLLM has no hook forgotten",
    ]


def test_a_wrong_byte_is_noticed(monkeypatch):
    right = _loopback._expected

    def off_by_one(size, *rest):
        pool = right(size, *rest)
        pool[np.flatnonzero(pool != _loopback.POISON)[7]] += np.uint64(1)
        return pool

    # In this process alone: the other one sends what is right.
    monkeypatch.setattr(_loopback, "_expected", off_by_one)
    with pytest.raises(RuntimeError, match="^1 of [0-9]+ words are wrong"):
        _loopback.hand_over("tcp", "cpu", 1)


def test_a_transport_that_fails_only_matters_where_it_is_needed(monkeypatch):
    def fail(*_):
        raise RuntimeError("no such library")

    monkeypatch.setattr(selfcheck, "hand_over", fail)
    optional, needed = (selfcheck.moved("nixl", "cpu", 1, needed) for needed in (False, True))
    assert (optional.fits, needed.fits) == ("-", "no")
    assert "no such library" in needed.says and "pip install 'nixl==" in needed.advice


def test_an_installation_of_two_builds_is_named(monkeypatch):
    monkeypatch.setattr(versions, "mixed", lambda: [f"vllm/{it}.so 1" for it in range(5)])
    monkeypatch.setattr(selfcheck, "moved", lambda *_: None)
    (found,) = [one for one in selfcheck.look(1) if one is not None and "not those" in one.says]
    assert (found.what, found.fits) == ("vllm", "?")
    assert found.says.startswith("5 of its files are not those that were installed: vllm/0.so 1, vllm/1.so 1, vllm/2.so 1 …")
