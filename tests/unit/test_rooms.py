"""What SGLang's router sends to a vLLM server, in the words of vLLM's connector."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from kvferry.vllm import rooms
from kvferry.vllm.params import admit
from kvferry.vllm.rooms import Rooms, translated

SENT = {"bootstrap_host": "10.0.0.3", "bootstrap_port": 8998, "bootstrap_room": 2**62 + 1}
BODY = {"model": "m", "prompt": [1, 2], "max_tokens": 50, "stop": ["x"], "min_tokens": 3, "temperature": 0.5}


def served(body, role="kv_producer", path="/v1/completions", method="POST", parts=1):
    """What comes of a request: status and body of the answer, and what the application behind was given."""
    state = SimpleNamespace(args=SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_role=role), model="m", served_model_name=None))
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    scope = {"type": "http", "path": path, "method": method, "app": SimpleNamespace(state=state)}
    scope["headers"] = [(b"content-length", str(len(data)).encode()), (b"x", b"y")]
    given, sent = [], []
    step = -(-len(data) // parts) or 1
    waiting = [
        {"type": "http.request", "body": data[at : at + step], "more_body": at + step < len(data)} for at in range(0, len(data) or 1, step)
    ] + [{"type": "http.disconnect"}]

    async def receive():
        return waiting.pop(0)

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        message = await receive()
        given.append((dict(scope["headers"]), message["body"], await receive()))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    asyncio.run(Rooms(app)(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"]), given


def test_a_prefill_server_computes_one_token_and_keeps_the_cache_for_the_room():
    status, _, ((headers, body, after),) = served(BODY | SENT, parts=3)
    got = json.loads(body)
    assert (status, headers[b"content-length"], headers[b"x"]) == (200, str(len(body)).encode(), b"y")
    # That the client has gone is heard, too.
    assert after == {"type": "http.disconnect"}
    params = got.pop("kv_transfer_params")
    assert got == {"model": "m", "prompt": [1, 2], "max_tokens": 1, "temperature": 0.5}
    assert admit(params, 100) == {"do_remote_decode": True, "kvferry_room": SENT["bootstrap_room"]}


def test_a_decode_server_is_told_where_to_look():
    _, _, ((_, body, _),) = served(BODY | SENT, role="kv_consumer", path="/v1/chat/completions")
    got = json.loads(body)
    assert got.pop("kv_transfer_params") == {
        "do_remote_prefill": True, "kvferry_room": SENT["bootstrap_room"], "remote_host": "10.0.0.3", "remote_port": 8998,
    }
    assert got == BODY


def test_chats_may_say_how_many_tokens_in_another_word():
    got = translated({"max_completion_tokens": 9} | SENT, "kv_producer")
    assert (got["max_completion_tokens"], got["max_tokens"]) == (1, 1)


@pytest.mark.parametrize("body", [BODY, b"no json", b"[]", b"", BODY | {"bootstrap_room": None}])
def test_what_has_no_room_is_passed_on_as_it_is(body):
    status, _, ((_, got, _),) = served(body)
    assert (status, got) == (200, body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"bootstrap_room": [1, 2]}, {}, "a batch of prompts"),
        ({"bootstrap_room": -1}, {}, "'bootstrap_room' is '-1'"),
        ({"bootstrap_room": True}, {}, "'bootstrap_room' is 'True'"),
        ({"bootstrap_room": "7"}, {}, "'bootstrap_room' is '7'"),
        ({"n": 2}, {}, "several answers"),
        ({}, {"path": "/generate"}, "a vLLM server has no /generate"),
        ({}, {"role": "kv_both"}, "its kv_role is 'kv_both'"),
    ],
)
def test_what_cannot_be_handed_over_is_said(changes, options, words):
    status, answer, given = served(BODY | SENT | changes, **options)
    assert status == 400 and words in answer["error"]["message"] and not given


def test_a_request_that_is_too_large_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(rooms, "LARGEST", 64)
    status, answer, given = served(BODY | SENT, parts=10)
    assert status == 413 and not given


def test_the_router_learns_which_model_there_is():
    status, answer, given = served(b"", path="/server_info", method="GET")
    assert (status, answer["model_path"], answer["served_model_name"], given) == (200, "m", "m", [])
