"""The census is what the installed vLLM and the connector's tables make it, and misses nothing."""

import importlib.util
import json
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@cache
def program():
    spec = importlib.util.spec_from_file_location("census", ROOT / "tools/census.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def data():
    return json.loads((ROOT / "crates/kvferry-models/facts/census.json").read_text())


def test_the_census_is_what_would_be_written():
    for path, text in program().written().items():
        assert path.read_text() == text, f"{path.name} is stale: run tools/census.sh"


def test_what_is_new_fails_by_name():
    census = program()
    for row, what in [
        (lambda: census.spec("UnseenSpec"), "the cache spec class UnseenSpec"),
        (lambda: census.quantised("UNSEEN"), "the quantisation mode UNSEEN"),
        (lambda: census.backend("UNSEEN", ["some.Class"]), "the attention back end UNSEEN of some.Class"),
        (lambda: census.state("UNSEEN"), "the type of states UNSEEN"),
    ]:
        with pytest.raises(census.Unknown, match=what):
            row()


def test_the_names_are_those_that_vllm_loads():
    """What the source is read for is what the classes themselves say."""
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    census = program()
    found = {interface.KVCacheSpec}
    while more := {sub for cls in found for sub in cls.__subclasses__()} - found:
        found |= more
    own = {cls.__name__ for cls in found if cls.__module__ == interface.__name__}
    assert set(census.spec_classes()) == own
    assert census.quantisation_modes() == [mode.name for mode in interface.KVQuantMode]
    assert census.members("MambaAttentionBackendEnum") == list(MambaAttentionBackendEnum.__members__)


def test_a_source_that_no_longer_says_so_fails():
    census = program()
    with pytest.raises(census.Unknown, match="no longer says 'not in there'"):
        census.nixl(("serves", "", f"{census.NIXL}/metadata.py", "not in there"), "it")


def test_what_the_engines_own_connector_serves_is_described():
    rows = [
        row
        for table in ("specs", "states", "quantisation", "backends")
        for row in data()[table]
        if row["kvferry"] == "refused" and row["nixl"].startswith("serves")
    ]
    assert rows == []


def test_refusals_are_refusals_of_vllm():
    """The rest of what is not described: vLLM does not run it with any connector, or a plug-in brings it."""
    refused = [
        row["name"]
        for table in ("specs", "states", "quantisation", "backends", "architectures")
        for row in data()[table]
        if row["kvferry"] == "refused"
    ]
    assert refused == [
        "CrossAttentionSpec",
        "CUSTOM",
        "ROCM_ATTN",
        "CohereAsrForConditionalGeneration",
        "NemotronParseForConditionalGeneration",
        "WhisperForConditionalGeneration",
    ]
