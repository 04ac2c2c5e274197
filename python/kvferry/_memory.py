"""Memory as every engine has it: allocations that tensors lie in, formats of numbers, and zeroes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ._core import facts

#: Names and sizes of formats, by what torch calls them.
FORMATS: dict[str, tuple[str, int]] = {
    f"torch.{called}": (name, int(it["bytes"]))
    for name, it in facts()["formats"].items()
    for called in it["names"]
}


class Regions:
    """The allocations that tensors lie in, each once."""

    def __init__(self, elsewhere: Mapping[int, int] | None = None) -> None:
        """`elsewhere` says of allocations that peers do not reach where they lie in host memory, too."""
        self.list: list[dict[str, Any]] = []
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


def whole(tensor: Any) -> Any:
    """All bytes of the allocation that a tensor lies in."""
    import torch

    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    made.set_(tensor.untyped_storage())
    return made


def zero(areas: Iterable[tuple[int, int]], storages: list[Any]) -> None:
    """Zeroes areas (address, length) of some allocations, in few launches: there may be one for every head of every layer."""
    import torch

    found = []
    for address, length in areas:
        for storage in storages:
            offset = address - storage.data_ptr()
            if 0 <= offset < storage.numel():
                found.append(storage[offset : offset + length])
                break
    if found:
        torch._foreach_zero_(found)
