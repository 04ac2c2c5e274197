"""Several answers to one prompt: one of them reads, and the others get what it has read before it goes on."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: vLLM makes a request of each answer, and numbers them.
_NUMBERED = re.compile(r"\d+_")
#: Seconds in which the others of a numbered request come: they are sent one right after the other.
ALL_THERE = 0.005


def may_come(request: str, age: float) -> bool:
    """Whether to wait for others of its kind: who comes after the first has read computes the prompt."""
    return age < ALL_THERE and _NUMBERED.match(request) is not None


def prompt_of(request: str) -> str | None:
    """What all answers to one prompt have in common; None for a request that is not numbered."""
    number = _NUMBERED.match(request)
    return request[number.end() :] if number is not None else None


@dataclass
class Share:
    """What `reader` has loaded is for `request`, too: their tables, group by group."""

    reader: str
    request: str
    source: list[list[int]]
    destination: list[list[int]]


class Shares:
    """Copies inside of one rank's memory. They are made when a load has ended, before the engine hears of it:
    the first step that uses the reader's blocks changes its states."""

    def __init__(self, kv_cache_config: Any) -> None:
        self._cache = kv_cache_config
        self._layers: list[list[Any]] = []
        self._waiting: dict[str, list[Share]] = {}
        #: Loads that ended well a moment ago. An order that was given before the scheduler heard of it finds
        #: the blocks as they were loaded: the reader's first step is ordered later.
        self._done: deque[str] = deque(maxlen=64)

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """The tensors of each group's layers, block by block."""
        groups = [self._cache.kv_cache_groups[group] for group in self._cache.transfer_group_ids]
        self._layers = [[kv_caches[layer] for layer in group.layer_names] for group in groups]

    def order(self, share: Share, loading: bool) -> bool | None:
        """Whether it is done, or cannot be; None while the reader loads."""
        if loading:
            self._waiting.setdefault(share.reader, []).append(share)
            return None
        if share.reader not in self._done:
            return False
        self._copy(share)
        return True

    def loaded(self, reader: str) -> list[str]:
        """A load has ended well: who else has all of it now."""
        self._done.append(reader)
        shares = self._waiting.pop(reader, [])
        for share in shares:
            self._copy(share)
        return [share.request for share in shares]

    def failed(self, reader: str) -> list[str]:
        """A load has not: who goes without."""
        return [share.request for share in self._waiting.pop(reader, [])]

    def forget(self, request: str) -> bool:
        """Whether a request was still waiting for its copy; then it never gets one."""
        for shares in self._waiting.values():
            for share in shares:
                if share.request == request:
                    shares.remove(share)
                    return True
        return False

    def _copy(self, share: Share) -> None:
        for layers, source, destination in zip(
            self._layers, share.source, share.destination, strict=True
        ):
            # What both found in the cache is one block, and a window has none where it has moved on.
            pairs = [
                (there, here)
                for there, here in zip(source, destination, strict=False)
                if there and here and there != here
            ]
            for tensor in layers if pairs else ():
                blocks = tensor.unflatten(0, (self._cache.num_blocks, -1))
                blocks[[here for _, here in pairs]] = blocks[[there for there, _ in pairs]]
