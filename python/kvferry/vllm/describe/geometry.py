"""Where a layer's blocks lie: read from the tensors themselves (addresses and strides), so that any
layout is just strides."""

from __future__ import annotations

from typing import Any

from ..._memory import Regions
from .specs import Fact


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
