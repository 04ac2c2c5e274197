"""Describe one rank's cache: from vLLM's objects to a manifest.

Geometry is read from the tensors themselves (addresses and strides), so that any layout is just
strides. `facts` and `packing` say what neither tensors nor specs hold.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

from .._core import Manifest
from . import packing
from .facts import Model, backend_names, refuse

_Fact = dict[str, Any]

#: One entry for the whole sequence.
SNAPSHOT = {"entries": 0, "tokens": 1, "open": 1}
#: Every entry of a state.
ALL_ENTRIES = {"modulus": 1, "held": [0, 1]}

#: Names that do not depend on the engine.
FORMATS = {
    "torch.bfloat16": "bf16",
    "torch.float16": "f16",
    "torch.float32": "f32",
    "torch.float8_e4m3fn": "fp8_e4m3",
    "torch.float8_e5m2": "fp8_e5m2",
}


def manifest(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    *,
    tp_rank: int | None = None,
    pp_rank: int | None = None,
    engine: str | None = None,
    conv_order: str | None = None,
    backends: Mapping[str, str] | None = None,
    kv_heads: Mapping[str, int] | None = None,
    mamba_groups: int | None = None,
    identity: Mapping[str, str] | None = None,
) -> Manifest:
    """All the facts of one rank.

    `kv_caches` are the tensors by layer that vLLM hands to a connector. What is left out is taken from
    the running process: the rank (`tp_rank`, `pp_rank`), the engine's name, the order of convolution
    states (`conv_order`, "SD" or "DS") and the attention back ends by layer. `kv_heads` (by layer)
    and `mamba_groups` say how many there are in the whole model where its configuration does not;
    `identity` adds to or replaces what must be equal on both sides.

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
    parallel = vllm_config.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise refuse("", "prefill context parallelism is not described yet; run without it")

    transferred = [group for group in kv_cache_config.kv_cache_groups if group.enable_kv_transfer]
    rank = _Rank(vllm_config, tp_rank, conv_order, backends, kv_heads or {}, mamba_groups)
    rank.name_layers(transferred)
    groups = [
        rank.group(number, group, kv_cache_config.num_blocks, kv_caches)
        for number, group in enumerate(transferred)
    ]
    stages = parallel.pipeline_parallel_size
    return Manifest(
        {
            "identity": {**rank.model.identity(), **(identity or {})},
            "engine": engine,
            "rank": pp_rank * parallel.tensor_parallel_size + tp_rank,
            "label": f"pp{pp_rank} tp{tp_rank}" if stages > 1 else f"tp{tp_rank}",
            "regions": rank.regions.list,
            "kinds": rank.kinds.list,
            "groups": groups,
        }
    )


