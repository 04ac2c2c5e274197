"""What the back end touches of SGLang is there, and all of it is in one table."""

import ast
import importlib
import multiprocessing
import pkgutil
import sys
from pathlib import Path

import pytest
from kvferry.sglang import describe, inside, settings, versions

HERE = Path(inside.__file__).parent


def test_what_is_touched_of_sglang_is_where_it_was():
    assert inside.missing() == []
    assert versions.is_tried(versions.running())


@pytest.mark.parametrize("file", sorted(HERE.rglob("*.py")), ids=lambda file: file.name)
def test_what_is_imported_of_sglang_is_in_the_table(file):
    imported = {
        (node.module, it.name)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "sglang"
        for it in node.names
    }
    assert imported - {(module, name.partition(".")[0]) for module, name in inside.names()} == set()


def test_what_moves_is_said_by_name(monkeypatch):
    module = "sglang.srt.managers.schedule_batch"
    for moved in ("Req.room_of_tomorrow", "Request"):
        monkeypatch.setattr(inside, "TABLE", {module: f"Req.rid {moved}"})
        assert inside.missing() == [f"{module} {moved}"]
    monkeypatch.setattr(inside, "TABLE", {"sglang.srt.requests": "Req"})
    assert inside.missing() == ["sglang.srt.requests Req"]


def test_every_pool_of_sglang_is_described_or_refused_by_name():
    import sglang.srt.mem_cache as package
    from sglang.srt.mem_cache.memory_pool import KVCache

    for module in pkgutil.iter_modules(package.__path__):
        if "pool" in module.name and "host" not in module.name:
            importlib.import_module(f"{package.__name__}.{module.name}")
    found, left = set(), [KVCache]
    while left:
        pool = left.pop()
        if pool.__module__.startswith("sglang.srt.mem_cache"):
            found.add(pool.__name__)
        left += pool.__subclasses__()
    assert len(found) > 20
    assert found == describe.POOLS.keys() | describe.REFUSED.keys()


def test_every_setting_that_is_refused_is_one_of_sglangs():
    from sglang.srt.server_args import ServerArgs

    given = ServerArgs(model_path="none")
    off = [name for name in settings.REFUSED if not hasattr(given, name)]
    assert off == []
    # With nothing set, none of them is in the way.
    assert [name for name in settings.REFUSED if getattr(given, name)] == []


def _import_without_vllm(modules, failed):
    class Blocked:
        @staticmethod
        def find_spec(name, *_):
            if name.partition(".")[0] == "vllm":
                raise ImportError("vLLM is not installed")

    for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "kvferry")]:
        # What is compiled cannot be loaded twice, and knows neither engine.
        if name != "kvferry._core":
            del sys.modules[name]
    sys.meta_path.insert(0, Blocked)
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            failed.put(f"{name}: {error}")


def test_all_of_it_loads_where_vllm_is_not_installed():
    import kvferry.sglang

    modules = [f"kvferry.sglang.{it.name}" for it in pkgutil.iter_modules(kvferry.sglang.__path__)]
    assert len(modules) > 10
    context = multiprocessing.get_context("fork")
    failed = context.SimpleQueue()
    process = context.Process(target=_import_without_vllm, args=(modules, failed))
    process.start()
    process.join(60)
    assert failed.empty(), failed.get()
    assert process.exitcode == 0
