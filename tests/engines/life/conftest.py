"""Engines that the tests of this folder share, and the promise that nothing is left behind on them."""

import itertools

import pytest
from serving import Server
from tiny import save_model

from .common import USUAL
from .inside import whats_left


#: How many engines run at a time; far more than one test asks for. Each has half a gigabyte of its own, and
#: its process groups wake a CPU a thousand times a second even when it has nothing to do.
MOST = 16


@pytest.fixture(scope="package")
def engines(folder):
    """An engine takes long to start: whoever asks for the same one soon gets it again."""
    # The one that was asked for last is the last.
    running = {}
    numbers = itertools.count()

    def start(kind, role, **options):
        key = (kind, role, repr(sorted(options.items())))
        if key in running:
            running[key] = running.pop(key)
            return running[key]
        if len(running) == MOST:
            running.pop(next(iter(running))).close()
        path = folder / kind
        if not path.exists():
            save_model(kind, path)
        manifests = folder / f"manifests-{next(numbers)}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVFERRY_DUMP_MANIFEST", str(manifests))
            running[key] = Server(path, role, **options)
        running[key].manifests = manifests
        return running[key]

    yield start
    for server in running.values():
        server.close()


@pytest.fixture
def pair(engines):
    """Two engines, and the promise that nothing is left behind on either."""
    used = []

    def start(kind, both=None, p=None, d=None):
        both = USUAL[kind] | (both or {})
        prefill = engines(kind, "kv_producer", **both | (p or {}))
        decode = engines(kind, "kv_consumer", **both | (d or {}))
        used.extend((prefill, decode))
        return prefill, decode

    yield start
    for server in used:
        if server.alive():
            assert server.idle() == 0, "blocks in use"
            left = server.call(whats_left)
            assert not any(left.values()), left
