"""What vLLM's versions say in different ways means the same, and a version that nobody has tried is named."""

import logging
from types import SimpleNamespace

import pytest
from kvferry.vllm import connector, versions
from kvferry.vllm.refusal import Unsupported


class Drafts(SimpleNamespace):
    def use_eagle(self):
        return self.eagle

    def use_multi_module_mtp(self):
        return self.modules > 1


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (SimpleNamespace(num_prefill_lookahead_tokens=3), 3),
        (SimpleNamespace(speculative_config=None), 0),
        (SimpleNamespace(speculative_config=Drafts(eagle=False, modules=1, num_speculative_tokens=4)), 0),
        (SimpleNamespace(speculative_config=Drafts(eagle=True, modules=1, num_speculative_tokens=4)), 1),
        (SimpleNamespace(speculative_config=Drafts(eagle=True, modules=3, num_speculative_tokens=4)), 4),
    ],
)
def test_how_far_draft_modules_look_ahead(config, tokens):
    assert versions.draft_lookahead(config) == tokens


@pytest.mark.parametrize(
    ("spec", "shared"),
    [
        (SimpleNamespace(dcp_sharded=True, num_kv_heads=1), True),
        (SimpleNamespace(dcp_sharded=False, num_kv_heads=1), False),
        # Before specs said so: attention, and nothing else.
        (SimpleNamespace(num_kv_heads=1), True),
        (SimpleNamespace(shapes=((1, 2),)), False),
    ],
)
def test_who_takes_turns_at_tokens(spec, shared):
    assert versions.shares_tokens(spec) is shared


def test_what_is_replayed():
    assert versions.replayed_tokens(SimpleNamespace(prefix_replay_tokens=128)) == 128
    assert versions.replayed_tokens(SimpleNamespace()) == 0


def test_the_facts_are_those_that_this_vllm_states():
    """Where vLLM states them: what it would be read from otherwise is the same."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    attention = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    states = MambaSpec(block_size=16, shapes=((4, 2),), dtypes=(torch.float32,))
    for spec in (attention, states):
        without = {name: value for name, value in vars(spec).items() if name != "dcp_sharded"}
        assert versions.shares_tokens(SimpleNamespace(**without)) is versions.shares_tokens(spec)


def test_an_engine_of_a_version_that_nobody_tried_says_so(monkeypatch, caplog):
    monkeypatch.setattr(connector.logger, "propagate", True)
    with caplog.at_level(logging.WARNING, logger=connector.logger.name):
        connector._look_at_version()
        assert not caplog.records
        monkeypatch.setattr(versions, "running", lambda: "0.33.1")
        connector._look_at_version()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "vLLM 0.33.1 has not been tried" in said and "every plan is proven" in said


def test_an_engine_of_a_version_with_other_hooks_is_refused(monkeypatch):
    monkeypatch.setattr(versions, "running", lambda: "0.33.1")
    monkeypatch.setattr(connector.FerryConnector, "hook_of_old", lambda self: None, raising=False)
    with pytest.raises(Unsupported, match="vLLM 0.33.1 .* no hook hook_of_old; use one of 0.30, 0.31, 0.32"):
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
