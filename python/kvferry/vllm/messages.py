"""What an engine's scheduler and its workers tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from .siblings import Share
from .stock.wire import Introduction


@dataclass
class Card(KVConnectorHandshakeMetadata):
    """What a rank of the first pipeline stage, and the same one of each later stage, make known to other
    engines, through their scheduler."""

    cards: tuple[bytes, ...]


@dataclass
class Orders(KVConnectorMetadata):
    """What the scheduler tells the workers in one step."""

    #: Arguments of `Worker.load`.
    loads: list[dict[str, Any]] = field(default_factory=list)
    #: Where others read from a buffer in host memory: blocks that this step writes for them, by request.
    saves: list[list[list[int]]] = field(default_factory=list)
    #: And blocks of each load that are copied to the device when it is done.
    lands: dict[str, list[list[int]]] = field(default_factory=dict)
    #: Requests that get a copy of what another one loads.
    shares: list[Share] = field(default_factory=list)
    #: Loads that are no longer wanted.
    aborts: list[str] = field(default_factory=list)
    #: Loads that cannot even begin.
    refused: list[str] = field(default_factory=list)
    #: Engines without kvferry that the loads are the first from.
    introductions: list[Introduction] = field(default_factory=list)
    #: Requests of P whose blocks nobody reads any more.
    released: list[str] = field(default_factory=list)
    #: Whether this step may finish a prompt that another engine then reads.
    hands_over: bool = False
    #: By which number D knows this step; 0: it does not.
    step: int = 0
    #: The step computes nothing, so there is time to wait for what is being loaded.
    idle: bool = False
    #: The engine has its device write in this step: what it computes, zeros to blocks that it gives out, or copies of
    #: others.
    writes: bool = True
    #: Where requests are traced: the traces of those that are to be loaded.
    traces: dict[str, str] = field(default_factory=dict)


@dataclass
class Moved(KVConnectorWorkerMetadata):
    """What the workers tell the scheduler in one step: the loads that are done, and how many seconds each
    was on the wire, on the rank that took longest."""

    seconds: dict[str, float]
    #: Where requests are traced: what each rank did, and when.
    loads: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Moved:
        assert isinstance(other, Moved)
        for request, seconds in other.seconds.items():
            self.seconds[request] = max(seconds, self.seconds.get(request, 0.0))
        for request, loads in other.loads.items():
            self.loads.setdefault(request, []).extend(loads)
        return self
