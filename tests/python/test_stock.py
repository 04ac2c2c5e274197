"""What an engine with vLLM's stock NixlConnector says, and what it might: read without any engine."""

import threading
import time
from types import SimpleNamespace

import kvferry
import msgspec
import pytest
import torch
import zmq
from kvferry.vllm import FerryConnector
from kvferry.vllm.stock import wire as stock_wire
from kvferry.vllm.params import admit
from kvferry.vllm.stock.source import ASKED, Stock, _Engine
from kvferry.vllm.stock.wire import Introduction, Place
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

RANK = {
    "engine_id": "p",
    "agent_metadata": b"nixl's own",
    "kv_caches_base_addr": [4096],
    "device_id": 0,
    "num_blocks": 8,
    "block_lens": [512],
    "block_strides": [512],
    "kv_cache_layout": "LBHNC",
    "block_size": 16,
    "ssm_sizes": [0, 0],
    "attn_backend_name": "CPU_ATTN",
    "physical_blocks_per_logical_kv_block": 4,
    "region_num_blocks": [8],
    "region_group_ids": [0],
    "region_names": ["model.layers.0.attn"],
    "region_mem_types": ["DRAM"],
    "dcp_size": 1,
    "pcp_size": 1,
    "ple_block_len": None,
    "region_members": [],
    "packed_member_layouts": {},
    "something_new": 5,
}


def answer(**changes):
    rank = {name: value for name, value in (RANK | changes).items() if value is not ...}
    return msgspec.msgpack.encode(
        {"compatibility_hash": "abc", "agent_metadata_bytes": msgspec.msgpack.encode(rank)}
    )


def nested(depth):
    """What msgspec itself would not write."""
    return msgspec.msgpack.encode(
        {"compatibility_hash": "abc", "agent_metadata_bytes": b"\x91" * depth + b"\x00"}
    )


@pytest.fixture
def serve(monkeypatch):
    """A side channel that gives these answers, or what they return, one after the other, and says what it
    was asked."""
    monkeypatch.setattr(stock_wire, "PATIENCE", 60.0)
    context, sockets = zmq.Context(), []

    def start(*answers):
        socket = context.socket(zmq.ROUTER)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        asked = []

        def run():
            for one in answers:
                if not socket.poll(60_000):
                    return
                who, _, question = socket.recv_multipart()
                asked.append(msgspec.msgpack.decode(question))
                one = one() if callable(one) else one
                socket.send_multipart((who, b"", one, msgspec.msgpack.encode(1.5)))

        thread = threading.Thread(target=run)
        thread.start()
        sockets.append((socket, thread))
        return port, asked

    yield start
    for socket, thread in sockets:
        thread.join()
        socket.close(0)
    context.term()


def ask(place):
    return stock_wire.ask(place, place.address.removeprefix("nixl://"))


def test_each_rank_is_asked_once(serve):
    port, asked = serve(answer(), answer(agent_metadata=b"another"))
    place = Place("127.0.0.1", port, "p", 2)
    introduction = ask(place)
    assert asked == [[b"get_meta_msg", 0, 0], [b"get_meta_msg", 0, 1]]
    assert introduction.block == 64
    assert introduction.hashes() == ["abc", "abc"]
    assert [rank.agent_metadata for rank in introduction.ranks()] == [b"nixl's own", b"another"]
    # Another life has another name.
    other = Introduction(place, (answer(), answer(agent_metadata=b"a third")))
    assert other.incarnation != introduction.incarnation == Introduction(
        place, introduction.answers
    ).incarnation


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (b"", "is not one of vLLM's NixlConnector"),
        (b"\xc1", "is not one of vLLM's NixlConnector"),
        (msgspec.msgpack.encode(["a", "list"]), "is not one of vLLM's NixlConnector"),
        (msgspec.msgpack.encode({"compatibility_hash": "abc"}), "is not one of vLLM's NixlConnector"),
        (answer(ple_block_len=...), "lacks 'ple_block_len': it is of another version"),
        (answer(region_names=...), "lacks 'region_names': it is of another version"),
        (answer(num_blocks="many"), "is not understood"),
        (answer(block_lens=None), "is not understood"),
        (answer(engine_id="q"), "is of engine q, but the request was computed by p"),
        # What is divided by.
        (answer(block_size=0), "is not understood"),
        (answer(physical_blocks_per_logical_kv_block=-1), "is not understood"),
        (answer(num_blocks=1 << 40), "is not understood"),
        (b"\x91" * 100_000 + b"\x00", "is not one of vLLM's NixlConnector"),
        (nested(100_000), "is not understood"),
    ],
)
def test_answers_that_are_of_no_use(serve, bad, words):
    port, _ = serve(bad)
    with pytest.raises(ValueError, match=words):
        ask(Place("127.0.0.1", port, "p", 1))


