"""Manifests for an engine with vLLM's stock NixlConnector: from what it says of its memory, and what D knows of the
model that both run.

It tells addresses, strides, block sizes and the layout. It does not tell which layer holds what: that is D's own
description, for as many ranks as P has, and it holds only where P's compatibility hash proves that both run the
same model in the same way. What neither tells is refused by name.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import socket
from collections.abc import Mapping, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

from ..._core import Manifest
from ..describe import specs
from ..describe.manifest import manifest
from ..describe.model import Model, backend_names, own_spec
from ..describe.specs import Pages
from ..refusal import refuse
from . import compatibility
from .wire import Introduction, Rank

#: For each layout that is understood, whether a block keeps the tokens of a head together.
HEADS_FIRST = {"LBHNC": True, "BLHNC": True, "LBNHC": False, "BLNHC": False}


def manifests(
    introduction: Introduction, vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]
) -> list[Manifest]:
    """A manifest for each rank of the other engine. The rest is of the running one. Raises `Unsupported`."""
    backends = backend_names(vllm_config, list(kv_caches))
    compatibility.check(introduction, vllm_config)
    if specs.CPU in backends.values() and not _is_here(introduction.place.host):
        raise refuse(
            "",
            f"{introduction.place.host} is another host, and how {specs.CPU} orders a block depends on its "
            "processor, which an engine without kvferry does not tell: use FerryConnector there, too",
        )
    known = _Known(vllm_config, kv_cache_config, kv_caches, backends)
    return [
        _manifest(known, introduction, number, rank)
        for number, rank in enumerate(introduction.ranks())
    ]


@dataclasses.dataclass
class _Known:
    """What is known of the engine that reads."""

    config: Any
    cache: Any
    tensors: Mapping[str, Any]
    backends: Mapping[str, str]

    @property
    def groups(self) -> list[Any]:
        return [self.cache.kv_cache_groups[index] for index in self.cache.transfer_group_ids]


def _manifest(known: _Known, introduction: Introduction, number: int, rank: Rank) -> Manifest:
    tp = introduction.place.tp
    config = _config(known, tp)
    _check_rank(rank)
    regions = _Regions(rank)
    placed = _layers(known, rank)
    model = Model(known.config, known.config.parallel_config.tensor_parallel_size)
    block = rank.block_size * rank.physical_blocks_per_logical_kv_block
    groups, tensors = [], {}
    for group in known.groups:
        own = {}
        for layer in group.layer_names:
            spec = _spec(model, known, config, group, layer, tp, block)
            own[layer] = spec
            tensors[layer] = _tensor(known, rank, regions, placed, layer, spec)
        groups.append(_group(group, own))
    _check_pages(known, rank, placed, groups)
    cache = SimpleNamespace(
        kv_cache_groups=groups,
        num_blocks=rank.num_blocks // rank.physical_blocks_per_logical_kv_block,
    )
    layer_specs = {layer: own_spec(known.config, layer) for layer in known.tensors}
    return manifest(
        config,
        cache,
        tensors,
        tp_rank=number,
        pp_rank=0,
        pcp_rank=0,
        engine=rank.engine_id,
        # The stock connector asserts it.
        conv_order="DS",
        backends=known.backends,
        layer_specs={layer: spec for layer, spec in layer_specs.items() if spec is not None},
        # A source keeps what its groups keep.
        prefix_caching=True,
    )


def _config(known: _Known, tp: int) -> Any:
    """The reading engine's configuration, as if it had as many ranks as the other."""
    config = copy.copy(known.config)
    config.parallel_config = copy.copy(known.config.parallel_config)
    config.parallel_config.tensor_parallel_size = tp
    config.parallel_config.pipeline_parallel_size = 1
    config.parallel_config.decode_context_parallel_size = 1
    config.parallel_config.prefill_context_parallel_size = 1
    # No layer that could be asked about its cache: those that run here are of another size. Scales of a layer
    # are part of the checkpoint.
    running = known.config.compilation_config.static_forward_context
    scales = ("_k_scale", "_v_scale", "kv_cache_dtype")
    config.compilation_config = SimpleNamespace(
        static_forward_context={
            layer: SimpleNamespace(
                **{name: getattr(module, name) for name in scales if hasattr(module, name)}
            )
            for layer, module in running.items()
        }
    )
    return config


