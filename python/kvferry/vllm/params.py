"""What one engine hands to another through a router or a client, in `kv_transfer_params`: vLLM's own
contract, and our part of it."""

from __future__ import annotations

import re
import reprlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .scheduler.origin import Facts

#: Where our part lies.
KEY = "kvferry"
#: The number that SGLang's router has given to a request. With it alone, and the other engine's address, that is all there is.
ROOM = "kvferry_room"

#: Characters of a request's name that is handed over. A client chooses most of it (`X-Request-Id`), and every message
#: about the request carries it.
LONGEST_NAME = 512
#: Characters of any other text, block tables of one engine, and how deep and how large what other connectors pass on
#: may be: msgpack lets more levels through than the queue to an engine's workers survives.
_LONGEST_TEXT, _MOST_TABLES, _DEEPEST, _MOST_VALUES = 1024, 256, 8, 10_000


@dataclass(frozen=True)
class Offer:
    """A request's blocks on the engine that has computed it, and the ticket to read them."""

    ticket: dict[str, Any]
    #: Tokens that have been computed.
    tokens: int
    #: A table for each of that engine's groups, and the position that each table starts with.
    blocks: Any
    first: Any
    #: What the tokens of an answer are known by, which P reads for the next turn.
    hash: str | None = None
    #: What the blocks depend on beside the model, as far as the other engine says it.
    prompt: Facts = field(default_factory=dict)
    #: Why the tokens and tables cannot be read, if so: the request ends as the user chose for loads that fail, and the
    #: other engine is told that nobody comes.
    wrong: str | None = None

    @classmethod
    def read(cls, params: dict[str, Any]) -> Offer:
        """From what `admit` has let in. Raises `ValueError` for what can be of no use. The workers look into the
        tables."""
        ours = params.get(KEY)
        if ours is None:
            raise ValueError(f"there is no '{KEY}' in them: the other engine does not run FerryConnector")
        return cls(
            needed(ours, "ticket", f"{KEY}.ticket"),
            needed(ours, "tokens", f"{KEY}.tokens"),
            needed(params, "remote_block_ids", "remote_block_ids"),
            needed(ours, "first", f"{KEY}.first"),
            ours.get("hash"),
            ours.get("prompt", {}),
            ours.get("wrong"),
        )

    def write(
        self, request: str, address: str, tp: int, pp: int, push: bool = False, seal: str | None = None
    ) -> dict[str, Any]:
        """`push` tells routers to send later requests to both engines at once. `seal` is the engine's word for its
        address, which goes with the one text that such a router passes on."""
        host, _, port = address.rpartition(":")
        answered = self.hash is not None
        engine = self.ticket["engine"]
        return {
            # As the next engine takes it: D decodes from it, or P continues from an answer of D's.
            "do_remote_prefill": not answered,
            "do_remote_decode": answered,
            "remote_block_ids": self.blocks,
            "remote_engine_id": engine if seal is None else f"{engine}~{seal}",
            "remote_request_id": request,
            "remote_host": host.strip("[]"),
            "remote_port": int(port),
            "tp_size": tp,
            "pp_size": pp,
            "remote_num_tokens": self.tokens,
            **({"transfer_mode": "push"} if push else {}),
            KEY: {"ticket": self.ticket, "tokens": self.tokens, "first": self.first}
            | ({"hash": self.hash} if answered else {})
            | ({"prompt": self.prompt} if self.prompt else {}),
        }


