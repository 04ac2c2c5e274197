"""What P hands to D through a router, in `kv_transfer_params`: vLLM's own contract, and our part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Where our part lies.
KEY = "kvferry"


@dataclass(frozen=True)
class Offer:
    """A request's blocks on P, and the ticket to read them."""

    ticket: dict[str, Any]
    #: Tokens that P has computed.
    tokens: int
    #: A table for each of P's groups, and the position that each table starts with.
    blocks: Any
    first: Any

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
        )

    def write(self, request: str, address: str, tp: int, pp: int) -> dict[str, Any]:
        host, _, port = address.rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": self.blocks,
            "remote_engine_id": self.ticket["engine"],
            "remote_request_id": request,
            "remote_host": host.strip("[]"),
            "remote_port": int(port),
            "tp_size": tp,
            "pp_size": pp,
            "remote_num_tokens": self.tokens,
            KEY: {"ticket": self.ticket, "tokens": self.tokens, "first": self.first},
        }


_NAMES = {dict: "an object", list: "a list", (list, tuple): "a list", int: "a whole number"}


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
