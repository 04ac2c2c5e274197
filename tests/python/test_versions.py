"""A version of vLLM that nobody has tried is named."""

import logging

import pytest
from kvferry.vllm import connector, versions
from kvferry.vllm.refusal import Unsupported


def test_an_engine_of_a_version_that_nobody_tried_says_so(monkeypatch, caplog):
    monkeypatch.setattr(connector.logger, "propagate", True)
    with caplog.at_level(logging.WARNING, logger=connector.logger.name):
        connector._look_at_version()
        assert not caplog.records
        monkeypatch.setattr(versions, "running", lambda: "0.34.1")
        connector._look_at_version()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "vLLM 0.34.1 has not been tried" in said and "every plan is proven" in said


def test_an_engine_of_a_version_with_other_hooks_is_refused(monkeypatch):
    monkeypatch.setattr(versions, "running", lambda: "0.34.1")
    monkeypatch.setattr(connector.FerryConnector, "hook_of_old", lambda self: None, raising=False)
    with pytest.raises(Unsupported, match="vLLM 0.34.1 .* no hook hook_of_old; use one of 0.31, 0.32, 0.33"):
        connector._look_at_version()


def test_a_hook_that_came_later_is_missed_only_where_it_is_needed(monkeypatch):
    class Theirs:
        pass

    class Ours(Theirs):
        def get_loaded_kv_cache_group_ids(self, request):
            pass

    from vllm.v1.core.kv_cache_manager import KVCacheManager

    assert versions.differences(Ours) == ["vLLM has no hook get_loaded_kv_cache_group_ids"]
    # As vLLM 0.31 did it.
    monkeypatch.setattr(KVCacheManager, "get_zeroing_block_ids_in_range", None, raising=False)
    assert versions.differences(Ours) == []


def test_an_engine_whose_files_are_of_two_builds_says_so(monkeypatch, caplog):
    monkeypatch.setattr(connector.logger, "propagate", True)
    monkeypatch.setattr(versions, "mixed", lambda: ["vllm/_C.abi3.so 27"])
    with caplog.at_level(logging.WARNING, logger=connector.logger.name):
        connector._look_at_version()
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"not all of one build: {versions.running()} with 1 files of another build (" in said
