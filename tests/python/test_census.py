"""The census is what the installed vLLM and the connector's tables make it, and misses nothing."""

import json
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from census import nixl, page, rows, source  # noqa: E402


@cache
def data():
    return json.loads((ROOT / "crates/kvferry-models/facts/census.json").read_text())


def test_the_census_is_what_would_be_written():
    for path, text in page.written().items():
        assert path.read_text() == text, f"{path.name} is stale: run tools/census.sh"


def test_what_is_new_fails_by_name():
    for row, what in [
        (lambda: rows.spec("UnseenSpec"), "the cache spec class UnseenSpec"),
        (lambda: rows.quantised("UNSEEN"), "the quantisation mode UNSEEN"),
        (lambda: rows.backend("UNSEEN", ["some.Class"]), "the attention back end UNSEEN of some.Class"),
        (lambda: rows.state("UNSEEN"), "the type of states UNSEEN"),
    ]:
        with pytest.raises(nixl.Unknown, match=what):
            row()


def test_the_names_are_those_that_vllm_loads():
    """What the source is read for is what the classes themselves say."""
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    found = {interface.KVCacheSpec}
    while more := {sub for cls in found for sub in cls.__subclasses__()} - found:
        found |= more
    own = {cls.__name__ for cls in found if cls.__module__ == interface.__name__}
    assert set(source.spec_classes()) == own
    assert source.quantisation_modes() == [mode.name for mode in interface.KVQuantMode]
    assert source.members("MambaAttentionBackendEnum") == list(MambaAttentionBackendEnum.__members__)


def test_a_source_that_no_longer_says_so_fails():
    with pytest.raises(nixl.Unknown, match="no longer says 'not in there'"):
        nixl.nixl(("serves", "", f"{nixl.NIXL}/metadata.py", "not in there"), "it")


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
