"""What a user can set in `kv_connector_extra_config`."""

from __future__ import annotations

from dataclasses import dataclass

from .. import _options
from .._options import Advanced, option, ports_of

__all__ = ["Advanced", "Options"]


@dataclass(frozen=True)
class Options(_options.Options):
    WHERE = "kv_connector_extra_config"
    NAMED_BY = ", VLLM_HOST_IP may name it"

    #: The port to listen on; 0 is any free one. Data-parallel engines count up from it.
    port: int = option(0, least=0, most=65535)
    #: The share of P's blocks that may be kept for D at once; beyond it P hands nothing over. By default all of them: where D
    #: is slow, requests wait, and none fails.
    lease_share: float = option(1.0, least=0.01, most=1)
    #: Whether P tells the router to send requests to both engines at once, and D reads while P computes:
    #: `auto` is `always`, but for data-parallel engines, one of which a router cannot tell D in advance.
    push: str = option("never", one_of=("auto", "always", "never"))
    #: Seconds that D keeps the blocks of an answer, for P to continue from in the next turn; 0: not at
    #: all.
    next_turn_seconds: float = option(0.0, least=0)
    #: The signal to the engine's process that drains it, as `kvferry drain` does.
    drain_signal: str = option("none", one_of=("SIGUSR1", "SIGUSR2", "none"))
    #: Whether D also reads from engines with vLLM's own NixlConnector, which cannot confirm: their
    #: `kv_lease_duration`, in seconds (vLLM's default is 30). D's cache then has their layout. 0: not at all.
    nixl_connector_lease_seconds: float = option(0.0, least=0)
    #: `shared`: both engines run the same draft model, and its states move with the others. `own`: the other
    #: engine runs none, or another one; nothing of the draft moves.
    draft: str = option("shared", one_of=("shared", "own"))
    #: Where to send a trace of every request, with OpenTelemetry: `off`, the address of a collector
    #: (`http://HOST:4317`), or `auto`: where vLLM sends its own (`--otlp-traces-endpoint`), if it does.
    trace: str = option("off", one_of=("off", "auto"), prefixes=("http://", "https://"))

    def _own_address(self) -> str:
        from vllm.utils.network_utils import get_ip

        return str(get_ip())

    def port_of(self, engine: int) -> int:
        """The port of one of several data-parallel engines."""
        port = self.port + engine if self.port else 0
        if port > 65535:
            most = 65535 - engine
            raise self.error(
                "port", self.port, f"{most} or less: data-parallel engine {engine} listens on port {port}"
            )
        ranks = ports_of(self.data_ports) if self.data_ports else None
        # A rank may come first, and take it.
        if ranks and ranks[0] <= port <= ranks[1]:
            wanted = f"other ports than {port}, which 'port' stands for in engine {engine}"
            raise self.error("data_ports", self.data_ports, wanted)
        return port
