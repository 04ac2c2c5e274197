"""Where a layer's blocks lie: read from the tensors themselves (addresses and strides), so that any
layout is just strides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .specs import Fact


class Regions:
    """The allocations that tensors lie in, each once."""

    def __init__(self, elsewhere: Mapping[int, int] | None = None) -> None:
        """`elsewhere` says of allocations that peers do not reach where they lie in host memory, too."""
        self.list: list[Fact] = []
        self._elsewhere = elsewhere or {}
        self._known: dict[tuple[int, int], int] = {}

    def index(self, tensor: Any) -> int:
        storage, device = tensor.untyped_storage(), tensor.device
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._known:
            self._known[key] = len(self.list)
            base = self._elsewhere.get(key[0])
            place = "host" if base or device.type == "cpu" else {"gpu": device.index or 0}
            self.list.append({"base": base or key[0], "bytes": key[1], "place": place})
        return self._known[key]


class View:
    """Where a layer's blocks lie: a tensor of [blocks, heads, tokens, content]."""

    def __init__(self, regions: Regions, tensor: Any, blocks: int) -> None:
        size = tensor.element_size()
        block, head, token, content = (stride * size for stride in tensor.stride())
        if content != size and tensor.shape[3] > 1:
            raise ValueError(f"a cache tensor's content must be dense, not {content} bytes apart")
        self.region = regions.index(tensor)
        self.offset: int = tensor.storage_offset() * size
        parts = tensor.shape[0] // blocks
        self.block: int = block * parts
        self.kernel: Fact | None = None
        if parts > 1:
            self.kernel = {"entries": tensor.shape[2], "stride": block}
        self.head: int = head
        self.token: int = token

    def whole(self, tensor: Any) -> Fact:
        """All that the layer keeps in a block, as scratch: memory of which nothing is said."""
        parts = [] if self.kernel is None else [[self.block // self.kernel["stride"], self.kernel["stride"]]]
        return {
            "region": self.region,
            "offset": self.offset,
            "block": self.block,
            "run": tensor.shape[3] * tensor.element_size(),
            "dims": [*parts, [tensor.shape[1], self.head], [tensor.shape[2], self.token]],
        }

    def at(
        self,
        offset: int,
        axes: list[int],
        token: int | None = None,
        tile: tuple[int, int] = (0, 0),
    ) -> Fact:
        kernel = self.kernel
        if tile[0]:
            kernel = {"entries": tile[0], "stride": tile[1]}
        return {
            "region": self.region,
            "offset": self.offset + offset,
            "block": self.block,
            "kernel": kernel,
            "entry": self.token if token is None else token,
            "axes": axes,
        }