def dump(manifest: Manifest, directory: str | os.PathLike[str] | None = None) -> Path | None:
    """Writes a manifest for `kvferry check` and `kvferry explain`, into `directory` or, when it is
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


class _Regions:
    """The allocations that tensors lie in, each once."""

    def __init__(self) -> None:
        self.list: list[_Fact] = []
        self._known: dict[tuple[int, int], int] = {}

    def index(self, tensor: Any) -> int:
        storage, device = tensor.untyped_storage(), tensor.device
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._known:
            self._known[key] = len(self.list)
            place = "host" if device.type == "cpu" else {"gpu": device.index or 0}
            self.list.append({"base": key[0], "bytes": key[1], "place": place})
        return self._known[key]


class _Kinds:
    """The kinds of states, each once."""

    def __init__(self) -> None:
        self.list: list[_Fact] = []

    def index(self, form: tuple[str, int], axes: list[tuple[str, int]], law: _Fact) -> int:
        kind = {
            "format": {"name": form[0], "bytes": form[1]},
            "axes": [{"name": name, "length": length} for name, length in axes],
            "law": law,
        }
        if kind not in self.list:
            self.list.append(kind)
        return self.list.index(kind)


def _share(units: int, ranks: int, rank: int) -> tuple[int, int]:
    """The units that a rank holds. Where there are fewer than ranks, several hold the same one."""
    first = rank * units // ranks
    return first, first + max(1, units // ranks)


class _Rank:
    def __init__(
        self,
        vllm_config: Any,
        tp_rank: int,
        conv_order: str,
        backends: Mapping[str, str],
        kv_heads: Mapping[str, int],
        mamba_groups: int | None,
    ) -> None:
        parallel = vllm_config.parallel_config
        self.tp_size: int = parallel.tensor_parallel_size
        self.tp_rank = tp_rank
        self.dcp_size: int = getattr(parallel, "decode_context_parallel_size", 1)
        self.turn: int = getattr(parallel, "cp_kv_cache_interleave_size", 1)
        self.conv_order = conv_order
        self.backends = backends
        self.kv_heads = kv_heads
        self.mamba_groups = mamba_groups
        self.spare_columns: int = vllm_config.num_speculative_tokens
        self.config = vllm_config
        self.model = Model(vllm_config, self.tp_size)
        self.regions = _Regions()
        self.kinds = _Kinds()
        self._names: dict[str, str] = {}

    def name_layers(self, groups: list[Any]) -> None:
        """Names that are the same in every engine: `layers.3`, and the layer's own name in full where
        several of one kind share a number, so that no order decides which is which."""
        sharing: dict[tuple[str, str], list[str]] = {}
        for group in groups:
            for layer in group.layer_names:
                draft, index = self.model.place(layer)
                name = f"{'draft/' if draft else ''}layers.{index}"
                kind = _describer(self, layer, _layer_spec(group, layer)).__name__
                sharing.setdefault((name, kind), []).append(layer)
        for (name, _), layers in sharing.items():
            for layer in layers:
                self._names[layer] = name if len(layers) == 1 else layer

    def group(
        self, number: int, group: Any, blocks: int, kv_caches: Mapping[str, Any]
    ) -> _Fact:
        specs = [_layer_spec(group, layer) for layer in group.layer_names]
        # A stage may hold no layer of the group; its table is there all the same.
        first = next(iter(specs), group.kv_cache_spec)
        recurrent = type(first).__name__ == "MambaSpec"
        made: _Fact = {
            "name": f"{number} {_word(first)}",
            "blocks": blocks,
            "null_block": 0,
            "tokens_per_block": None if recurrent else first.block_size * self._turns(first),
            "window": _window(first),
            "pieces": [],
            "scratch": [],
        }
        seen = set()
        for layer, spec in zip(group.layer_names, specs, strict=True):
            if layer not in kv_caches:
                raise refuse(layer, "vLLM handed over no tensor for it")
            tensor = kv_caches[layer]
            key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride())
            if key in seen:
                # A layer that reads another one's cache and keeps none of its own.
                continue
            seen.add(key)
            if _window(spec) != made["window"]:
                raise refuse(layer, "its window differs from that of other layers of its group")
            if tensor.shape[0] % blocks != 0:
                raise refuse(
                    layer,
                    f"its tensor has {tensor.shape[0]} blocks, which is no multiple of the engine's "
                    f"{blocks}",
                )
            describe = _describer(self, layer, spec)
            describe(layer, spec, tensor, blocks, made)
        return made

    def attention(self, layer: str, spec: Any, tensor: Any, blocks: int, group: _Fact) -> None:
        """Keys and values of heads."""
        view = _View(self.regions, tensor, blocks)
        sliding = type(spec).__name__ == "SlidingWindowSpec"
        heads = self.kv_heads.get(layer)
        if heads is None:
            heads = self.model.kv_heads(layer, spec.num_kv_heads, sliding)
        held = _share(heads, self.tp_size, self.tp_rank)
        if held[1] - held[0] != spec.num_kv_heads or tensor.shape[1] != spec.num_heads:
            raise refuse(
                layer,
                f"a rank of {self.tp_size} should hold {held[1] - held[0]} of {heads} KV heads, but "
                f"this one holds {spec.num_kv_heads}, in {tensor.shape[1]} slots",
            )
        law = _law(layer, spec)
        if spec.state_content_bytes is not None or spec.kv_quant_mode.name != "NONE":
            self._packed(layer, spec, heads, held, law, view, group)
            return
        form = _format(layer, spec.dtype, tensor)
        runs = self._runs(layer, spec, tensor, view)
        for name, size, parts in zip("kv", (spec.head_size, spec.head_size_v), runs, strict=True):
            kind = self.kinds.index(form, [("head", heads), ("dim", size)], law)
            for run in parts:
                group["pieces"].append(
                    self._piece(
                        layer,
                        name,
                        kind,
                        [held, (run.start, run.end)],
                        view.at(
                            run.offset * form[1],
                            [view.head, run.number * form[1]],
                            token=run.token * form[1],
                            tile=(run.tile, run.tile_stride * form[1]),
                        ),
                        spec,
                    )
                )

    def _packed(
        self,
        layer: str,
        spec: Any,
        heads: int,
        held: tuple[int, int],
        law: _Fact,
        view: _View,
        group: _Fact,
    ) -> None:
        """Quantised keys and values with their scales in one record for each token and head."""
        mode = spec.kv_quant_mode.name.lower()
        if spec.num_head_slots is not None and spec.num_head_slots != spec.num_kv_heads:
            raise refuse(layer, f"{mode} pages keep keys and values in heads of their own, which is "
                                "not described yet; use another cache data type")
        if self.backends.get(layer) == "CPU_ATTN":
            raise refuse(layer, "quantised caches of the CPU back end are not described yet; use "
                                "cache data type 'auto'")
        if getattr(self.config.cache_config, "calculate_kv_scales", False):
            raise refuse(layer, "scales that an engine computes for itself mean nothing to another; "
                                "load them from the checkpoint instead")
        name = f"{mode} {spec.head_size}+{spec.head_size_v} {self.config.cache_config.cache_dtype}"
        form = (name, spec.state_content_size_bytes)
        kind = self.kinds.index(form, [("head", heads)], law)
        where = view.at(0, [view.head])
        group["pieces"].append(self._piece(layer, "kv", kind, [held], where, spec))

    def _runs(
        self, layer: str, spec: Any, tensor: Any, view: _View
    ) -> tuple[list[packing.Run], list[packing.Run]]:
        backend = self.backends.get(layer)
        if backend == "CPU_ATTN":
            tokens = tensor.shape[2]
            if view.kernel is not None or view.token != tensor.shape[3] * tensor.element_size():
                raise refuse(layer, "the CPU back end keeps whole blocks, heads outermost")
            return packing.cpu(layer, spec.dtype, tokens, spec.head_size, spec.head_size_v)
        if backend not in packing.SIDE_BY_SIDE:
            raise refuse(
                layer,
                f"it is not known in which order the attention back end {backend} keeps keys and "
                f"values; choose one of {', '.join(sorted(packing.SIDE_BY_SIDE))} or CPU_ATTN",
            )
        token = view.token // tensor.element_size()
        return packing.side_by_side(spec.head_size, spec.head_size_v, token)

    def latent(self, layer: str, spec: Any, tensor: Any, blocks: int, group: _Fact) -> None:
        """One vector for each token, the same on every rank."""
        if spec.model_version is not None:
            raise refuse(layer, f"the pages of {spec.model_version} are not described yet")
        view, law = _View(self.regions, tensor, blocks), _law(layer, spec)
        if spec.state_content_bytes is None and spec.cache_dtype_str in (None, "auto", "bfloat16", "float16"):
            form = _format(layer, spec.dtype, tensor)
            axes, strides = [("dim", spec.head_size)], [form[1]]
        else:
            # Numbers and their scales in one record for each token.
            form = (str(spec.cache_dtype_str), spec.state_content_size_bytes)
            axes, strides = [], []
        kind = self.kinds.index(form, axes, law)
        bounds = [(0, length) for _, length in axes]
        where = view.at(0, strides)
        group["pieces"].append(self._piece(layer, "latent", kind, bounds, where, spec))

    def indexer(self, layer: str, spec: Any, tensor: Any, blocks: int, group: _Fact) -> None:
        """The keys of a sparse-attention indexer: 8 bits a number, and a scale for every 128.

        The tensor looks as if each token had a record of its own, but vLLM's kernels keep all keys of
        a kernel block first and all its scales behind them.
        """
        from vllm.platforms import current_platform

        view, law = _View(self.regions, tensor, blocks), _law(layer, spec)
        size = getattr(self.config.model_config.hf_text_config, "index_head_dim", None)
        if size is None or size % 128 or spec.state_content_size_bytes != size + size // 128 * 4:
            raise refuse(
                layer,
                f"an indexer's record of {spec.state_content_size_bytes} bytes is not described yet",
            )
        if spec.tokens_per_state != 1:
            raise refuse(layer, "the pages of a compressed indexer are not described yet")
        if current_platform.is_rocm():
            raise refuse(layer, "the shuffled indexer pages of ROCm are not described yet")
        scales = size // 128
        tokens = tensor.shape[2]
        if view.token != spec.state_content_size_bytes:
            raise refuse(layer, "an indexer's block must lie in one piece")
        parts = [
            ("indexer", ("fp8_e4m3", 1), "dim", size, 0),
            ("indexer.scale", ("f32", 4), "scale", scales, tokens * size),
        ]
        for name, form, axis, length, offset in parts:
            kind = self.kinds.index(form, [(axis, length)], law)
            where = view.at(offset, [form[1]], token=length * form[1])
            group["pieces"].append(self._piece(layer, name, kind, [(0, length)], where, spec))

    def recurrent(self, layer: str, spec: Any, tensor: Any, blocks: int, group: _Fact) -> None:
        """States of a fixed size for the whole sequence, one after the other in a page."""
        view = _View(self.regions, tensor, blocks)
        if view.kernel is not None:
            raise refuse(layer, "a state's block cannot be divided")
        tp_size, tp_rank = (1, 0) if spec.tp_replicated else (self.tp_size, self.tp_rank)
        kind = spec.mamba_type.name
        names, axes = _RECURRENT.get(kind, ((), ()))
        if len(spec.shapes) != len(names):
            raise refuse(
                layer,
                f"{kind} states of shapes {list(spec.shapes)} are not described: it should be "
                f"{' and '.join(names) or 'none'}. Run without ReplaySSM and RecoverSSM: what they keep "
                "beside these is dead after a prefill, but not described yet",
            )
        offset = 0
        for name, shape, dtype in zip(names, spec.shapes, spec.dtypes, strict=True):
            form = (_format_name(layer, dtype), dtype.itemsize)
            if name == "conv":
                sections = self._sections(layer, spec, kind)
                self._conv(layer, spec, shape, form, sections, (tp_size, tp_rank), offset, view, group)
            else:
                held = _share(shape[0] * tp_size, tp_size, tp_rank)
                lengths = [(axes[0], shape[0] * tp_size), *zip(axes[1:], shape[1:], strict=True)]
                strides = [prod(shape[axis + 1 :]) * form[1] for axis in range(len(shape))]
                if self._is_transposed(layer):
                    strides[1:] = [form[1], shape[1] * form[1]]
                bounds = [held, *((0, length) for length in shape[1:])]
                index = self.kinds.index(form, lengths, SNAPSHOT)
                where = view.at(offset, strides, token=0)
                group["pieces"].append(self._piece(layer, name, index, bounds, where, None))
            offset += prod(shape) * form[1]

    def _is_transposed(self, layer: str) -> bool:
        """Whether a delta net's state lies in memory by key and then by value, which its shape does not
        say: vLLM's kernels for CPUs look at it so. (Kimi's nets share the name, but have none.)"""
        from vllm.platforms import current_platform

        return self.backends.get(layer) == "GDN_ATTN" and bool(current_platform.is_cpu())

    def _sections(self, layer: str, spec: Any, kind: str) -> list[tuple[str, int, int, int]]:
        """The sections of a convolution: name, channels on this rank, channels and units in all."""
        columns, channels = self._columns(spec.shapes[0])
        ranks = 1 if spec.tp_replicated else self.tp_size
        if kind in ("MAMBA1", "SHORT_CONV"):
            return [("conv.x", channels, channels * ranks, channels * ranks)]
        if kind == "MAMBA2":
            heads, size, state = spec.shapes[1]
            own = (channels - heads * size) // 2
            groups = self.mamba_groups
            if groups is None:
                groups = self.model.mamba_groups(layer, heads * ranks, size, state, columns)
            if max(1, groups // ranks) * state != own or channels != heads * size + 2 * own:
                raise refuse(
                    layer,
                    f"its convolution has {channels} channels on this rank, which does not fit "
                    f"{groups} groups on {ranks} ranks; say how many groups there are with "
                    "`mamba_groups`",
                )
            x = ("conv.x", heads * size, heads * size * ranks, heads * ranks)
            return [x, *((name, own, groups * state, groups) for name in ("conv.b", "conv.c"))]
        # Gated delta nets, Kimi's among them.
        heads, value, key = spec.shapes[1]
        own = (channels - heads * value) // 2
        if own % key or channels != heads * value + 2 * own:
            raise refuse(layer, f"{channels} channels are no queries, keys and values of "
                                f"{heads} heads of {value} by {key}")
        sections = [(f"conv.{name}", own, own * ranks, own // key * ranks) for name in "qk"]
        return [*sections, ("conv.v", heads * value, heads * value * ranks, heads * ranks)]

    def _columns(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Columns and channels of a convolution state."""
        return (shape[0], shape[1]) if self.conv_order == "SD" else (shape[1], shape[0])

    def _conv(
        self,
        layer: str,
        spec: Any,
        shape: tuple[int, ...],
        form: tuple[str, int],
        sections: list[tuple[str, int, int, int]],
        ranks: tuple[int, int],
        offset: int,
        view: _View,
        group: _Fact,
    ) -> None:
        columns, channels = self._columns(shape)
        # After a prefill, speculative tokens have not used their columns yet. The first Mamba has none.
        spare = 0 if spec.mamba_type.name == "MAMBA1" else self.spare_columns
        live, size = columns - spare, form[1]
        if live < 1:
            raise refuse(layer, f"a convolution of {columns} columns has none left beside the {spare} "
                                "for speculative tokens")
        channel, column = (size, channels * size) if self.conv_order == "SD" else (columns * size, size)
        at = offset
        for name, own, total, units in sections:
            first, end = _share(units, *ranks)
            unit = total // units
            if (end - first) * unit != own:
                raise refuse(layer, f"this rank holds {own} channels of {name}, which is no share of "
                                    f"{units} units of {unit}")
            index = self.kinds.index(form, [("channel", total), ("column", live)], SNAPSHOT)
            bounds = [(first * unit, end * unit), (0, live)]
            where = view.at(at, [channel, column], token=0)
            group["pieces"].append(self._piece(layer, name, index, bounds, where, None))
            at += own * channel
        if spare:
            by_row = self.conv_order == "DS"
            group["scratch"].append(
                {
                    "region": view.region,
                    "offset": view.offset + offset + live * column,
                    "block": view.block,
                    "run": spare * (size if by_row else channels * size),
                    "dims": [[channels, columns * size]] if by_row else [],
                }
            )

    def _piece(
        self,
        layer: str,
        name: str,
        kind: int,
        bounds: list[tuple[int, int]],
        view: _Fact,
        spec: Any,
    ) -> _Fact:
        return {
            "state": f"{self._names[layer]}/{name}",
            "kind": kind,
            "bounds": [list(span) for span in bounds],
            "phase": self._phase(spec),
            "view": view,
        }

    def _turns(self, spec: Any) -> int:
        """Ranks that take turns at a block's tokens."""
        return self.dcp_size if spec is not None and spec.dcp_sharded else 1

    def _phase(self, spec: Any) -> _Fact:
        ranks = self._turns(spec)
        if ranks == 1:
            return ALL_ENTRIES
        first = self.tp_rank % ranks * self.turn
        return {"modulus": ranks * self.turn, "held": [first, first + self.turn]}


