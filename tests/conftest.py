"""Says how long each test took and how it failed, for `tools/durations.py`, in the file that `KVFERRY_DURATIONS` names."""

import gc
import json
import os
import time
from pathlib import Path

import pytest

TICK = os.sysconf("SC_CLK_TCK")
#: Characters that are kept of how a test failed.
FAILURE = 3000

# What is imported stays, and vLLM is a million objects: nobody looks through them for garbage again and again, neither
# while more are imported nor in each test.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def busy():
    """Seconds that this process, and all that descends from it, have kept a core busy."""
    parents, spent = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # Its own time, and that of its children that have ended.
        process = int(stat.parent.name)
        parents[process], spent[process] = int(words[1]), sum(map(int, words[11:15])) / TICK

    def ours(process):
        return process == os.getpid() or (process in parents and ours(parents[process]))

    return sum(seconds for process, seconds in spent.items() if ours(process))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if (path := os.environ.get("KVFERRY_DURATIONS")) is None:
        return (yield)
    spent, began = busy(), time.monotonic()
    try:
        return (yield)
    finally:
        name = f"{Path.cwd().name}/{item.nodeid}"
        # What a process that was killed had spent is gone with it.
        spent = max(0.0, busy() - spent)
        took = {"name": name, "seconds": round(time.monotonic() - began, 2), "busy": round(spent, 2)}
        with open(path, "a") as file:
            file.write(json.dumps(took) + "\n")


def pytest_runtest_logreport(report):
    if report.failed and (path := os.environ.get("KVFERRY_DURATIONS")):
        how = f"{report.longreprtext[-FAILURE:]}\n{report.capstdout[-FAILURE:]}"
        with open(path, "a") as file:
            file.write(json.dumps({"name": f"{Path.cwd().name}/{report.nodeid}", "failed": how}) + "\n")