def _check_rank(rank: Rank) -> None:
    for name in ("dcp_size", "pcp_size"):
        if (size := getattr(rank, name)) != 1:
            raise refuse(
                "",
                f"an engine without kvferry is not read with context parallelism (its {name} is {size}): use "
                "FerryConnector there, too",
            )
    if rank.kv_cache_layout not in HEADS_FIRST:
        raise refuse(
            "",
            f"its layout {rank.kv_cache_layout} is not read without kvferry there: it must be one of "
            f"{', '.join(HEADS_FIRST)} (VLLM_KV_CACHE_LAYOUT)",
        )
    if rank.ple_block_len is not None or rank.packed_member_layouts:
        raise refuse("", "packed regions of an engine without kvferry are not described yet")
    count = len(rank.region_names)
    lists = (rank.kv_caches_base_addr, rank.block_lens, rank.block_strides, rank.region_mem_types)
    if any(len(one) != count for one in (*lists, rank.region_group_ids)):
        raise refuse("", f"it names {count} regions, but does not say the same number of addresses and sizes")
    parts = rank.physical_blocks_per_logical_kv_block
    if rank.block_size < 1 or parts < 1 or rank.num_blocks < 1 or rank.num_blocks % parts:
        raise refuse(
            "", f"{rank.num_blocks} kernel blocks of {rank.block_size} tokens, {parts} to a block, make no sense"
        )


def _layers(known: _Known, rank: Rank) -> dict[str, int]:
    """The region of every layer. The metadata names the first layer of each; which others share it, and with
    whom, follows from how both engines group their layers, which must therefore be the same."""
    sharing: dict[int, list[str]] = {}
    group_of = {}
    for number, group in enumerate(known.groups):
        for layer in group.layer_names:
            sharing.setdefault(known.tensors[layer].data_ptr(), []).append(layer)
            group_of[layer] = number
    expected = {}
    for together in sharing.values():
        groups = {group_of[layer] for layer in together}
        first = min(together, key=_in_order)
        expected[first] = (together, groups.pop() if len(groups) == 1 else -1)
    theirs = dict(zip(rank.region_names, rank.region_group_ids, strict=True))
    if theirs != {name: group for name, (_, group) in expected.items()}:
        raise refuse(
            "",
            f"it keeps its layers in regions by groups as {theirs}, and this engine as "
            f"{ {name: group for name, (_, group) in expected.items()} }: what shares a region is not told, and "
            "must be the same on both sides; use FerryConnector there, too",
        )
    return {
        layer: rank.region_names.index(first)
        for first, (together, _) in expected.items()
        for layer in together
    }


def _in_order(layer: str) -> list[tuple[int, int | str]]:
    parts = re.split(r"(\d+)", layer)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def _group(group: Any, own: Mapping[str, Any]) -> Any:
    made = copy.copy(group)
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    spec = next(iter(own.values())) if by_layer is None else SimpleNamespace(kv_cache_specs=dict(own))
    made.kv_cache_spec = spec
    return made