def test_an_engine_that_does_not_answer(serve, monkeypatch):
    def last():
        # From here on nobody answers; until then it may take as long as it takes on a busy machine.
        monkeypatch.setattr(stock_wire, "PATIENCE", 0.2)
        return answer()

    port, _ = serve(last)
    with pytest.raises(OSError, match="rank 1 of 2 has not answered at nixl://127.0.0.1"):
        ask(Place("127.0.0.1", port, "p", 2))
    for host in ("no such host.invalid", "127.0.0.1"):
        with pytest.raises(OSError):
            ask(Place(host, 1, "p", 1))
    for ranks in (0, -1, 10**6):
        with pytest.raises(ValueError, match="'tp_size' is"):
            ask(Place("127.0.0.1", port, "p", ranks))


def test_a_ticket_says_where_its_engine_is():
    for host in ("10.0.0.5", "fe80::1", "p.example"):
        place = Place(host, 5600, "p", 4)
        ticket = {"address": place.address, "engine": "p", "tp": 4}
        assert Place.of(ticket) == place


FULL = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=48
)


def params(**changes):
    """What the stock connector hands over for 200 tokens in blocks of 64."""
    given = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3, 4], [7, 8]],
        "remote_engine_id": "p",
        "remote_request_id": "r-1",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 200,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
    }
    return {name: value for name, value in (given | changes).items() if value is not ...}


@pytest.fixture
def stock():
    groups = SimpleNamespace(specs=[FULL, WINDOW], recurrent=[False, False])
    made = Stock(kvferry.Scheduler("d"), groups, 30.0)
    place = Place("127.0.0.1", 5600, "p", 1)
    made._engines[place] = _Engine(place, introduction=Introduction(place, (answer(),)))
    yield made
    made.close()
    made.agent.close()


def test_where_tables_start(stock):
    # P hands over no more of a window's table than the window needs.
    for told in (params(), admit(params(remote_registration_generation=1), 1000)):
        offer = stock.complete(stock.read(told))
        assert (offer.tokens, offer.first) == (200, [0, 2])
    # All of it, where that is less.
    short = params(remote_block_ids=[[1], [7]], remote_num_tokens=64)
    assert stock.complete(stock.read(short)).first == [0, 0]


def ticket_at(host, port, name="p"):
    return {"address": Place(host, port, name, 1).address, "engine": name, "tp": 1, "request": "r"}


def why_lost(stock, ticket):
    """Once its engine was looked for."""
    stock.hold(ticket)
    until = time.monotonic() + 60
    while (why := stock.lost(ticket)) is None and time.monotonic() < until:
        time.sleep(0.01)
    stock.abandon(ticket)
    return why


@pytest.mark.parametrize(
    ("peers", "rule"),
    [
        # A key does not help: such an engine has none.
        ([], "proves nothing, and is looked for on loopback alone. Name its network in 'peers'"),
        (["10.0.0.0/8"], "'peers' names only 10.0.0.0/8"),
    ],
)
def test_a_ticket_leads_nowhere_else(monkeypatch, peers, rule):
    monkeypatch.setattr(stock_wire, "ask", lambda *_: pytest.fail("somebody was asked"))
    agent = kvferry.Scheduler("d", key="a key of this test", peers=peers)
    stock = Stock(agent, None, 30.0)
    # No packet leaves this machine, and none is sent.
    hosts = ["192.0.2.1"] if not peers else ["127.0.0.1", "192.0.2.1", "localhost"]
    for host in hosts:
        why = why_lost(stock, ticket_at(host, 5600))
        assert rule in why and (host == "localhost" or f"{host}:5600" in why), why
    for host in ("169.254.169.254", "0.0.0.0"):
        assert "is not connected to" in why_lost(stock, ticket_at(host, 80))
    assert "looking up the name" in why_lost(stock, ticket_at("no such host.invalid", 80))
    assert stock._engines == {} and stock.counts["stock_unreachable"] == len(hosts) + 3
    stock.close()
    agent.close()


