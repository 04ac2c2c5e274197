"""Caches that no transport reaches: beside them lies a buffer in host memory with a place for every block, and
bytes go through it. Peers see the buffer: its facts are those of the cache, at other addresses.

vLLM calls it `kv_buffer_device`, and gives connectors the function that copies blocks. P copies what a step has
written at the end of that step, before the scheduler can grant it to anybody; D copies what it has read before
the engine hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .describe import specs

Tables = list[list[int]]
#: From tensors by layer to others, blocks to other blocks: "h2d" to the device, "d2h" from it.
Copy = Callable[[dict[str, Any], dict[str, Any], list[int], list[int], str], None]


def is_wanted(vllm_config: Any) -> bool:
    """Whether the engine is told to hand over through host memory, and its cache is elsewhere."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if getattr(transfer, "kv_buffer_device", None) != "cpu":
        return False
    return device_of(vllm_config) != "cpu"


def device_of(vllm_config: Any) -> str:
    """The kind of device that the engine computes on, wherever its cache is."""
    return str(getattr(getattr(vllm_config, "device_config", None), "device_type", "cpu"))


class HostBuffer:
    """In a worker: host memory of the same size and layout as the cache."""

    def __init__(self, kv_cache_config: Any, kv_caches: Mapping[str, Any], pinned: bool) -> None:
        self._blocks: int = kv_cache_config.num_blocks
        groups = [kv_cache_config.kv_cache_groups[at] for at in kv_cache_config.transfer_group_ids]
        self._groups = [list(group.layer_names) for group in groups]
        self._device = dict(kv_caches)
        #: By the address of a device's allocation.
        self._storages: dict[int, Any] = {}
        self._host = {name: self._mirror(tensor, pinned) for name, tensor in kv_caches.items()}
        #: The engine's own, as soon as it has given it.
        self.copy: Copy | None = None

    def _mirror(self, tensor: Any, pinned: bool) -> Any:
        storage = tensor.untyped_storage()
        host = self._storages.get(storage.data_ptr())
        if host is None:
            host = torch.zeros(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            self._storages[storage.data_ptr()] = host
        same = torch.empty(0, dtype=tensor.dtype)
        same.set_(host.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return same

    @property
    def storages(self) -> list[Any]:
        return list(self._storages.values())

    @property
    def addresses(self) -> dict[int, int]:
        """Where each allocation of the device lies in host memory."""
        return {device: host.data_ptr() for device, host in self._storages.items()}

    def save(self, tables: Tables) -> None:
        """What the device has written to these blocks."""
        self._move(tables, self._device, self._host, "d2h")

    def load(self, tables: Tables) -> None:
        """What has been read into these blocks."""
        self._move(tables, self._host, self._device, "h2d")

    def _move(self, tables: Tables, source: Any, destination: Any, direction: str) -> None:
        if self.copy is None:
            raise RuntimeError(
                "kv_buffer_device is 'cpu', but vLLM has not said how to copy blocks to and from the device"
            )
        for layers, table in zip(self._groups, tables, strict=True):
            blocks = [block for block in table if block]
            # Kernels may divide blocks, and each layer's in its own way.
            by_parts: dict[int, list[str]] = {}
            for layer in layers if blocks else ():
                by_parts.setdefault(self._device[layer].shape[0] // self._blocks, []).append(layer)
            for parts, names in by_parts.items():
                ids = [block * parts + part for block in blocks for part in range(parts)]
                self.copy(
                    {name: source[name] for name in names},
                    {name: destination[name] for name in names},
                    ids,
                    ids,
                    direction,
                )


class Saves:
    """In the scheduler: which blocks a step writes that another engine may read."""

    def __init__(self, kv_cache_config: Any) -> None:
        self._cache = kv_cache_config
        #: By request, how often it was started over, and its blocks that are saved for good.
        self._saved: dict[str, tuple[int, list[int]]] = {}

    def of_step(self, requests: Mapping[str, Any], scheduled: Mapping[str, int], manager: Any) -> list[Tables]:
        """The blocks of requests that are prefilled for others, by request. What P found in its own cache
        may never have been saved: the first time it is all of them."""
        self._saved = {name: it for name, it in self._saved.items() if name in requests}
        return [
            self._of(requests[name], tokens, manager)
            for name, tokens in scheduled.items()
            if name in requests
        ]

    def _of(self, request: Any, tokens: int, manager: Any) -> Tables:
        name, groups = request.request_id, self._cache.transfer_group_ids
        times, done = self._saved.get(name, (request.num_preemptions, [0] * len(groups)))
        if times != request.num_preemptions:
            done = [0] * len(groups)
        ids = manager.get_block_ids(name)
        tables, whole = [], []
        for at, index in enumerate(groups):
            tables.append(list(ids[index])[done[at] :])
            spec = self._cache.kv_cache_groups[index].kv_cache_spec
            size = manager.coordinator.single_type_managers[index].block_size
            # A state changes with every step, wherever it lies.
            grows = not specs.is_state_group(spec)
            whole.append((request.num_computed_tokens + tokens) // size if grows else 0)
        self._saved[name] = (request.num_preemptions, whole)
        return tables


def landing(tables: Tables, cached: list[int], sizes: list[int]) -> Tables:
    """The blocks of a load that something is read into: not those that were held already."""
    return [
        table[held // size :] for table, held, size in zip(tables, cached, sizes, strict=True)
    ]
