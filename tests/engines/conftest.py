"""Engines for tests: tiny models, saved once, and servers that do not outlive their test."""

import contextlib

import pytest
from serving import Server
from tiny import save_model


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
        for server in self.servers:
            server.close()


@pytest.fixture
def serve(folder):
    """Starts a server of a tiny model."""
    with contextlib.closing(_Starter(folder)) as start:
        yield start


@pytest.fixture(scope="module")
def fleet(request, folder):
    """Servers of one family by name, each started when a test first asks for it and shared by all
    tests of the family."""
    kind, engines = request.param
    with contextlib.closing(_Starter(folder)) as start:
        yield _Fleet(start, kind, engines)


class _Fleet(dict):
    def __init__(self, start, kind, engines):
        super().__init__()
        self.start, self.kind, self.engines = start, kind, engines

    def __missing__(self, name):
        self[name] = self.start(self.kind, "kv_both", **self.engines[name])
        return self[name]
