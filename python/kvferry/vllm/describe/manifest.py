"""Describe one rank's cache: from vLLM's objects to a manifest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._core import Manifest
from ..._memory import Regions
from ..refusal import refuse
from . import specs
from .geometry import View
from .layers import Layers
from .model import Model, backend_names, own_spec
from .specs import Fact


def manifest(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    *,
    tp_rank: int | None = None,
    pp_rank: int | None = None,
    pcp_rank: int | None = None,
    engine: str | None = None,
    conv_order: str | None = None,
    backends: Mapping[str, str] | None = None,
    layer_specs: Mapping[str, Any] | None = None,
    prefix_caching: bool | None = None,
    kv_heads: Mapping[str, int] | None = None,
    mamba_groups: int | None = None,
    identity: Mapping[str, str] | None = None,
    elsewhere: Mapping[int, int] | None = None,
    own_draft: bool = False,
    tries_others: bool = False,
) -> Manifest:
    """All the facts of one rank.

    `kv_caches` are the tensors by layer that vLLM hands to a connector. What is left out is taken from
    the running process: the rank (`tp_rank`, `pp_rank`, and `pcp_rank` of prefill context parallelism),
    the engine's name, the order of convolution states (`conv_order`, "SD" or "DS"), the attention back
    ends by layer, the spec that each layer asked for (`layer_specs`: its group may keep more of it), and
    whether later requests may use blocks again (`prefix_caching`). `kv_heads` (by layer) and
    `mamba_groups` say how many there are in the whole model where its configuration does not; `identity`
    adds to or replaces what must be equal on both sides; `elsewhere` are allocations that others reach
    at another address only, in host memory; with `own_draft` nothing of a draft model is handed over; with
    `tries_others` it takes from other kinds of engines what was not shown to work.

    Raises `Unsupported` where a layer's cache cannot be described, and `ManifestError` where what it
    is described as makes no sense.
    """
    if tp_rank is None or pp_rank is None:
        from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

        tp_rank = get_tensor_model_parallel_rank() if tp_rank is None else tp_rank
        pp_rank = get_pp_group().rank_in_group if pp_rank is None else pp_rank
    if engine is None:
        transfer = vllm_config.kv_transfer_config
        engine = str(transfer.engine_id) if transfer is not None else "vllm"
    if conv_order is None:
        from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

        conv_order = get_conv_state_layout()
    if conv_order not in ("SD", "DS"):
        raise ValueError(f"conv_order is 'SD' or 'DS', not {conv_order!r}")
    if backends is None:
        backends = backend_names(vllm_config, list(kv_caches))
    if prefix_caching is None:
        prefix_caching = bool(getattr(vllm_config.cache_config, "enable_prefix_caching", False))
    parallel = vllm_config.parallel_config
    pcp_size = getattr(parallel, "prefill_context_parallel_size", 1)
    if pcp_rank is None and pcp_size > 1:
        from vllm.distributed.parallel_state import get_pcp_group

        pcp_rank = get_pcp_group().rank_in_group
    pcp_rank = pcp_rank or 0

    transferred = [group for group in kv_cache_config.kv_cache_groups if group.enable_kv_transfer]
    sights = {
        layer: _sight(vllm_config, group, layer, layer_specs)
        for group in transferred
        for layer in group.layer_names
    }
    # Ranks take turns at tokens over those of a prefill first, and then over those of tensors.
    turn = tp_rank * pcp_size + pcp_rank
    layers = Layers(
        vllm_config, tp_rank, turn, conv_order, backends, sights, kv_heads or {}, mamba_groups
    )
    layers.regions = Regions(elsewhere)
    names = _names(layers.model, backends, transferred)
    # Where a later request may use blocks again, it may share a shorter prefix and look at tokens that
    # were never copied: then a layer needs all that its group keeps.
    needs = {} if prefix_caching else sights
    groups = [
        _group(layers, number, group, names, needs, _blocks(kv_cache_config, group), kv_caches, own_draft)
        for number, group in enumerate(transferred)
    ]
    layers.asking.report()
    places = [
        ("pp", pp_rank, parallel.pipeline_parallel_size > 1),
        ("pcp", pcp_rank, pcp_size > 1),
        ("tp", tp_rank, True),
    ]
    return Manifest(
        {
            "identity": {**layers.model.identity(own_draft, tries_others), **(identity or {})},
            "engine": engine,
            "rank": (pp_rank * pcp_size + pcp_rank) * parallel.tensor_parallel_size + tp_rank,
            "label": " ".join(f"{name}{rank}" for name, rank, several in places if several),
            "regions": layers.regions.list,
            "kinds": layers.kinds,
            "writers": layers.writers,
            "groups": groups,
        }
    )


def dump(manifest: Manifest, directory: str | os.PathLike[str] | None = None) -> Path | None:
    """Writes a manifest for `kvferry plan` and `kvferry explain`, into `directory` or, when it is
    left out, into the one that KVFERRY_DUMP_MANIFEST names. Returns the file, if there is one."""
    directory = directory or os.environ.get("KVFERRY_DUMP_MANIFEST")
    if not directory:
        return None
    name = f"{manifest.engine}-{manifest.label}".replace(" ", "-").replace("/", "_")
    path = Path(directory) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: another process may read it as soon as it is there.
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(manifest.to_json())
    part.replace(path)
    return path


def names_of_layers(vllm_config: Any, groups: list[Any]) -> dict[str, str]:
    """What the states of each layer of some groups are called after, in the running process."""
    model = Model(vllm_config, vllm_config.parallel_config.tensor_parallel_size)
    layers = [layer for group in groups for layer in group.layer_names]
    return _names(model, backend_names(vllm_config, layers), groups)


def _names(model: Model, backends: Mapping[str, str], groups: list[Any]) -> dict[str, str]:
    """Names that are the same in every engine: `layers.3`, and the layer's own name in full where
    several of one kind share a number, so that no order decides which is which. A layer that keeps what
    another one makes has the other's name: its states are the same."""
    sharing: dict[tuple[bool, int, specs.Pages], list[str]] = {}
    for group in groups:
        for layer in group.layer_names:
            spec = specs.layer_spec(group, layer)
            pages = specs.pages_of(layer, spec, backends.get(layer))
            sharing.setdefault((*model.place(layer), pages), []).append(layer)
    names = {}
    for (draft, index, _), same in sharing.items():
        maker = index if draft else model.maker(index)
        for layer in same:
            if len(same) == 1:
                names[layer] = f"{'draft/' if draft else ''}layers.{maker}"
            else:
                names[layer] = layer.replace(f".{index}.", f".{maker}.", 1)
    return names