class _View:
    """Where a layer's blocks lie: a tensor of [blocks, heads, tokens, content]."""

    def __init__(self, regions: _Regions, tensor: Any, blocks: int) -> None:
        size = tensor.element_size()
        block, head, token, content = (stride * size for stride in tensor.stride())
        if content != size and tensor.shape[3] > 1:
            raise ValueError(f"a cache tensor's content must be dense, not {content} bytes apart")
        self.region = regions.index(tensor)
        self.offset: int = tensor.storage_offset() * size
        parts = tensor.shape[0] // blocks
        self.block: int = block * parts
        self.kernel: _Fact | None = None
        if parts > 1:
            self.kernel = {"entries": tensor.shape[2], "stride": block}
        self.head: int = head
        self.token: int = token

    def at(
        self,
        offset: int,
        axes: list[int],
        token: int | None = None,
        tile: tuple[int, int] = (0, 0),
    ) -> _Fact:
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


#: The states of a recurrent layer in the order of its page, and the axes of the one that is no
#: convolution.
_RECURRENT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "MAMBA1": (("conv", "ssm"), ("channel", "state")),
    "MAMBA2": (("conv", "ssm"), ("head", "dim", "state")),
    "GDN_ATTN": (("conv", "ssm"), ("head", "value", "key")),
    "SHORT_CONV": (("conv",), ()),
    "LINEAR": (("ssm",), ("head", "key", "value")),
}


