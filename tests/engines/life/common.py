"""What the tests of this folder have in common."""

import time

import pytest

#: How the engines of a kind are started where a test does not care.
USUAL = {
    "qwen3": {"block_size": 32, "async_scheduling": False},
    "gemma3": {"block_size": 32, "prefix": True},
    "nemotron_h": {},
    "falcon_h1": {},
}


def more(*case):
    """A case for `tools/test.sh --all`."""
    return pytest.param(*case, marks=pytest.mark.more)


def eventually(what, *args):
    deadline = time.monotonic() + 20
    while not what(*args):
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.02)