def _sight(
    vllm_config: Any, group: Any, layer: str, layer_specs: Mapping[str, Any] | None
) -> Fact:
    """How far back a layer looks: as far as its group keeps, or less."""
    spec = specs.layer_spec(group, layer)
    sight, kept = specs.sight_of(spec), specs.window_of(spec)
    if sight == kept or spec is not group.kv_cache_spec:
        return sight
    # Merged: some layer of the group looks less far, and only the layer itself knows whether it is
    # this one.
    own = own_spec(vllm_config, layer) if layer_specs is None else layer_specs.get(layer)
    return kept if own is None else specs.sight_of(own)


def _blocks(kv_cache_config: Any, group: Any) -> int:
    """Blocks of a group: those whose pages live in host memory have a pool of their own."""
    if getattr(group, "host_resident", False):
        return int(kv_cache_config.hisparse_host_num_blocks)
    return int(kv_cache_config.num_blocks)


def _group(
    layers: Layers,
    number: int,
    group: Any,
    names: Mapping[str, str],
    needs: Mapping[str, Fact],
    blocks: int,
    kv_caches: Mapping[str, Any],
    own_draft: bool,
) -> Fact:
    own = [specs.layer_spec(group, layer) for layer in group.layer_names]
    # A stage may hold no layer of the group; its table is there all the same.
    first = next(iter(own), specs.first_spec(group.kv_cache_spec))
    window = specs.window_of(first)
    pieces: list[Fact] = []
    scratch: list[Fact] = []
    seen = set()
    for layer, spec in zip(group.layer_names, own, strict=True):
        if layer not in kv_caches:
            raise refuse(layer, "vLLM handed over no tensor for it")
        tensor = kv_caches[layer]
        key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride())
        if key in seen:
            # A layer that reads another one's cache and keeps none of its own.
            continue
        seen.add(key)
        if own_draft and layers.model.place(layer)[0]:
            scratch.append(View(layers.regions, tensor, blocks).whole(tensor))
            continue
        if specs.window_of(spec) != window:
            raise refuse(layer, "its window differs from that of other layers of its group")
        if tensor.shape[0] % blocks != 0:
            raise refuse(
                layer,
                f"its tensor has {tensor.shape[0]} blocks, which is not a multiple of the engine's "
                f"{blocks}",
            )
        sight = needs.get(layer, window)
        need = sight if sight != window else None
        found, unused = layers.describe(names[layer], layer, spec, tensor, blocks, need)
        pieces += found
        scratch += unused
    is_state = specs.is_state_group(first)
    return {
        "name": f"{number} {specs.word_of(first)}",
        "blocks": blocks,
        "null_block": 0,
        "tokens_per_block": None if is_state else first.block_size * layers.turns(first),
        "window": window,
        "pieces": pieces,
        "scratch": scratch,
    }
