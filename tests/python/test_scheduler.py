"""The scheduler's side without an engine: a request from one half to the other."""

import asyncio
import copy
import logging
import time
from types import SimpleNamespace

import pytest
from kvferry.vllm import logs
from kvferry.vllm.scheduler.decode import RECOMPUTED, Wanted, recomputed
from kvferry.vllm.scheduler.side import SchedulerSide
from sides import blocks, request, start_side
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.request import Request, RequestStatus


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


def test_the_log_has_the_address_to_listen_on_and_the_one_that_peers_are_told(start, caplog):
    start("kv_producer", advertise="192.0.2.7")
    (said,) = {one.getMessage() for one in caplog.records if "listens on" in one.getMessage()}
    assert "listens on 127.0.0.1, and peers are told 192.0.2.7:" in said


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


def reject(decode, params):
    """As vLLM's server says that it has rejected a request, or that it has failed: its own code makes what it sends."""
    sent = []

    async def send(asked):
        sent.append(asked)

    server = SimpleNamespace(engine_core=SimpleNamespace(add_request_async=send))
    asyncio.run(AsyncLLM.notify_kv_transfer_request_rejected(server, "cmpl-1", params))
    rejected = Request.from_engine_core_request(sent[0], None)
    decode.on_new_request(rejected)
    rejected.status = RequestStatus.FINISHED_ABORTED
    decode.finished(rejected, ([],))


def test_what_is_said_of_a_load_that_has_failed_is_no_forged_request(start, caplog):
    """vLLM's server rejects what has ended with an error, too: the same ticket comes again, with another prompt."""
    prefill, decode = start("kv_producer"), start("kv_consumer")
    asked = request(do_remote_decode=True)
    prefill.on_new_request(asked)
    _, params = prefill.finished(asked, ([3, 5],))
    wanted = request(**params)
    decode.on_new_request(wanted)
    # Another answer to the same prompt still waits for its blocks.
    reject(decode, params)
    assert decode.matched(wanted, 0)[1] and not prefill.orders([]).released
    decode.decode._give_up(wanted.request_id, failed=True)
    reject(decode, params)
    assert decode.decode.counts["params_refused"] == 0
    assert not [one for one in caplog.records if one.levelname == "WARNING"]
    released(prefill)


@pytest.mark.parametrize("push", ["never", "always"])
def test_a_request_that_d_s_server_rejects(start, caplog, push):
    """vLLM's server makes another one of it, of a single token and aborted, for the connector to hear of it. Its name
    and its prompt are not those that both engines know a request by, if it was sent to both."""
    prefill, decode = start("kv_producer", push=push), start("kv_consumer")
    asked = request("cmpl-1-0-0123abcd", do_remote_decode=True)
    prefill.on_new_request(asked)
    _, params = prefill.finished(asked, ([3, 5],))
    if push == "always":
        names = ("do_remote_prefill", "remote_engine_id", "remote_host", "remote_port")
        params = {name: params[name] for name in names} | {"remote_request_id": "cmpl-1"}
    reject(decode, params)
    assert decode.decode.counts["params_refused"] == 0
    assert not [one for one in caplog.records if one.levelname == "WARNING"]
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


def test_who_shares_a_read_does_not_wait_once_it_has_begun(start):
    """The first of several answers waits for the others before it reads. They are told in the same step as it is: a step
    later, it may be over, and they would compute the prompt."""
    prefill, decode = start("kv_producer"), start("kv_consumer")
    asked = request(do_remote_decode=True)
    prefill.on_new_request(asked)
    _, params = prefill.finished(asked, ([3, 5],))
    first, second = (request(**copy.deepcopy(params)) for _ in range(2))
    first.request_id, second.request_id = "0_request", "1_request"
    decode.on_new_request(first)
    time.sleep(0.01)
    decode.on_new_request(second)
    decode.decode.wanted["1_request"].since += 60
    assert decode.matched(first, 32) == (8, True)
    # It has no blocks yet, so that there is nothing to share.
    assert decode.matched(second, 32) == (None, False)
    decode.decode.allocated(first, blocks([1, 2]), 8)
    assert decode.matched(second, 32) == (8, True)
    for one in (first, second):
        decode.finished(one, ([],))
    prefill.agent.revoke("request-1")


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


