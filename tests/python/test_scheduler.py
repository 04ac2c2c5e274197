"""The scheduler's side without an engine: a request from one half to the other."""

import logging
import time
from types import SimpleNamespace

import pytest
import torch
from kvferry.vllm import logs
from kvferry.vllm.options import Options
from kvferry.vllm.scheduler import SchedulerSide
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus


@pytest.fixture
def start(caplog):
    made = []

    def start(role, ranks=1, **options):
        spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(
            num_blocks=10, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)]
        )
        config = SimpleNamespace(
            kv_transfer_config=KVTransferConfig(kv_connector="FerryConnector", kv_role=role),
            parallel_config=SimpleNamespace(
                data_parallel_index=0,
                data_parallel_size=ranks,
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
            ),
            model_config=SimpleNamespace(multimodal_config=None),
            num_prefill_lookahead_tokens=0,
            speculative_config=None,
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
    """Of 40 tokens, all computed."""
    return SimpleNamespace(
        request_id="request-1",
        kv_transfer_params=params,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
        num_prompt_tokens=40,
        num_computed_tokens=40,
        num_in_flight_tokens=0,
        num_preemptions=0,
        all_token_ids=list(range(40)),
        lora_request=None,
        cache_salt=None,
        prompt_embeds=None,
        mm_features=None,
    )


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_parameters_decide_whatever_the_role(start, role):
    prefill, decode = start(role), start(role)
    asked = request(do_remote_decode=True)
    prefill.on_new_request(asked)
    assert prefill.orders(["request-1"]).hands_over
    kept, params = prefill.finished(asked, ([3, 5],))
    assert kept and params["remote_block_ids"] == [[3, 5]] and params["kvferry"]["tokens"] == 40
    assert not prefill.orders(["request-1"]).hands_over
    # What it hands over is what another takes over.
    wanted = request(**params)
    decode.on_new_request(wanted)
    assert decode.matched(wanted, 32) == (8, True)
    decode.finished(wanted, ([],))
    assert decode.matched(wanted, 32) == (0, False)
    # Given up by the one, and so free again on the other.
    deadline = time.monotonic() + 30
    while not (released := prefill.orders([]).released):
        assert time.monotonic() < deadline
    assert released == ["request-1"] and not prefill.keep.kept


def test_an_engine_keeps_nothing_that_nobody_asked_for(start):
    side = start("kv_both")
    for status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
        asked = request(do_remote_decode=True)
        asked.status = status
        side.on_new_request(asked)
        assert side.finished(asked, ([3, 5],)) == (False, None)
        assert not side.prefill.prefilling
    assert side.finished(request(), ([3, 5],)) == (False, None)


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


@pytest.mark.parametrize(
    "push, ranks, pushes", [("auto", 1, True), ("auto", 2, False), ("always", 2, True), ("never", 1, False)]
)
def test_whether_the_router_is_told_to_send_to_both(start, push, ranks, pushes):
    side = start("kv_producer", ranks, push=push)
    asked = request(do_remote_decode=True)
    side.on_new_request(asked)
    _, params = side.finished(asked, ([3, 5],))
    assert ("transfer_mode" in params) == pushes
    side.agent.revoke("request-1")
