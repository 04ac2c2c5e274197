"""The scheduler's side without an engine: a request from one half to the other."""

import logging
import time
from types import SimpleNamespace

import pytest
from kvferry.vllm import logs
from kvferry.vllm.scheduler import SchedulerSide
from sides import request, start_side
from vllm.v1.request import RequestStatus


@pytest.fixture
def start(caplog):
    made = []

    def start(role, ranks=1, **options):
        made.append(start_side(SchedulerSide, role=role, ranks=ranks, **options))
        return made[-1]

    logs.logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger=logs.logger.name)
    yield start
    logs.logger.removeHandler(caplog.handler)
    for side in made:
        side.agent.close()


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


def test_parameters_for_another_prompt_are_not_used(start, caplog):
    prefill, decode = start("kv_producer"), start("kv_consumer")
    asked = request(do_remote_decode=True)
    prefill.on_new_request(asked)
    _, params = prefill.finished(asked, ([3, 5],))
    wanted = request(**params)
    wanted.all_token_ids = list(range(1, 41))
    decode.on_new_request(wanted)
    (said,) = {one.getMessage() for one in caplog.records if one.levelname == "WARNING"}
    assert "they are for another prompt: its tokens differ: " in said
    assert decode.matched(wanted, 0) == (0, False)
    released(prefill)


@pytest.mark.parametrize("push", ["never", "always"])
def test_a_request_that_d_s_server_rejects(start, push):
    """vLLM's server makes another one of it, of a single token and aborted, for the connector to hear of it. Its name
    and its prompt are not those that both engines know a request by, if it was sent to both."""
    prefill, decode = start("kv_producer", push=push), start("kv_consumer")
    asked = request("cmpl-1-0-0123abcd", do_remote_decode=True)
    prefill.on_new_request(asked)
    _, params = prefill.finished(asked, ([3, 5],))
    if push == "always":
        names = ("do_remote_prefill", "remote_engine_id", "remote_host", "remote_port")
        params = {name: params[name] for name in names} | {"remote_request_id": "cmpl-1"}
    rejected = request("cmpl-1", **params)
    rejected.prompt_token_ids = rejected.all_token_ids = [0]
    rejected.num_prompt_tokens, rejected.num_computed_tokens = 1, 0
    rejected.status = RequestStatus.FINISHED_ABORTED
    decode.on_new_request(rejected)
    decode.finished(rejected, ([],))
    if push == "never":
        released(prefill)
        return
    time.sleep(1)
    decode.orders([])
    assert not prefill.orders([]).released and list(prefill.keep.kept) == ["cmpl-1-0-0123abcd"]
    prefill.agent.revoke("cmpl-1-0-0123abcd")


@pytest.mark.parametrize("side", ["P", "D"])
def test_a_session_that_goes_on_is_not_handed_over(start, caplog, side):
    """vLLM's streamed input: more of the prompt comes later."""
    prefill, decode = start("kv_producer"), start("kv_consumer")
    asked = request(do_remote_decode=True)
    asked.resumable = side == "P"
    prefill.on_new_request(asked)
    kept, params = prefill.finished(asked, ([3, 5],))
    assert kept == (side == "D")
    if kept:
        wanted = request(**params)
        wanted.resumable = True
        decode.on_new_request(wanted)
        assert decode.matched(wanted, 0) == (0, False)
        released(prefill)
    (said,) = {one.getMessage() for one in caplog.records if one.levelname == "WARNING"}
    assert "more of its prompt comes later" in said


@pytest.mark.parametrize("ends", ["while it waits", "when it has read"])
def test_several_answers_to_one_prompt(start, ends):
    """One of them reads; who is left reads in its place."""
    prefill, decode = start("kv_producer"), start("kv_consumer")
    asked = request(do_remote_decode=True)
    prefill.on_new_request(asked)
    _, params = prefill.finished(asked, ([3, 5],))
    three = [request(**params) for _ in range(3)]
    for number, one in enumerate(three):
        one.request_id = f"{number}_request"
        decode.on_new_request(one)
    time.sleep(0.01)
    if ends == "while it waits":
        # The others wait for the first, which is aborted.
        assert decode.matched(three[1], 0) == (None, False)
        decode.finished(three.pop(0), ([],))
    reads, *others = three
    assert decode.matched(reads, 0) == (40, True)
    decode.allocated(reads, Blocks([1, 2]), 40)
    for at, other in enumerate(others):
        assert decode.matched(other, 0) == (40, True)
        decode.allocated(other, Blocks([5 + at, 7 + at]), 40)
    orders = decode.orders([])
    assert [load["request"] for load in orders.loads] == [reads.request_id]
    assert [share.request for share in orders.shares] == [one.request_id for one in others]
    assert all(share.source == [[1, 2]] for share in orders.shares)
    # Aborted now, it goes on reading for the others.
    decode.finished(reads, ([],))
    assert decode.orders([]).aborts == []
    for one in three:
        decode.ended(one.request_id, False, 0.0)
    assert not decode.decode.wanted
    prefill.agent.revoke("request-1")


class Blocks:
    """What vLLM has for a request."""

    def __init__(self, ids):
        self.ids = ids
        self.blocks = [[SimpleNamespace(block_hash_num_tokens=0) for _ in ids]]

    def get_block_ids(self):
        return (self.ids,)


def released(side):
    deadline = time.monotonic() + 30
    while not side.orders([]).released:
        assert time.monotonic() < deadline


def test_of_several_answers_the_last_is_kept(start):
    """vLLM passes on the parameters of the one that ends last."""
    side = start("kv_producer", push="never")
    for number in range(3):
        asked = request(do_remote_decode=True)
        asked.request_id = f"{number}_request"
        side.on_new_request(asked)
        assert side.finished(asked, ([3 + number],))[0]
    assert side.orders([]).released == ["0_request", "1_request"]
    side.agent.revoke("2_request")


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
