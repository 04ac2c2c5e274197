"""The census is what the installed vLLM and the connector's tables make it, and misses nothing."""

import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from census import check, nixl, page, rows, source  # noqa: E402


@cache
def data():
    return rows.census()


def test_the_page_is_what_would_be_written():
    assert page.PAGE.read_text() == page.page(data()), "docs/census.md is stale: run tools/census.sh"


def test_the_census_agrees_with_itself():
    assert check.problems(data()) == []


@pytest.mark.parametrize(
    ("table", "name", "change", "problem"),
    [
        ("specs", "FullAttentionSpec", {"kvferry": "refused", "why": ""}, "FullAttentionSpec: it is not said why"),
        ("specs", "FullAttentionSpec", {"kvferry": "refused"}, "LlamaForCausalLM: its caches say"),
        ("specs", "FullAttentionSpec", {"kvferry": "served"}, "FullAttentionSpec: 'served' is nothing that"),
        ("specs", "CrossAttentionSpec", {"kvferry": "described"}, "WhisperForConditionalGeneration: its caches say"),
        (
            "architectures",
            "WhisperForConditionalGeneration",
            {"why": "so"},
            "WhisperForConditionalGeneration: it is not said which",
        ),
        ("specs", "MambaSpec", {"nixl": ""}, "MambaSpec: it is not said what"),
        ("backends", "FLASHINFER", {"nixl": "serve"}, "FLASHINFER: it is not said what"),
        ("quantisation", "NVFP4", {"kvferry": "not a cache"}, "NVFP4: it is not said what"),
        ("states", "GDN_ATTN", {"nixl_source": ""}, "GDN_ATTN: it is not said where"),
        ("backends", "ROCM_ATTN", {"nixl": "serves"}, "ROCM_ATTN: the engine's own connector serves it"),
        ("backends", "ROCM_ATTN", {"name": "FLASHINFER"}, "backends: no rows, or one twice"),
        ("quantisation", None, {}, "quantisation: no rows"),
        ("architectures", "LlamaForCausalLM", {"specs": []}, "LlamaForCausalLM: its layers are missing"),
        ("architectures", "Lfm2ForCausalLM", {"nixl": "serves"}, "Lfm2ForCausalLM: more of it is served"),
        ("states", "MAMBA2", {"name": "MAMBA3"}, "it has a cache that is not in the census"),
    ],
)
def test_a_row_that_is_changed_is_found(table, name, change, problem):
    census = deepcopy(data())
    if name is None:
        census[table].clear()
    for row in census[table]:
        if row["name"] == name:
            row |= change
    assert any(problem in found for found in check.problems(census)), check.problems(census)


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
