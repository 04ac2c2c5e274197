"""SGLang's router in front of vLLM servers: `vllm serve … --middleware kvferry.vllm.rooms.Rooms`.

That router sends the same request to a prefill and to a decode server, and says in it where the prefill engine listens and by
which number, its room, both know it. Here that becomes what this server's connector is told; whether it prefills or decodes
`kv_role` says.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .params import ROOM

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]

#: What takes a prompt and generates.
PATHS = ("/v1/completions", "/v1/chat/completions")
#: Of SGLang's own.
THEIRS = ("/generate", "/v1/embeddings", "/v1/rerank")
FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
#: Bytes of a request that are read before it is passed on.
LARGEST = 64 << 20


class Rooms:
    """ASGI middleware. Requests without a room are passed on as they are."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: _Receive, send: _Send) -> None:
        path, method = scope.get("path"), scope.get("method")
        if scope["type"] == "http" and path in ("/server_info", "/get_server_info") and method == "GET":
            # What the router asks a worker when it meets it.
            return await _answer(send, 200, _server_info(scope))
        if scope["type"] != "http" or method != "POST" or path not in PATHS + THEIRS:
            await self.app(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:
            return await _answer(send, 413, _error(f"a request of more than {LARGEST >> 20} MiB"))
        given = _parsed(body)
        if given is None or given.get("bootstrap_room") is None:
            await self.app(scope, _again(body, receive), send)
            return
        try:
            if path not in PATHS:
                raise ValueError(f"a vLLM server has no {path}: use {' or '.join(PATHS)}")
            body = json.dumps(translated(given, _role(scope))).encode()
        except ValueError as error:
            return await _answer(send, 400, _error(str(error)))
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self.app({**scope, "headers": headers}, _again(body, receive), send)


def translated(given: dict[str, Any], role: str) -> dict[str, Any]:
    """A request of SGLang's router, as vLLM's connector knows it. Raises `ValueError` for one that cannot be handed over."""
    host, port, room = (given.pop(name, None) for name in FIELDS)
    if isinstance(room, list):
        raise ValueError("a batch of prompts in one request is not handed over: send them one by one")
    if not isinstance(room, int) or isinstance(room, bool) or not 0 <= room < 1 << 63:
        raise ValueError(f"'bootstrap_room' is {str(room)[:100]!r}, but must be a number from 0 to {(1 << 63) - 1}")
    if given.get("n", 1) not in (1, None):
        raise ValueError("several answers to one prompt (n) are not handed over between two kinds of engines")
    if role == "kv_producer":
        # The rest is D's. What it samples is the first token of the answer.
        params: dict[str, Any] = {"do_remote_decode": True, ROOM: room}
        for name in ("max_tokens", "max_completion_tokens"):
            if name in given or name == "max_tokens":
                given[name] = 1
        for name in ("min_tokens", "stop"):
            given.pop(name, None)
    elif role == "kv_consumer":
        params = {"do_remote_prefill": True, ROOM: room, "remote_host": host, "remote_port": port}
    else:
        raise ValueError(
            f"whether this server prefills or decodes is not known: its kv_role is {role!r}, and must be kv_producer or "
            "kv_consumer"
        )
    return {**given, "kv_transfer_params": params}


def _parsed(body: bytes) -> dict[str, Any] | None:
    """None for what is no object: the server says so itself."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) else None


def _role(scope: Any) -> str:
    transfer = getattr(scope["app"].state.args, "kv_transfer_config", None)
    return str(getattr(transfer, "kv_role", None))


def _server_info(scope: Any) -> dict[str, Any]:
    args = scope["app"].state.args
    names = getattr(args, "served_model_name", None) or [args.model]
    return {"model_path": args.model, "served_model_name": names[0], "dp_size": 1, "version": "kvferry"}


async def _read(receive: _Receive) -> bytes | None:
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > LARGEST:
            return None
        more = message.get("more_body", False)
    return b"".join(parts)


def _again(body: bytes, receive: _Receive) -> _Receive:
    """What was read, and then what comes: that the client has gone."""
    waiting = [body]

    async def read() -> _Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return read


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": f"kvferry: {message}", "type": "BadRequestError", "code": 400}}


async def _answer(send: _Send, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
