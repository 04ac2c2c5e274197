"""What one engine hands to another through a router or a client, in `kv_transfer_params`: vLLM's own
contract, and our part of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from . import origin
from .origin import Facts

#: Where our part lies.
KEY = "kvferry"


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

    @classmethod
    def read(cls, params: dict[str, Any]) -> Offer:
        """Raises `ValueError` for what can be of no use. The workers look into the tables."""
        ours = params.get(KEY)
        if ours is None:
            raise ValueError(f"there is no '{KEY}' in them: the other engine does not run FerryConnector")
        if not isinstance(ours, dict):
            raise ValueError(_wrong(KEY, ours, "an object"))
        return cls(
            _field(ours, "ticket", dict, f"{KEY}.ticket"),
            _field(ours, "tokens", int, f"{KEY}.tokens"),
            _field(params, "remote_block_ids", (list, tuple), "remote_block_ids"),
            _field(ours, "first", list, f"{KEY}.first"),
            None if ours.get("hash") is None else _field(ours, "hash", str, f"{KEY}.hash"),
            origin.read(ours.get("prompt")),
        )

    def write(
        self, request: str, address: str, tp: int, pp: int, push: bool = False
    ) -> dict[str, Any]:
        """`push` tells routers to send later requests to both engines at once."""
        host, _, port = address.rpartition(":")
        answered = self.hash is not None
        return {
            # As the next engine takes it: D decodes from it, or P continues from an answer of D's.
            "do_remote_prefill": not answered,
            "do_remote_decode": answered,
            "remote_block_ids": self.blocks,
            "remote_engine_id": self.ticket["engine"],
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

    @classmethod
    def read(cls, params: dict[str, Any]) -> Source | None:
        """None for other parameters. Raises `ValueError` for what can be of no use."""
        if params.get(KEY) is not None or params.get("remote_block_ids"):
            return None
        if not all(params.get(f"remote_{name}") for name in ("engine_id", "host", "port", "request_id")):
            return None
        host = _field(params, "remote_host", str, "remote_host")
        port = _field(params, "remote_port", int, "remote_port")
        engine = _field(params, "remote_engine_id", str, "remote_engine_id")
        return cls(engine, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


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

_NAMES = {dict: "an object", list: "a list", (list, tuple): "a list", int: "a whole number", str: "text"}


def _field(given: dict[str, Any], name: str, kind: Any, path: str) -> Any:
    value = given.get(name)
    if value is None:
        raise ValueError(f"'{path}' is missing; a router must pass all parameters on unchanged")
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(_wrong(path, value, _NAMES[kind]))
    return value


def _wrong(path: str, value: Any, wanted: str) -> str:
    said = repr(value)
    if len(said) > 60:
        said = f"{said[:60]}…"
    return f"'{path}' is {said}, but must be {wanted}; a router must pass all parameters on unchanged"