def test_who_never_comes_to_d_does_not_get_the_whole_pool(start, caplog):
    """Ten blocks, of which half may be kept; what two requests share counts once."""
    side = start("kv_producer", lease_share=0.5)
    side.bind(SimpleNamespace(block_pool=SimpleNamespace(num_gpu_blocks=10)))

    def keep(name, ids):
        asked = request(name, do_remote_decode=True)
        side.on_new_request(asked)
        return side.finished(asked, (ids,))[0]

    # The first may be larger than that.
    assert keep("large", [1, 2, 3, 4, 5, 6])
    assert not keep("second", [7, 8])
    assert "second is not handed over: it has 2 blocks, and 6 are kept" in caplog.text
    side.agent.revoke("large")
    released(side)
    assert keep("one", [1, 2, 3]) and keep("same", [1, 2, 3]) and keep("more", [1, 4, 5])
    assert not keep("too much", [6])
    side.agent.revoke("one")
    released(side)
    assert not keep("still too much", [6])
    side.agent.revoke("more")
    released(side)
    assert keep("enough", [6])
    assert side.stats().data["counts"]["leases_declined"] == 3
    for name in ("same", "enough"):
        side.agent.revoke(name)
    while side.keep.kept:
        side.orders([])
    assert not side.keep.pinned and not side.keep.tables


def test_what_a_client_hands_in_goes_no_further(start, caplog):
    """vLLM sends `extra_args` to its workers."""
    side = start("kv_both")
    deep = []
    for _ in range(1400):
        deep = [deep]
    new = request(do_remote_prefill=True, do_remote_decode=True, more=deep)
    side.on_new_request(new)
    assert new.kv_transfer_params == {"do_remote_decode": True}
    assert new.sampling_params.extra_args == {"kv_transfer_params": {"do_remote_decode": True}}
    assert "'more' is nested more than 8 levels deep" in caplog.text
    # It is computed here, and handed over all the same.
    assert side.finished(new, ([3, 5],))[0]
    side.agent.revoke("request-1")
    # A name that nobody should look for, nor read in a log.
    bad = request("cmpl-\n2026-11-19 forged line", do_remote_decode=True)
    side.on_new_request(bad)
    assert bad.kv_transfer_params is None and not side.prefill.prefilling
    assert "\n" not in caplog.records[-1].getMessage()
    assert side.finished(bad, ([3, 5],)) == (False, None)
    assert side.stats().data["counts"]["params_refused"] == 2


@pytest.fixture
def key(tmp_path):
    def write(secret):
        path = tmp_path / secret
        path.write_text(f"a key of ours that nobody guesses: {secret}")
        return str(path)

    return write


def forged_host(params):
    params["kvferry"]["ticket"]["address"] = "127.0.0.1:9"


def forged_life(params):
    params["kvferry"]["ticket"]["incarnation"] = "0" * 16


def forged_tables(params):
    params["remote_block_ids"] = [[5, 3]]


def forged_tokens(params):
    params["kvferry"]["tokens"] = 39


def no_seal(params):
    del params["kvferry"]["ticket"]["seal"]


@pytest.mark.parametrize("forge", [forged_host, forged_life, forged_tables, forged_tokens, no_seal])
def test_with_a_key_a_ticket_is_what_p_has_sealed(start, key, caplog, forge):
    prefill, decode = (start(role, key_file=key("one")) for role in ("kv_producer", "kv_consumer"))
    asked = request(do_remote_decode=True)
    prefill.on_new_request(asked)
    _, params = prefill.finished(asked, ([3, 5],))
    changed = copy.deepcopy(params)
    forge(changed)
    decode.on_new_request(request("forged", **changed))
    (said,) = {one.getMessage() for one in caplog.records if one.levelname == "WARNING"}
    assert "cannot use the transfer parameters of forged: " in said and "sealed" in said
    # Nothing is connected to, and nothing given up.
    assert decode.agent.status()["connected_to"] == [] and not decode.decode.wanted
    wanted = request("request-2", **params)
    decode.on_new_request(wanted)
    assert decode.matched(wanted, 0) == (40, True)
    # An engine with another key is not believed either.
    other = start("kv_consumer", key_file=key("another"))
    other.on_new_request(request("request-3", **params))
    assert not other.decode.wanted and other.agent.status()["connected_to"] == []
    prefill.agent.revoke("request-1")


