"""What a user can set in `kv_connector_extra_config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Options:
    #: `local` (one host), `tcp` (any network) or `nixl` (RDMA, NVLink, GPU memory). Left out: `nixl`
    #: for caches on a GPU, `tcp` for others.
    transport: str | None = None
    #: The address to listen on.
    host: str = "127.0.0.1"
    #: The port to listen on; 0 is any free one. Data-parallel engines count on from it.
    port: int = 0
    #: The host to give to peers, where it is not the one to listen on.
    advertise: str | None = None
    #: The file that holds the key that both sides share.
    key_file: str | None = None
    #: Serve whoever reaches the address.
    insecure: bool = False
    #: Seconds that P keeps a request's blocks without hearing from D.
    lease: float = 30.0
    #: Seconds that D may take to shake hands with a new engine.
    handshake: float = 10.0
    #: Seconds that a request may take to load, once its blocks are there.
    deadline: float = 60.0
    #: Seconds that D keeps a waiting request's blocks alive on P.
    patience: float = 480.0
    #: Requests that a rank reads at once.
    concurrent: int = 64

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """Checks every option; an error names it and what is valid."""
        known = {field.name: field for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean '{near[0]}'? " if near else ""
                raise ValueError(
                    f"kv_connector_extra_config has no option '{name}': {hint}the options are "
                    f"{', '.join(sorted(known))}"
                )
            default = known[name].default
            wanted = (str, type(None)) if default is None else (type(default),)
            if isinstance(default, float) and isinstance(value, int):
                continue
            if not isinstance(value, wanted) or (isinstance(value, bool) and default is not False):
                raise ValueError(
                    f"the option '{name}' of kv_connector_extra_config is {value!r}, which should "
                    f"be {' or '.join('nothing' if t is type(None) else t.__name__ for t in wanted)}"
                )
        made = cls(**given)
        if made.transport not in (None, "local", "tcp", "nixl"):
            raise ValueError(f"the option 'transport' is local, tcp or nixl, not {made.transport!r}")
        return made

    def trust(self) -> dict[str, Any]:
        return {"key_file": self.key_file, "insecure": self.insecure}

    def bind(self, port: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{port}"
