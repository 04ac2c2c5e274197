"""What the connector touches behind vLLM's hooks is there, and all of it is in one table."""

import ast
from functools import cache
from pathlib import Path

import pytest
from kvferry.vllm import inside, versions

HERE = Path(inside.__file__).parent


@cache
def gone():
    return inside.missing()


@pytest.mark.parametrize("module", inside.TABLE)
def test_what_is_touched_of_vllm_is_where_it_was(module):
    assert [name for name in gone() if name.split()[0] == module] == []


@pytest.mark.parametrize("file", sorted(HERE.rglob("*.py")), ids=lambda file: str(file.relative_to(HERE)))
def test_what_is_imported_of_vllm_is_in_the_table(file):
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm":
            # `from vllm import _custom_ops`: a module, whose names are in the table.
            imported |= {(node.module, it.name) for it in node.names if f"{node.module}.{it.name}" not in inside.TABLE}
    assert imported - {(module, name.partition(".")[0]) for module, name in inside.names()} == set()


def test_what_moves_is_said_by_name(monkeypatch):
    request = "vllm.v1.request"
    for moved in ("Request.num_tokens_on_their_way", "Requests", "Request.num_in_flight"):
        monkeypatch.setattr(inside, "TABLE", {request: f"Request.num_in_flight_tokens {moved}"})
        assert inside.missing() == [f"{request} {moved}"]
    monkeypatch.setattr(inside, "TABLE", {"vllm.v1.requests": "Request.status"})
    assert inside.missing() == ["vllm.v1.requests Request.status"]


def test_what_only_some_versions_have_is_not_missed_in_others(monkeypatch):
    name = "vllm.v1.request Request.of_tomorrow"
    monkeypatch.setattr(inside, "TABLE", {"vllm.v1.request": "Request.of_tomorrow"})
    for seen, expected in ((("0.33",), []), (("0.32", "0.33"), [name])):
        monkeypatch.setattr(inside, "SEEN", {name: seen})
        monkeypatch.setattr(versions, "running", lambda: "0.32.4+cpu")
        assert inside.missing() == expected
    # One that nobody tried is taken for the newest.
    monkeypatch.setattr(inside, "SEEN", {name: (versions.TRIED[-1],)})
    monkeypatch.setattr(versions, "running", lambda: "0.99.0")
    assert inside.missing() == [name]