def _spec(
    model: Model, known: _Known, config: Any, group: Any, layer: str, tp: int, block: int
) -> Any:
    """A layer's spec on a rank of the other engine."""
    spec = specs.layer_spec(group, layer)
    pages = specs.pages_of(layer, spec, known.backends.get(layer))
    if pages is Pages.STATES:
        shapes = _shapes(config, layer, spec, tp)
        return dataclasses.replace(spec, shapes=shapes, page_size_padded=None)
    if pages is Pages.RING or specs.law_of(layer, spec) != {"entries": 1, "tokens": 1, "open": 0}:
        raise refuse(layer, "compressed caches of an engine without kvferry are not described yet")
    if pages is not Pages.ATTENTION:
        return dataclasses.replace(spec, block_size=block, page_size_padded=None)
    heads = model.kv_heads(layer, spec.num_kv_heads, specs.slides(specs.sight_of(spec)))
    local = max(1, heads // tp)
    slots = spec.num_head_slots
    if slots is not None:
        slots = slots // spec.num_kv_heads * local
    return dataclasses.replace(
        spec, num_kv_heads=local, num_head_slots=slots, block_size=block, page_size_padded=None
    )


def _shapes(config: Any, layer: str, spec: Any, tp: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of a recurrent layer's states on a rank of so many, which the model's class says."""
    from vllm.model_executor.models import ModelRegistry

    model = config.model_config
    architecture, _ = ModelRegistry.resolve_model_cls(model.architectures, model_config=model)
    if not hasattr(architecture, "get_mamba_state_shape_from_config"):
        raise refuse(
            layer,
            f"{architecture.__name__} does not say the shapes of its states on one of {tp} ranks: use "
            "FerryConnector there, too",
        )
    shapes = architecture.get_mamba_state_shape_from_config(config)
    if len(shapes) != len(spec.shapes):
        raise refuse(layer, f"its states are {spec.shapes}, but on one of {tp} ranks they are {shapes}")
    # The class says what the first two are, in the reading engine's order of the convolution.
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    made = [tuple(int(length) for length in shape) for shape in shapes]
    kind = specs.recurrent_kind(layer, spec)
    for index, tensor in enumerate(specs.KINDS[kind]["tensors"]):
        if tensor["packing"] == "convolution" and not is_conv_state_dim_first():
            made[index] = tuple(reversed(made[index]))
    return tuple(made)


def _tensor(
    known: _Known, rank: Rank, regions: _Regions, placed: Mapping[str, int], layer: str, spec: Any
) -> _Far:
    """What the layer's tensor would be if its memory were here."""
    here, region = known.tensors[layer], placed[layer]
    size = here.element_size()
    stride = rank.block_strides[region] // size
    base = rank.kv_caches_base_addr[region]
    if specs.pages_of(layer, spec, known.backends.get(layer)) is Pages.STATES:
        parts = rank.physical_blocks_per_logical_kv_block
        content = sum(
            prod(shape) * specs.format_of(layer, dtype)[1]
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        return _Far(
            regions.of(region), base, here.dtype, size,
            (rank.num_blocks // parts, 1, 1, content // size),
            (stride * parts, content // size, content // size, 1),
        )
    heads, content, tokens = spec.num_heads, here.shape[3], rank.block_size
    inner = (
        (tokens * content, content) if HEADS_FIRST[rank.kv_cache_layout] else (content, heads * content)
    )
    return _Far(
        regions.of(region), base, here.dtype, size,
        (rank.num_blocks, heads, tokens, content), (stride, *inner, 1),
    )


def _check_pages(
    known: _Known, rank: Rank, placed: Mapping[str, int], groups: Sequence[Any]
) -> None:
    """Whether the sizes that the engine tells are those that its layers would have."""
    parts = rank.physical_blocks_per_logical_kv_block
    padded = set()
    wanted = {}
    for group in groups:
        for layer in group.layer_names:
            spec = specs.layer_spec(group, layer)
            wanted[layer] = spec.page_size_bytes
            if specs.is_state_group(spec):
                padded.add(placed[layer])
                sizes = [
                    prod(shape) * specs.format_of(layer, dtype)[1]
                    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
                ]
                if sizes[:2] != list(rank.ssm_sizes)[: len(sizes[:2])]:
                    raise refuse(
                        layer,
                        f"its states take {sizes[:2]} bytes on a rank there as this engine has them, but the other "
                        f"says {list(rank.ssm_sizes)}: the data types of states (--mamba-cache-dtype, "
                        "--mamba-ssm-cache-dtype) and the number of speculative tokens must be the same",
                    )
    for layer, page in wanted.items():
        region = placed[layer]
        told = rank.block_lens[region] * parts
        if page > told or (page != told and region not in padded):
            raise refuse(
                layer,
                f"a block of it takes {page} bytes there as this engine has it, but the other says {told}: the cache "
                "data types must be the same, and all layers must have blocks of as many tokens",
            )


class _Regions:
    """The memory that an engine has registered, as far as its regions tell: those that touch are one."""

    def __init__(self, rank: Rank) -> None:
        spans = []
        for index, base in enumerate(rank.kv_caches_base_addr):
            end = base + (rank.num_blocks - 1) * rank.block_strides[index] + rank.block_lens[index]
            spans.append((base, end, self._place(rank.region_mem_types[index], rank.device_id)))
        self._storages: list[_Storage] = []
        for base, end, device in sorted(spans, key=lambda span: span[0]):
            last = self._storages[-1] if self._storages else None
            if last is not None and base <= last.base + last.bytes and device == last.device:
                end = max(end, last.base + last.bytes)
                self._storages[-1] = _Storage(last.base, end - last.base, device)
            else:
                self._storages.append(_Storage(base, end - base, device))
        self._bases = rank.kv_caches_base_addr

    def of(self, region: int) -> _Storage:
        """The memory that a region lies in."""
        base = self._bases[region]
        return next(it for it in self._storages if it.base <= base < it.base + it.bytes)

    @staticmethod
    def _place(kind: str, device: int) -> Any:
        import torch

        if kind == "DRAM":
            return torch.device("cpu")
        if kind == "VRAM":
            return torch.device("cuda", device)
        raise refuse("", f"its memory is of the kind {kind}, which is not read: it must be DRAM or VRAM")


@dataclasses.dataclass(frozen=True)
class _Storage:
    base: int
    bytes: int
    device: Any

    def data_ptr(self) -> int:
        return self.base

    def nbytes(self) -> int:
        return self.bytes


class _Far:
    """A tensor in another process's memory: where it would lie, and nothing to touch."""

    def __init__(
        self,
        storage: _Storage,
        base: int,
        dtype: Any,
        size: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> None:
        self._storage, self._base, self._size, self._strides = storage, base, size, strides
        self.dtype, self.shape, self.device = dtype, shape, storage.device

    def untyped_storage(self) -> _Storage:
        return self._storage

    def storage_offset(self) -> int:
        return (self._base - self._storage.base) // self._size

    def element_size(self) -> int:
        return self._size

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return self._base


def _is_here(host: str) -> bool:
    """Whether an address is one of this host's."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            trial.bind(where)
    except OSError:
        return False
    return True
