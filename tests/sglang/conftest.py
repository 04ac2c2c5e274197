"""SGLang, imported once with stand-ins for what it has compiled for GPUs; engines are forked from here."""

import os

import engines

os.environ.update(engines.ENVIRONMENT)

import standins

standins.install()

import pytest
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler
import sglang.srt.models.registry  # noqa: F401


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sglang")


class Alone:
    """Engines by themselves, for what is right: they serve all tests of a model. Two at most, as others need the cores."""

    def __init__(self, folder):
        self.folder, self.running = folder, {}

    def __call__(self, kind):
        engine = self.running.pop(kind, None)
        if engine is None:
            engine = engines.Engine(engines.model(kind, self.folder), "alone", self.folder / f"alone-{kind}.log")
        self.running[kind] = engine
        if len(self.running) > 2:
            self.running.pop(next(iter(self.running))).close()
        return engine


@pytest.fixture(scope="session")
def alone(folder):
    alone = Alone(folder)
    yield alone
    for engine in alone.running.values():
        engine.close()


class Starter:
    def __init__(self, folder, alone):
        self.folder, self.alone, self.started = folder, alone, []

    def __call__(self, kind, role, **more):
        if role == "alone":
            return self.alone(kind)
        path = engines.model(kind, self.folder)
        self.started.append(engines.Engine(path, role, self.folder / f"{role}-{len(self.started)}.log", **more))
        return self.started[-1]

    def vllm(self, kind, **options):
        """It is ready then."""
        import mixed

        self.started.append(mixed.Vllm(engines.model(kind, self.folder), **options))
        return self.started[-1]


@pytest.fixture
def start(folder, alone):
    """Starts engines that do not outlive their test; for those of SGLang `.ready()` waits."""
    starter = Starter(folder, alone)
    yield starter
    for engine in starter.started:
        engine.close()


class Fleet:
    """The engines of one model, for pairs of them: those that the last pair had need not start again."""

    def __init__(self, folder, alone):
        self.folder, self.alone, self.kind, self.running = folder, alone, None, {}

    def __call__(self, kind, named):
        """Engines by their names (role, and what else `Engine` takes), and one alone."""
        if kind != self.kind:
            self.close()
            self.kind = kind
        path = engines.model(kind, self.folder)
        # The others would only take their turns on few cores.
        for name in [name for name in self.running if name not in named]:
            self.running.pop(name).close()
        for name, (role, more) in named.items():
            if name not in self.running:
                log = self.folder / f"{kind}-{name.replace(' ', '-')}.log"
                self.running[name] = engines.Engine(path, role, log, **more)
        found = [*(self.running[name] for name in named), self.alone(kind)]
        return [engine.ready() for engine in found]

    def close(self):
        for engine in self.running.values():
            engine.close()
        self.running = {}


@pytest.fixture(scope="module")
def fleet(folder, alone):
    fleet = Fleet(folder, alone)
    yield fleet
    fleet.close()
