"""Which half of the scheduler's side a call reaches, by the engine's role."""

import logging
from types import SimpleNamespace

import pytest
import torch
from kvferry.vllm import logs
from kvferry.vllm.options import Options
from kvferry.vllm.scheduler import SchedulerSide
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec


@pytest.fixture
def start(caplog):
    made = []

    def start(role, **options):
        spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(
            num_blocks=10, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)]
        )
        config = SimpleNamespace(
            kv_transfer_config=KVTransferConfig(kv_connector="FerryConnector", kv_role=role),
            parallel_config=SimpleNamespace(data_parallel_index=0),
            num_prefill_lookahead_tokens=0,
        )
        made.append(SchedulerSide(config, cache, Options.read(options)))
        return made[-1]

    logs.logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger=logs.logger.name)
    yield start
    logs.logger.removeHandler(caplog.handler)
    for side in made:
        side.agent.close()


def request(**params):
    return SimpleNamespace(request_id="request-1", kv_transfer_params=params)


def test_a_role_has_its_halves(start):
    halves = {
        role: (side.prefill is not None, side.decode is not None)
        for role in ("kv_producer", "kv_consumer", "kv_both")
        for side in [start(role)]
    }
    assert halves == {
        "kv_producer": (True, False), "kv_consumer": (False, True), "kv_both": (True, True),
    }  # fmt: skip


@pytest.mark.parametrize(
    "role, asked, instead",
    [
        ("kv_producer", "do_remote_prefill", "it computes the prompt itself"),
        ("kv_consumer", "do_remote_decode", "it keeps no blocks for others"),
    ],
)
def test_what_a_role_does_not_do_is_said_and_costs_nothing(start, caplog, role, asked, instead):
    side = start(role)
    new = request(**{asked: True})
    side.on_new_request(new)
    (said,) = {one.getMessage() for one in caplog.records if one.levelname == "WARNING"}
    assert f"request-1 asks for '{asked}'" in said and f"kv_role is '{role}': {instead}" in said
    assert side.matched(new, 0) == (0, False)
    side.allocated(new, None, 0)
    assert not side.orders(["request-1"]).hands_over
    side.ended("request-1", failed=False)
    assert side.finished(new, ([1, 2],)) == (False, None)


def test_parameters_of_another_connector_are_named(start, caplog):
    side = start("kv_both")
    new = request(do_remote_prefill=True, remote_block_ids=[[1]])
    side.on_new_request(new)
    (said,) = {one.getMessage() for one in caplog.records if one.levelname == "WARNING"}
    assert "cannot use the transfer parameters of request-1: there is no 'kvferry' in them" in said
    assert side.matched(new, 0) == (0, False)


def test_a_host_that_does_not_resolve_is_an_option_s_fault(start):
    with pytest.raises(ValueError, match="the option 'host' of kv_connector_extra_config is 'no host'"):
        start("kv_both", host="no host")
