"""A client that means harm, and a real server with two ranks: whatever it hands in, the server answers afterwards.

The queue between vLLM's scheduler and its workers does not survive what is nested deeply, and an engine does not survive
that queue. JSON and msgpack let nearly 1,500 levels through.
"""

import json
import os
import random
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from http_pair import ANSWER, Pair, save_tokenizer, until
from test_served import SEPARATE, ask
from tiny import save_model

#: Requests in all (many more on request), and how many at once.
MANY, AT_ONCE = 2000 if os.environ.get("KVFERRY_LONG_TESTS") else 150, 8
TICKET = {
    "engine": "nobody",
    # Nothing listens there.
    "address": "127.0.0.1:9",
    "incarnation": "0" * 16,
    "request": "cmpl-1-0-89abcdef",
    "nonce": "1" * 16,
    "term_ms": 1000,
}


class Decode(Pair):
    """Of which the decode server alone is started, with two ranks."""

    def command(self, who):
        return [*super().command(who), "--tensor-parallel-size", "2"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("client")
    save_tokenizer(save_model("qwen3", folder / "qwen3"))
    # Requests that cannot be loaded are computed, and those to read from are looked for briefly.
    extra = {"handshake_timeout_seconds": 0.5, "push_timeout_seconds": 0.5, "queue_timeout_seconds": 5, "lease_seconds": 1.0}
    pair = Decode(folder / "qwen3", folder, SEPARATE, {"kv_load_failure_policy": "recompute"}, extra)
    try:
        pair.start("decode")
        yield pair
    finally:
        pair.close()


def given():
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "nobody",
        "remote_request_id": "cmpl-1-0",
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "tp_size": 1,
        "kvferry": {"ticket": dict(TICKET), "tokens": 8, "first": [0]},
    }


def nested(depth):
    return "".join(["[" * depth, "1", "]" * depth])


def body(server, params, prompt="hello hello"):
    """A request, with parameters that are written as JSON: no reader of this process survives some of them."""
    rest = {"model": server.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    return (json.dumps(rest)[:-1] + f', "kv_transfer_params": {params}}}').encode()


def post(server, sent, headers=()):
    """The status of an answer."""
    url = f"{server.url('decode')}/v1/completions"
    request = urllib.request.Request(url, sent, {"Content-Type": "application/json", **dict(headers)})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("depth", [9, 900, 1400])
@pytest.mark.parametrize("where", ["beside", "inside", "in the ticket", "of another connector", "to be handed over"])
def test_a_key_that_is_nested(server, where, depth):
    params = given()
    place = {"inside": params["kvferry"], "in the ticket": params["kvferry"]["ticket"]}.get(where, params)
    if where == "of another connector":
        params = place = {"do_remote_prefill": True}
    if where == "to be handed over":
        params = place = {"do_remote_decode": True, "do_remote_prefill": False}
    place["new"] = "HERE"
    sent = body(server, json.dumps(params).replace('"HERE"', nested(depth)))
    # The body as a whole has a few levels more, and beyond some 1,500 vLLM's own server refuses it.
    assert post(server, sent) in (200, 400, 500)
    assert ask(server, "decode", "and it answers")[1]


def mutated(draw):
    value = draw.choice
    params = given()
    places = [params, params["kvferry"], params["kvferry"]["ticket"]]
    for _ in range(draw.randrange(1, 4)):
        place = value(places)
        made = value(
            [
                lambda: value([None, True, 0, -1, 1 << 32, 1 << 63, 0.5]),
                lambda: value(["", "x" * draw.randrange(5000), "a\r\nb", "\ud800", "9" * 16, "127.0.0.1:1"]),
                lambda: [value([0, -1, 1 << 40, "1", [1]])] * draw.randrange(2000),
                lambda: [[draw.randrange(1 << 32) for _ in range(draw.randrange(300))] for _ in range(value([0, 1, 2, 400]))],
                lambda: {value(["engine", "tokens", "x"]): {}},
            ]
        )()
        place[value([*place, "new", "epoch", "seal", "prompt", "hash", "do_remote_decode"])] = made
    if draw.random() < 0.1:
        params["nested"] = "HERE"
    return json.dumps(params).replace('"HERE"', nested(draw.randrange(1, 1450)))


def test_mutations(server):
    """With names of the client's choice, too. The server computes what it cannot load, and holds no block of it."""
    draw = random.Random(29)
    alone = ask(server, "decode", "what it says when it is left alone")
    sent = []
    for number in range(MANY):
        name = draw.choice([str(number), "the same", "x" * 3000, "résumé"])
        headers = [("X-Request-Id", name.encode().decode("latin-1"))] if draw.random() < 0.5 else []
        sent.append((body(server, mutated(draw)), headers))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        codes = list(pool.map(lambda one: post(server, *one), sent))
    # Half characters are refused by vLLM's own server, in its own way.
    assert set(codes) <= {200, 400, 422, 500}, set(codes)
    assert codes.count(200) > MANY // 2, {code: codes.count(code) for code in set(codes)}
    assert ask(server, "decode", "what it says when it is left alone") == alone
    until("no block is held", ANSWER, lambda: server.used_blocks("decode", 160) == 0)
    assert server.metric("decode", "kvferry_params_refused_total") > MANY // 10
    log = server.log("decode").read_text(errors="replace")
    assert "EngineCore encountered" not in log
    # One line each, and short, whatever a client has put into it.
    assert max(len(line) for line in log.splitlines() if "kvferry:" in line) < 3000