def test_no_more_threads_than_there_may_be_wait_for_answers(monkeypatch):
    """Requests name engines, and threads ask them."""
    answer, asked = threading.Event(), []

    def ask(place, _):
        asked.append(place)
        assert answer.wait(60)
        raise OSError("nobody is there")

    monkeypatch.setattr(stock_wire, "ask", ask)
    agent = kvferry.Scheduler("d")
    stock = Stock(agent, None, 30.0)
    tickets = [ticket_at("127.0.0.1", 5600, f"p{number}") for number in range(ASKED + 10)]
    for ticket in tickets:
        stock.hold(ticket)
    assert [stock.lost(ticket) is None for ticket in tickets] == [True] * ASKED + [False] * 10
    assert "are being asked already" in stock.lost(tickets[-1])
    waiting = [one for one in threading.enumerate() if one.name == "kvferry-stock-ask"]
    assert len(waiting) == ASKED
    answer.set()
    for thread in waiting:
        thread.join()
    assert len(asked) == ASKED
    # There is room again.
    assert why_lost(stock, tickets[-1]) == "nobody is there"
    stock.close()
    agent.close()


def test_a_window_that_has_moved_on_is_of_no_use(stock):
    # In blocks of 64, P has given up the tokens before 128.
    offer = stock.complete(stock.read(params(remote_block_ids=[[1, 2, 3, 4], [0, 8, 9]])))
    assert offer.first == [0, 1]
    # The token after 175 looks back to 128, and that after 174 to 127.
    assert stock.usable(offer, 199)
    assert stock.usable(offer, 175)
    assert not stock.usable(offer, 174)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pp_size": 2}, "pipeline stages"),
        ({"dcp_size": 2}, "context parallelism"),
        ({"transfer_mode": "push"}, "writes"),
        ({"remote_registration_generation": 2}, "registered its memory anew.* is 2, with 1 ranks"),
        ({"remote_registration_generation": "2"}, "'remote_registration_generation' is '2', but must be a whole"),
        ({"tp_size": ...}, "'tp_size' is missing"),
        ({"tp_size": "1"}, "'tp_size' is '1', but must be a whole number"),
        ({"remote_port": None}, "'remote_port' is missing"),
        ({"remote_num_tokens": None}, "'remote_num_tokens' is missing"),
        ({"remote_block_ids": {"a": 1}}, "'remote_block_ids' is {'a': 1}, but must be a list"),
    ],
)
def test_parameters_that_are_of_no_use(stock, changes, words):
    with pytest.raises(ValueError, match=words):
        stock.read(admit(params(**changes), 1000))


@pytest.mark.parametrize(
    "changes",
    [{"kvferry": {}}, {"dcp_size": ...}, {"remote_block_ids": []}, {"remote_request_id": None}],
)
def test_parameters_of_others(stock, changes):
    assert stock.read(params(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"remote_block_ids": [[1, 2, 3, 4]]}, "has 1 tables"),
        ({"remote_block_ids": [[1, 2, 3], [7, 8]]}, "has 3 blocks of 64 tokens"),
    ],
)
def test_tables_that_are_of_no_use(stock, changes, words):
    with pytest.raises(ValueError, match=words):
        stock.complete(stock.read(params(**changes)))


@pytest.mark.parametrize(
    ("role", "options", "latent", "layout"),
    [
        ("kv_consumer", {}, False, None),
        ("kv_consumer", {"nixl_connector_lease_seconds": 30}, False, "LBHNC"),
        ("kv_both", {"nixl_connector_lease_seconds": 30}, False, "LBHNC"),
        ("kv_producer", {"nixl_connector_lease_seconds": 30}, False, None),
        ("kv_consumer", {"nixl_connector_lease_seconds": 30}, True, None),
    ],
)
def test_d_has_the_layout_of_p(role, options, latent, layout):
    """Only where it is to read from such a P, and where there is one to choose."""
    transfer = KVTransferConfig(
        kv_connector="FerryConnector", kv_role=role, kv_connector_extra_config=options
    )
    config = SimpleNamespace(kv_transfer_config=transfer, model_config=SimpleNamespace(use_mla=latent))
    assert FerryConnector.get_required_kvcache_layout(config) == layout