def test_with_a_key_the_address_of_an_engine_is_what_it_has_sealed(start, key, caplog):
    """Where the router sends a request to both, and passes on little else."""
    prefill, decode = (start(role, key_file=key("one"), push="always") for role in ("kv_producer", "kv_consumer"))
    asked = request("cmpl-1-0-0123abcd", do_remote_decode=True)
    prefill.on_new_request(asked)
    _, params = prefill.finished(asked, ([3, 5],))
    names = ("do_remote_prefill", "remote_engine_id", "remote_host", "remote_port")
    left = {name: params[name] for name in names} | {"remote_request_id": "cmpl-1"}
    for number, changes in enumerate(({"remote_port": 9}, {"remote_engine_id": "p"}, {"remote_engine_id": "p~" + "0" * 32})):
        decode.on_new_request(request(f"cmpl-forged-{number}-0123abcd", **left | changes))
    said = {one.getMessage() for one in caplog.records if one.levelname == "WARNING"}
    assert len(said) == 3 and all("sealed" in one for one in said)
    assert decode.agent.status()["connected_to"] == [] and not decode.decode.wanted
    decode.on_new_request(request("cmpl-1-0-89abcdef", **left))
    assert list(decode.decode.wanted) == ["cmpl-1-0-89abcdef"]
    prefill.agent.revoke("cmpl-1-0-0123abcd")


@pytest.mark.parametrize("why", ["params", "draining", "in_use", "states", "windows", "not_taken", "load_failed"])
def test_a_prompt_that_d_computes_again_is_counted_by_reason(start, why):
    prefill, decode = start("kv_producer"), start("kv_consumer", kv_load_failure_policy="recompute")
    asked = request(do_remote_decode=True)
    prefill.on_new_request(asked)
    _, params = prefill.finished(asked, ([3, 5],))
    side, wanted = decode.decode, request(**params)
    if why == "params":
        wanted.all_token_ids = list(range(1, 41))
    decode.on_new_request(wanted)
    if why == "states":
        side.groups.held_back, side.groups.recurrent = 1, [True]
    elif why == "windows":
        side.wanted["request-1"].stock = True
        side.stock = SimpleNamespace(usable=lambda offer, tokens: False, abandon=lambda ticket, failed: None)
    elif why == "draining":
        lost = [({**params["kvferry"]["ticket"], "draining": True}, "it drains")]
        side.agent = With(side.agent, lost=lambda: [(dict(ticket), why) for ticket, why in lost])
    elif why == "in_use":
        side.agent = With(side.agent, leave=lambda name: None)
        other = Wanted(None, 40, None, follows={})
        assert not side._is_new("request-2", other, side.wanted["request-1"].ticket)
        assert other.twin and other.tokens == 0
    loads = why in ("not_taken", "load_failed", "in_use")
    for _ in range(2):
        assert decode.matched(wanted, 0) == ((40, True) if loads else (0, False))
    if why == "load_failed":
        decode.allocated(wanted, Blocks([1, 2]), 40)
        assert not any(side.counts[recomputed(reason)] for reason in RECOMPUTED)
        decode.ended("request-1", True, 0.0)
    elif why != "in_use":
        decode.allocated(wanted, Blocks([1, 2]), 0)
    counts = decode.stats().data["counts"]
    assert {name: n for name, n in counts.items() if name.startswith("prompts_")} == {
        "prompts_offered": 1,
        recomputed(why): 1,
    }
    prefill.agent.revoke("request-1")


@pytest.mark.parametrize("case", ["loaded", "held", "fails", "aborted", "rejected", "a turn of P"])
def test_a_prompt_that_d_does_not_compute_again_is_not_counted(start, case):
    policy = "fail" if case == "fails" else "recompute"
    prefill, decode = start("kv_producer"), start("kv_consumer", kv_load_failure_policy=policy)
    asked = request(do_remote_decode=True)
    prefill.on_new_request(asked)
    _, params = prefill.finished(asked, ([3, 5],))
    wanted = request(**params)
    if case == "rejected":
        wanted.abort_immediately = True
    if case == "a turn of P":
        wanted = request(**params | {"do_remote_prefill": False, "do_remote_decode": True})
    decode.on_new_request(wanted)
    offered = case not in ("rejected", "a turn of P")
    if offered:
        held = 40 if case == "held" else 0
        assert decode.matched(wanted, held) == (40 - held, not held)
        decode.allocated(wanted, Blocks([1, 2]), 40 - held)
        if case == "aborted":
            decode.finished(wanted, ([],))
        decode.ended("request-1", case != "loaded", 0.0)
    counts = decode.stats().data["counts"]
    assert counts.get("prompts_offered", 0) == offered
    assert not [name for name in counts if name.startswith("prompts_rec")]
    prefill.agent.revoke("request-1")


class With:
    """An agent, some of whose answers are others."""

    def __init__(self, agent, **others):
        self.__dict__ |= others
        self.agent = agent

    def __getattr__(self, name):
        return getattr(self.agent, name)
