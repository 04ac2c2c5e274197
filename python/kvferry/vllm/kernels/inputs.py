"""What kernels are asked with: numbers, slots, and a layer that keeps them."""

from __future__ import annotations

import copy
import sys
from functools import lru_cache
from typing import Any

from .probe import CannotAsk

#: States by name, with the lengths of their axes.
Lengths = dict[str, tuple[int, ...]]


def only(lengths: Lengths, *known: set[str]) -> None:
    """There are ways to ask for these states alone."""
    if set(lengths) not in known:
        raise unknown(lengths)


def unknown(lengths: Lengths) -> CannotAsk:
    return CannotAsk(f"there is no way yet to call the kernels that write {', '.join(lengths)}")


def with_cache(module: Any, cache: Any) -> Any:
    """A layer whose cache is `cache`, and all else the running one's."""
    layer = copy.copy(module)
    layer.bind_kv_cache(cache)
    return layer


def without_views(impl: Any, cache: Any) -> Any:
    """A back end's half of a layer, without what it may have kept of the running engine's cache."""
    import torch

    def memory(tensor: Any) -> int:
        return int(tensor.untyped_storage().data_ptr()) if isinstance(tensor, torch.Tensor) else 0

    fresh = copy.copy(impl)
    if (real := memory(cache)) != 0:
        for name, value in list(vars(fresh).items()):
            if memory(value) == real:
                delattr(fresh, name)
    return fresh


def namespace(layer: Any) -> Any:
    """The file of a layer's class: it calls kernels by the names that it has there."""
    return sys.modules[type(layer).__module__]


@lru_cache(maxsize=4)
def numbers(shape: tuple[int, ...], device: Any) -> Any:
    """The same numbers each time: uneven, of both signs, and far from zero."""
    import torch

    count = 1
    for length in shape:
        count *= length
    index = torch.arange(count, device=device)
    sizes = 1 + (index * 7 % 5).float() / 4
    return (sizes * (1 - 2 * ((index * 3 // 2) % 2))).view(shape)


def spread(signs: Any, shape: tuple[int, ...]) -> Any:
    """Signs along all axes of `shape`, of which the last may be one record."""
    return signs if signs.dim() == len(shape) else signs.unsqueeze(-1).expand(shape)


def slots_of(first: int, count: int, device: Any) -> Any:
    import torch

    return torch.arange(first, first + count, dtype=torch.int64, device=device)


def int32(values: list[int], device: Any) -> Any:
    import torch

    return torch.tensor(values, dtype=torch.int32, device=device)
