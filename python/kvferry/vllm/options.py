"""What a user can set in `kv_connector_extra_config`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

_WHERE = "of kv_connector_extra_config"


def _option(default: Any, **valid: Any) -> Any:
    """`least` and `most` for numbers, `one_of` for words."""
    return field(default=default, metadata=valid)


@dataclass(frozen=True)
class Options:
    #: `local` (one host), `tcp` (any network) or `nixl` (RDMA, NVLink, GPU memory). Left out: `nixl`
    #: for caches on a GPU, `tcp` for others.
    transport: str | None = _option(None, one_of=("local", "tcp", "nixl"))
    #: The address to listen on.
    host: str = _option("127.0.0.1")
    #: The port to listen on; 0 is any free one. Data-parallel engines count on from it.
    port: int = _option(0, least=0, most=65535)
    #: The host to give to peers, where it is not the one to listen on.
    advertise: str | None = _option(None)
    #: The file that holds the key that both sides share.
    key_file: str | None = _option(None)
    #: Serve whoever reaches the address.
    insecure: bool = _option(False)
    #: Seconds that P keeps a request's blocks without hearing from D.
    lease: float = _option(30.0, least=0.02)
    #: Seconds that D may take to shake hands with a new engine.
    handshake: float = _option(10.0, least=1e-3)
    #: Seconds that a request may take to load, from when D has blocks for it.
    deadline: float = _option(60.0, least=1e-3)
    #: Seconds that D keeps a waiting request's blocks alive on P.
    patience: float = _option(480.0, least=1e-3)
    #: Requests that a rank reads at once.
    concurrent: int = _option(64, least=1)
    #: What to log: `debug` also says where each request's time went.
    logging: str = _option("info", one_of=("off", "error", "warning", "info", "debug"))

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """Checks every option; an error names it and what is valid."""
        known = {option.name: option for option in fields(cls)}
        for name, value in given.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean '{near[0]}'? " if near else ""
                raise ValueError(
                    f"kv_connector_extra_config has no option '{name}': {hint}the options are "
                    f"{', '.join(sorted(known))}"
                )
            wrong = _wrong(value, known[name].default, known[name].metadata)
            if wrong:
                raise ValueError(f"the option '{name}' {_WHERE} is {value!r}, which should be {wrong}")
        return cls(**given)

    def trust(self) -> dict[str, Any]:
        return {"key_file": self.key_file, "insecure": self.insecure}

    def bind(self, port: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{port}"


def _wrong(value: Any, default: Any, valid: Mapping[str, Any]) -> str | None:
    """What a value should be, if it is not."""
    if value is None and default is None:
        return None
    wanted = str if default is None else type(default)
    # In JSON 5 is as good as 5.0; and True is no number, although Python takes it for one.
    fits = isinstance(value, (int, float) if wanted is float else wanted)
    if not fits or (isinstance(value, bool) and wanted is not bool):
        return f"{wanted.__name__} or nothing" if default is None else wanted.__name__
    if "one_of" in valid and value not in valid["one_of"]:
        return f"one of {', '.join(valid['one_of'])}"
    least, most = valid.get("least", -math.inf), valid.get("most", math.inf)
    if "least" in valid and not (least <= value <= most and value < math.inf):
        return f"{least} or more" if most == math.inf else f"from {least} to {most}"
    return None