def _layer_spec(group: Any, layer: str) -> Any:
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return group.kv_cache_spec if by_layer is None else by_layer[layer]


def _describer(rank: _Rank, layer: str, spec: Any) -> Callable[..., None]:
    """Which of a rank's descriptions fits a spec. By exact class: a spec that vLLM derives from one
    of these means something else by its pages."""
    name = type(spec).__name__
    if name == "MambaSpec":
        return rank.recurrent
    if name == "MLAAttentionSpec":
        return rank.indexer if spec.cache_role.value == "indexer" else rank.latent
    if name == "SlidingWindowMLASpec":
        return rank.latent
    if name in ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"):
        return rank.attention
    raise refuse(layer, f"caches of the kind {name} are not described yet")


def _word(spec: Any) -> str:
    if type(spec).__name__ == "MambaSpec":
        return str(spec.mamba_type.name).lower()
    return str(type(spec).__name__).removesuffix("Spec").lower()


def _window(spec: Any) -> _Fact:
    name = type(spec).__name__
    if name in ("SlidingWindowSpec", "SlidingWindowMLASpec"):
        return {"tokens": spec.sliding_window, "chunk": 1, "extra": spec.extra_retained_tokens}
    if name == "ChunkedLocalAttentionSpec":
        return {"tokens": 1, "chunk": spec.attention_chunk_size, "extra": 0}
    return {"tokens": None, "chunk": 1, "extra": 0}


def _law(layer: str, spec: Any) -> _Fact:
    rate = Fraction(spec.tokens_per_state)
    if rate <= 0:
        raise refuse(layer, f"a state for every {rate} tokens makes no sense")
    return {"entries": rate.denominator, "tokens": rate.numerator, "open": 0}


def _format(layer: str, dtype: Any, tensor: Any) -> tuple[str, int]:
    if tensor.dtype != dtype:
        raise refuse(layer, f"its spec says {dtype}, but its tensor holds {tensor.dtype}")
    return _format_name(layer, dtype), dtype.itemsize


def _format_name(layer: str, dtype: Any) -> str:
    name = FORMATS.get(str(dtype))
    if name is None:
        raise refuse(layer, f"numbers of type {dtype} are not described yet")
    return name