@dataclass(frozen=True)
class Source:
    """The engine that computes a request, where a router has sent it to both at once: everything else is
    to be asked for there."""

    engine: str
    address: str
    #: The engine's word for its address, where it has given one.
    seal: str | None = None
    #: What SGLang's router calls the request.
    room: int | None = None

    @classmethod
    def read(cls, params: dict[str, Any]) -> Source | None:
        """From what `admit` has let in; None for other parameters."""
        if (room := params.get(ROOM)) is not None:
            host, port = (needed(params, name, name) for name in ("remote_host", "remote_port"))
            return cls("", f"[{host}]:{port}" if ":" in host else f"{host}:{port}", room=room)
        if params.get(KEY) is not None or params.get("remote_block_ids"):
            return None
        if not all(params.get(f"remote_{name}") for name in ("engine_id", "host", "port", "request_id")):
            return None
        host, port = params["remote_host"], params["remote_port"]
        engine, seal = params["remote_engine_id"], None
        if (sealed := _SEALED.fullmatch(engine)) is not None:
            engine, seal = sealed.groups()
        return cls(engine, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", seal)


_SEALED = re.compile(r"(.*)~([0-9a-f]{32})")


def shared_name(request: str, tokens: int, origin: bytes | None) -> str:
    """The name of a request that two engines have in common: vLLM makes its own from the one that the
    router has given to it, and adds eight digits. With it goes what they must agree on, a number of
    tokens: a state is of use after so many only.

    Requests to `/v1/responses` are named by each server for itself, whatever the router says. What they
    have in common is the prompt: of several with the same one, any will do."""
    if request.startswith("resp_") and origin is not None:
        return f"resp:{origin.hex()}:{tokens}"
    return f"{stem(request)}:{tokens}"


def stem(request: str) -> str:
    """A request's name without what vLLM has added to it."""
    return _ADDED.sub("", request)


_ADDED = re.compile(r"-[0-9a-f]{8}$")


def needed(given: dict[str, Any], name: str, path: str) -> Any:
    value = given.get(name)
    if value is None:
        raise ValueError(f"'{path}' is missing; a router must pass all parameters on unchanged")
    return value


def shown(request: str) -> str:
    """The name of a request for a message, whatever a client has put into it."""
    return request if len(request) <= LONGEST_NAME and request.isprintable() else _SAYS.repr(request)


def check_name(request: str) -> None:
    """Raises `ValueError` for a request whose name is not one to find it by, nor to write to a log."""
    if len(request) > LONGEST_NAME:
        raise ValueError(f"its name has {len(request)} characters, and {LONGEST_NAME} are the most (X-Request-Id)")
    if not request.isprintable():
        raise ValueError("its name has characters that cannot be printed (X-Request-Id)")


def admit(params: Any, tokens: int) -> dict[str, Any]:
    """What a client has handed in, as values of our own: flat, and no longer than an engine of so many `tokens` can
    hold. Nothing of the client's objects is left in it. Raises `ValueError` for what is none of ours; what other
    connectors pass on is copied as it is, as long as it is small."""
    if not isinstance(params, dict):
        raise ValueError(_wrong("kv_transfer_params", params, "an object"))
    left = [_MOST_VALUES]
    admitted: dict[str, Any] = {}
    for name, value in params.items():
        if value is None or name == _TABLES:
            continue
        path = _text(name, "a name in kv_transfer_params", tokens)
        read = _FIELDS.get(path)
        admitted[path] = read(value, path, tokens) if read is not None else _copy(value, path, _DEEPEST, left)
    if KEY not in admitted:
        if (tables := params.get(_TABLES)) is not None:
            admitted[_TABLES] = _tables(tables, _TABLES, tokens)
        return admitted
    ours, given = admitted[KEY], params[KEY]
    try:
        # Tokens that cannot be are more than there can be.
        ours["tokens"] = tokens
        ours["tokens"] = _present(given, "tokens", f"{KEY}.tokens", _number(1), tokens)
        tables = _present(params, _TABLES, _TABLES, _tables, tokens)
        first = _present(given, "first", f"{KEY}.first", _positions, tokens)
        if first is not None and tables is not None and len(first) != len(tables):
            raise Unreadable(
                f"'{KEY}.first' has {len(first)} entries, but there are {len(tables)} tables in '{_TABLES}'; "
                "a router must pass all parameters on unchanged"
            )
    except Unreadable as error:
        ours["wrong"], tables, first = str(error), [], []
    admitted[_TABLES], ours["first"] = tables, first
    return admitted


_TABLES = "remote_block_ids"


class Unreadable(ValueError):
    """Tokens or tables that cannot be."""


def _present(given: dict[str, Any], name: str, path: str, read: _Reader, tokens: int) -> Any:
    return None if (value := given.get(name)) is None else read(value, path, tokens)


def to_be_handed_over(params: Any) -> dict[str, Any]:
    """What is left of parameters that are of no other use: whether another engine will answer."""
    wanted = isinstance(params, dict) and bool(params.get("do_remote_decode"))
    return {"do_remote_decode": True} if wanted else {}


#: Reads a value that stands at a path, for an engine of so many tokens.
_Reader = Callable[[Any, str, int], Any]


def _flag(value: Any, path: str, tokens: int) -> bool:
    return bool(value)


def _text(value: Any, path: str, tokens: int) -> str:
    if not isinstance(value, str):
        raise ValueError(_wrong(path, value, "text"))
    if len(value) > _LONGEST_TEXT:
        raise ValueError(_wrong(path, value, f"text of at most {_LONGEST_TEXT} characters"))
    if not value.isprintable():
        raise ValueError(_wrong(path, value, "text that can be printed"))
    return str(value)


def _digits(count: int, least: int | None = None) -> _Reader:
    form = re.compile(f"[0-9a-f]{{{least or count},{count}}}")

    def read(value: Any, path: str, tokens: int) -> str:
        if not isinstance(value, str):
            raise ValueError(_wrong(path, value, "text"))
        if form.fullmatch(value) is None:
            raise ValueError(_wrong(path, value, f"{count} hexadecimal digits"))
        return str(value)

    return read


def _number(least: int, most: int | None = None) -> _Reader:
    """A whole number; no more than the tokens that the engine can hold, where nothing else is said."""

    def read(value: Any, path: str, tokens: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(_wrong(path, value, "a whole number"))
        bound = tokens if most is None else most
        if not least <= value <= bound:
            raise Unreadable(_wrong(path, value, f"from {least} to {bound}"))
        return int(value)

    return read


def _tables(value: Any, path: str, tokens: int) -> list[array[int]]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(_wrong(path, value, "a list"))
    if len(value) > _MOST_TABLES:
        raise Unreadable(_wrong(path, value, f"at most {_MOST_TABLES} tables"))
    for table in value:
        if not isinstance(table, (list, tuple, array)):
            raise Unreadable(_wrong(path, table, "a list of block ids for each group"))
    # A block has a token at least, and few engines have more than four groups of such blocks.
    count, most = sum(len(table) for table in value), 4 * tokens + 4096
    if count > most:
        raise Unreadable(f"'{path}' names {count} blocks, but {most} are the most for {tokens} tokens")
    try:
        return [array("I", table) for table in value]
    except (TypeError, OverflowError) as error:
        raise Unreadable(f"'{path}' has something in it that is no block id: {reprlib.repr(str(error))}") from None


def _positions(value: Any, path: str, tokens: int) -> list[int]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(_wrong(path, value, "a list"))
    if len(value) > _MOST_TABLES:
        raise Unreadable(_wrong(path, value, f"a list of at most {_MOST_TABLES} positions"))
    read = _number(0)
    try:
        return [read(position, path, tokens) for position in value]
    except ValueError as error:
        raise Unreadable(str(error)) from None


def _object(fields: dict[str, _Reader]) -> _Reader:
    """An object of which only these fields mean anything."""

    def read(value: Any, path: str, tokens: int) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(_wrong(path, value, "an object"))
        given = ((name, value.get(name), reader) for name, reader in fields.items())
        return {name: reader(it, f"{path}.{name}", tokens) for name, it, reader in given if it is not None}

    return read


#: The context of a trace, beside what it is about.
_TRACE: dict[str, _Reader] = {"traceparent": _text, "tracestate": _text}

_FIELDS: dict[str, _Reader] = {
    "do_remote_prefill": _flag,
    "do_remote_decode": _flag,
    "remote_engine_id": _text,
    "remote_request_id": _text,
    "remote_host": _text,
    "remote_port": _number(1, 65535),
    "tp_size": _number(1, 1 << 16),
    "pp_size": _number(1, 1 << 16),
    "dcp_size": _number(1, 1 << 16),
    "remote_num_tokens": _number(0),
    "remote_registration_generation": _number(0),
    "transfer_mode": _text,
    ROOM: _number(0, (1 << 63) - 1),
    KEY: _object(
        {
            "ticket": _object(
                {
                    "engine": _text,
                    "address": _text,
                    "incarnation": _digits(16, 1),
                    "request": _text,
                    "nonce": _digits(16, 1),
                    "term_ms": _number(1, 1 << 32),
                    "epoch": _number(0, (1 << 32) - 1),
                    "seal": _digits(32),
                }
            ),
            "hash": _digits(32),
            "prompt": _object({name: _digits(16) for name in ("tokens", "embeddings", "adapter", "salt", "media")}),
            **_TRACE,
        }
    ),
    **_TRACE,
}


def _copy(value: Any, path: str, deep: int, left: list[int]) -> Any:
    """The same value in objects of our own, if it is small."""
    left[0] -= 1
    if left[0] < 0:
        raise ValueError(f"'{path}' and what else is not known here are more than {_MOST_VALUES} values")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (str, bytes)):
        if len(value) > _LONGEST_TEXT:
            raise ValueError(_wrong(path, value, f"at most {_LONGEST_TEXT} characters long"))
        return value
    if deep == 0:
        raise ValueError(f"'{path}' is nested more than {_DEEPEST} levels deep")
    if isinstance(value, dict):
        if not all(isinstance(name, str) and len(name) <= _LONGEST_TEXT for name in value):
            raise ValueError(_wrong(path, value, f"an object with names of at most {_LONGEST_TEXT} characters"))
        return {name: _copy(it, path, deep - 1, left) for name, it in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(it, path, deep - 1, left) for it in value]
    raise ValueError(_wrong(path, value, "of JSON"))


def _wrong(path: str, value: Any, wanted: str) -> str:
    said = _SAYS.repr(value)
    return f"'{path}' is {said}, but must be {wanted}; a router must pass all parameters on unchanged"


_SAYS = reprlib.Repr()
_SAYS.maxlevel, _SAYS.maxlong = 2, 24
