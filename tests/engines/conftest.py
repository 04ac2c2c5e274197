"""Engines for tests: tiny models, saved once, and servers that do not outlive their test."""

import contextlib
import os

import pytest
from serving import Server
from tiny import save_model


#: What only `tools/test-versions.sh` has the environments for is no test elsewhere.
collect_ignore = [] if "KVFERRY_OTHER_VLLM" in os.environ else ["test_versions.py"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


class _Starter:
    def __init__(self, folder):
        self.folder = folder
        self.servers = []

    def __call__(self, kind, role, **options):
        path = self.folder / kind
        if not path.exists():
            save_model(kind, path)
        self.servers.append(Server(path, role, **options))
        return self.servers[-1]

    def close(self):
        while self.servers:
            self.servers.pop().close()


@pytest.fixture
def serve(folder):
    """Starts a server of a tiny model."""
    with contextlib.closing(_Starter(folder)) as start:
        yield start


@pytest.fixture(scope="module")
def fleet(folder):
    """Servers that tests share as long as they ask for the same family of engines."""
    with contextlib.closing(_Fleet(_Starter(folder))) as fleet:
        yield fleet


class _Fleet:
    def __init__(self, start):
        self.start = start
        self.engines, self.running = None, {}

    def __call__(self, kind, engines, name):
        """A server by its name among a family's engines."""
        if engines is not self.engines:
            self.close()
            self.engines = engines
        if name not in self.running:
            self.running[name] = self.start(kind, "kv_both", **engines[name])
        return self.running[name]

    def close(self):
        self.start.close()
        self.running = {}
