"""One layer's cache as pieces: kvferry's facts say which states it keeps and what of them a rank
holds; vLLM's spec says how large they are, and its tensor where they lie.

It is long because there is a method for every kind of pages, and all of them share the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from .._core import solve, states
from . import kernels, probe, specs, versions
from .asking import Asking, Make, places
from .geometry import Regions, View
from .model import Model
from .probe import Places
from .refusal import refuse
from .specs import Fact, Pages

#: Every entry of a state.
ALL_ENTRIES = {"modulus": 1, "held": [0, 1]}


class Layers:
    """The layers of one rank."""

    def __init__(
        self,
        vllm_config: Any,
        tp_rank: int,
        token_rank: int,
        conv_order: str,
        backends: Mapping[str, str],
        sights: Mapping[str, Fact],
        kv_heads: Mapping[str, int],
        mamba_groups: int | None,
    ) -> None:
        parallel = vllm_config.parallel_config
        self.tp_size: int = parallel.tensor_parallel_size
        self.tp_rank = tp_rank
        #: Whose turn this rank has among those that share tokens.
        self.token_rank = token_rank
        self.dcp_size: int = getattr(parallel, "decode_context_parallel_size", 1)
        self.turn: int = getattr(parallel, "cp_kv_cache_interleave_size", 1)
        #: Whether convolution states are stored columns first.
        self.by_column = conv_order == "SD"
        self.backends = backends
        #: How far back each layer looks.
        self.sights = sights
        self.kv_heads = kv_heads
        self.mamba_groups = mamba_groups
        self.config = vllm_config
        self.model = Model(vllm_config, self.tp_size)
        self.regions = Regions()
        self.kinds: list[Fact] = []
        self.asking = Asking(vllm_config)

    def describe(
        self, name: str, layer: str, spec: Any, tensor: Any, blocks: int, need: Fact | None
    ) -> tuple[list[Fact], list[Fact]]:
        """The pieces of a layer and the scratch beside them. Its states are called after `name`;
        `need` is what it looks at where that is less than what its group keeps."""
        pages = specs.pages_of(layer, spec, self.backends.get(layer))
        described = {
            Pages.ATTENTION: self._attention,
            Pages.LATENT: self._latent,
            Pages.INDEXER: self._indexer,
            Pages.HIDDEN: self._hidden,
            Pages.RING: self._ring,
            Pages.STATES: self._recurrent,
        }[pages]
        view = View(self.regions, tensor, blocks)
        pieces, scratch = described(layer, spec, tensor, view)
        tokens = None if pages in (Pages.STATES, Pages.RING) else tensor.shape[2]

        def where() -> dict[str, Places]:
            return _in_full(spec, pages, places(pieces, self.kinds, view, tokens))

        self.asking.check(layer, _KERNELS[pages], spec, tensor, view, pieces, where)
        for piece in pieces:
            piece["state"] = f"{name}/{piece['state']}"
            piece["need"] = need
        return pieces, scratch

    def turns(self, spec: Any) -> int:
        """Ranks that take turns at a block's tokens."""
        return self.dcp_size if versions.shares_tokens(spec) else 1

    def _attention(
        self, layer: str, spec: Any, tensor: Any, view: View
    ) -> tuple[list[Fact], list[Fact]]:
        """Keys and values of heads."""
        heads = self.kv_heads.get(layer)
        if heads is None:
            sliding = specs.slides(self.sights[layer])
            heads = self.model.kv_heads(layer, spec.num_kv_heads, sliding)
        scales = specs.scales_of(layer, spec)
        if scales is specs.IN_THE_PAGE:
            return self._records(layer, spec, tensor, view, heads)
        by_head = None
        if scales is None:
            form = _format(layer, spec.dtype, tensor)
        elif (by_head := self._scaled_by_head(layer, spec)) is None:
            form = self._scaled(layer)
        else:
            form = by_head[0][0]
        if not spec.head_size_v and by_head is None:
            return self._vectors(layer, spec, view, heads, form)
        sizes = {"heads": heads, "key": spec.head_size, "value": spec.head_size_v}
        (made,) = self._states(layer, "attention", sizes, {"model": form}, self.tp_size)
        self._check_heads(layer, spec, made, heads)
        runs = self._runs(layer, spec, tensor, view)
        apart = specs.BACKENDS.get(self.backends.get(layer) or "") is specs.Order.APART
        pieces = []
        for side, (state, own) in enumerate(zip(made["states"], runs, strict=True)):
            size = state["kind"]["format"]["bytes"]
            head = spec.head_size * size if apart else view.head
            for part, skipped in _heads(state, by_head[side] if by_head else None):
                for run in own:
                    where = view.at(
                        run.offset * size + skipped * head,
                        [head, run.number * size],
                        token=run.token * size,
                        tile=(run.tile, run.tile_stride * size),
                    )
                    bounds = [part["bounds"][0], [run.start, run.end]]
                    pieces.append(self._piece(layer, spec, {**part, "bounds": bounds}, where))
        return pieces, []

    def _vectors(
        self, layer: str, spec: Any, view: View, heads: int, form: tuple[str, int]
    ) -> tuple[list[Fact], list[Fact]]:
        """One vector for each head and token."""
        if self.backends.get(layer) not in specs.SIDE_BY_SIDE:
            raise refuse(layer, f"the back end {self.backends.get(layer)} is not known to keep single "
                                "vectors for heads")
        sizes = {"heads": heads, "size": spec.head_size}
        (made,) = self._states(layer, "head vectors", sizes, {"model": form}, self.tp_size)
        self._check_heads(layer, spec, made, heads)
        (state,) = made["states"]
        return [self._piece(layer, spec, state, view.at(0, [view.head, form[1]]))], []

    def _check_heads(self, layer: str, spec: Any, made: Fact, heads: int) -> None:
        first, end = made["states"][0]["bounds"][0]
        if end - first != spec.num_kv_heads:
            raise refuse(
                layer,
                f"a rank of {self.tp_size} should hold {end - first} of {heads} KV heads, but this "
                f"one holds {spec.num_kv_heads}, in {spec.num_heads} slots",
            )

    def _records(
        self, layer: str, spec: Any, tensor: Any, view: View, heads: int
    ) -> tuple[list[Fact], list[Fact]]:
        """Quantised keys and values with their scales, for each token and head."""
        mode = spec.kv_quant_mode.name.lower()
        cache = self.config.cache_config.cache_dtype
        if self.backends.get(layer) == specs.CPU:
            raise refuse(layer, f"{mode} caches of the CPU back end are not described; use cache data "
                                "type 'auto' or 'fp8'")
        name = f"{mode} {spec.head_size}+{spec.head_size_v} {cache}"
        if spec.num_heads == spec.num_kv_heads:
            formats = {"record": (name, spec.state_content_size_bytes)}
            (made,) = self._states(layer, "attention records", {"heads": heads}, formats, self.tp_size)
            self._check_heads(layer, spec, made, heads)
            (state,) = made["states"]
            return [self._piece(layer, spec, state, view.at(0, [view.head]))], []
        return self._slots(layer, spec, tensor, view, heads, name)

    def _slots(
        self, layer: str, spec: Any, tensor: Any, view: View, heads: int, name: str
    ) -> tuple[list[Fact], list[Fact]]:
        """Keys and values in head slots of their own: in each, the numbers of all tokens come first and
        then the scales of all."""
        slots = specs.SLOTS.get(self.backends.get(layer) or "")
        if slots is None or spec.num_heads != 2 * spec.num_kv_heads:
            raise refuse(
                layer,
                f"{name} pages of {spec.num_heads} slots for {spec.num_kv_heads} heads are not described "
                f"for the back end {self.backends.get(layer)}; use another cache data type",
            )
        content, tokens = spec.state_content_size_bytes, tensor.shape[2]
        if view.token != content or (spec.num_heads > 1 and view.head != tokens * content):
            raise refuse(layer, f"{name} pages must keep each head in one piece: choose the layout LBHNC")
        # Of nine bytes, eight are numbers and one is a scale.
        data = content * 8 // 9
        formats = {"numbers": (name, data), "scales": (f"{name} scales", content - data)}
        (made,) = self._states(layer, "attention slots", {"heads": heads}, formats, self.tp_size)
        self._check_heads(layer, spec, made, heads)
        pieces = []
        for number, state in enumerate(made["states"]):
            size = state["kind"]["format"]["bytes"]
            value, scale = divmod(number, 2)
            if slots is specs.Slots.BY_HEAD:
                # Key, value, key, value: the slots of a head lie together.
                start, head = value * view.head, 2 * view.head
                offset = start + (tokens * data if scale else 0)
            else:
                # All keys, then all values; in each of the two, the numbers of all heads come first.
                start, head = value * spec.num_kv_heads * view.head, tokens * size
                offset = start + (spec.num_kv_heads * tokens * data if scale else 0)
            pieces.append(self._piece(layer, spec, state, view.at(offset, [head], token=size)))
        return pieces, []

    def _scaled(self, layer: str) -> tuple[str, int]:
        """The format of numbers whose scales are the layer's: equal bytes mean equal numbers only where
        the scales are equal too, so that they are part of its name."""
        cache, _, keys, values = self._scales(layer)
        numbers = specs.eight_bits(layer, cache)
        return f"{numbers}, keys times {keys[0]:.9g}, values times {values[0]:.9g}", 1

    def _scaled_by_head(self, layer: str, spec: Any) -> list[list[tuple[str, int]]] | None:
        """The formats of the keys and of the values of each head that this rank holds, where heads have
        scales of their own."""
        cache, by_head, *scales = self._scales(layer)
        if not by_head:
            return None
        if any(len(values) not in (1, spec.num_kv_heads) for values in scales):
            raise refuse(
                layer,
                f"its keys and values have {len(scales[0])} and {len(scales[1])} scales for the "
                f"{spec.num_kv_heads} heads of this rank",
            )
        numbers = specs.eight_bits(layer, cache)
        return [
            [(f"{numbers}, times {value:.9g}", 1) for value in values * (spec.num_kv_heads // len(values))]
            for values in scales
        ]

    def _scales(self, layer: str) -> tuple[str, bool, list[float], list[float]]:
        if getattr(self.config.cache_config, "calculate_kv_scales", False):
            raise refuse(layer, "scales that an engine computes for itself mean nothing to another; "
                                "load them from the checkpoint instead")
        return self.model.scales(layer)

    def _runs(
        self, layer: str, spec: Any, tensor: Any, view: View
    ) -> tuple[list[probe.Run], list[probe.Run]]:
        """Where keys and values lie in a block."""
        backend = self.backends.get(layer)
        size = tensor.element_size()
        order = specs.BACKENDS.get(backend or "")
        if order is specs.Order.APART:
            first, others = probe.side_by_side(spec.head_size, spec.head_size_v, view.token // size)
            apart = view.head // size - spec.head_size
            return first, [replace(run, offset=run.offset + apart) for run in others]
        if order is specs.Order.SIDE_BY_SIDE and tensor.shape[1] == spec.num_kv_heads:
            return probe.side_by_side(spec.head_size, spec.head_size_v, view.token // size)
        if backend == specs.CPU and (
            view.kernel is not None or view.token != tensor.shape[3] * size
        ):
            raise refuse(layer, "the CPU back end keeps whole blocks, heads outermost")
        tokens, heads = tensor.shape[2], tensor.shape[1]
        answer = self.asking.answer(
            layer,
            kernels.attention,
            spec,
            tensor,
            {"k": (tokens, heads, spec.head_size), "v": (tokens, heads, spec.head_size_v)},
            kernels.cpu_layer(spec, tokens) if backend == specs.CPU else None,
        )
        if answer is None:
            raise refuse(
                layer,
                f"it is not known in which order the attention back end {backend} keeps keys and "
                "values, and it cannot be asked; choose one of "
                f"{', '.join(sorted(specs.SIDE_BY_SIDE))} or {specs.CPU}",
            )
        found = [answer.places(name, ("token", "head", "dim"), size) for name in ("k", "v")]
        keys, values = (probe.runs(where, view.head) for where in found)
        if keys is None or values is None:
            raise refuse(
                layer,
                f"the order in which the attention back end {backend} keeps a block is not understood: "
                f"keys {found[0]}; values {found[1]}",
            )
        return keys, values

    def _latent(
        self, layer: str, spec: Any, tensor: Any, view: View
    ) -> tuple[list[Fact], list[Fact]]:
        """One vector for each token, the same on every rank."""
        specs.order_of(layer, self.backends.get(layer))
        cache, content = spec.cache_dtype_str, spec.state_content_size_bytes
        scales = specs.scales_of(layer, spec)
        if spec.state_content_bytes is None and scales is None:
            form = _format(layer, spec.dtype, tensor)
            kind, sizes, formats = "latent", {"size": spec.head_size}, {"model": form}
        elif scales is specs.OF_THE_LAYER and spec.state_content_bytes is None:
            kind, sizes = "latent", {"size": spec.head_size}
            formats = {"model": self._scaled(layer)}
        elif content in specs.SCALES_LAST and spec.model_version is not None:
            return self._planes(layer, spec, tensor, view)
        elif scales is specs.IN_THE_PAGE or specs.SCALES_INSIDE.get(str(cache)) == content:
            kind, sizes, formats = "latent records", {}, {"record": (str(cache), content)}
        else:
            raise refuse(
                layer,
                f"latents of {content} bytes a token and cache data type {cache} have not been seen "
                "before; please report it with the model, vLLM's version and the attention back end",
            )
        (made,) = self._states(layer, kind, sizes, formats, 1)
        (state,) = made["states"]
        strides = [state["kind"]["format"]["bytes"]] * len(state["bounds"])
        return [self._piece(layer, spec, state, view.at(0, strides))], []

    def _planes(
        self, layer: str, spec: Any, tensor: Any, view: View
    ) -> tuple[list[Fact], list[Fact]]:
        """Latents whose scales lie behind all records of a kernel block."""
        content, entries = spec.state_content_size_bytes, tensor.shape[2]
        if view.token != content:
            raise refuse(layer, "a block of latents with scales behind them must lie in one piece")
        data, scales = specs.SCALES_LAST[content]
        name = f"{spec.cache_dtype_str} {content}"
        formats = {"record": (name, data), "scales": (f"{name} scales", scales)}
        (made,) = self._states(layer, "latent planes", {}, formats, 1)
        pieces, offset = [], 0
        for state in made["states"]:
            size = state["kind"]["format"]["bytes"]
            pieces.append(self._piece(layer, spec, state, view.at(offset, [], token=size)))
            offset += size * entries
        return pieces, []

    def _hidden(
        self, layer: str, spec: Any, tensor: Any, view: View
    ) -> tuple[list[Fact], list[Fact]]:
        """Hidden states of several layers for each token, the same on every rank."""
        specs.order_of(layer, self.backends.get(layer))
        form = _format(layer, spec.dtype, tensor)
        sizes = {"layers": spec.num_kv_heads, "size": spec.head_size}
        (made,) = self._states(layer, "hidden states", sizes, {"model": form}, 1)
        (state,) = made["states"]
        return [self._piece(layer, spec, state, view.at(0, [view.head, form[1]]))], []

    def _ring(
        self, layer: str, spec: Any, tensor: Any, view: View
    ) -> tuple[list[Fact], list[Fact]]:
        """The vectors of the last tokens, each in the slot that its position gives it: one ring for a
        sequence. What of it is live depends on the position alone, so that it comes whole."""
        specs.order_of(layer, self.backends.get(layer))
        form = _format(layer, spec.dtype, tensor)
        if view.kernel is not None:
            raise refuse(layer, "a ring cannot be divided")
        sizes = {"parts": spec.num_kv_heads, "slots": spec.block_size, "size": spec.head_size}
        (made,) = self._states(layer, "ring", sizes, {"model": form}, 1)
        (state,) = made["states"]
        where = view.at(0, [view.head, view.token, form[1]], token=0)
        return [self._piece(layer, None, state, where)], []

    def _indexer(
        self, layer: str, spec: Any, tensor: Any, view: View
    ) -> tuple[list[Fact], list[Fact]]:
        """The keys of a sparse-attention indexer. The tensor looks as if each token had a record of
        its own, but vLLM's kernels keep all keys of a kernel block first and all its scales behind
        them."""
        content, entries = spec.state_content_size_bytes, tensor.shape[2]
        config = self.config.model_config.hf_text_config
        size = getattr(config, "index_head_dim", None) or 0
        if view.token != content:
            raise refuse(layer, "an indexer's block must lie in one piece")
        for kind in specs.INDEXERS if size else ():
            (made,) = self._states(layer, kind, {"size": size}, {}, 1)
            if sum(map(_bytes, made["states"])) == content:
                break
        else:
            raise refuse(layer, f"an indexer's record of {content} bytes is not described yet")
        heads = getattr(config, "index_n_heads", 0)
        tiles = specs.tiles_of(layer, self.backends.get(layer), spec, heads, size, entries)
        if tiles is not None and (view.kernel is not None or entries % tiles.tokens):
            raise refuse(layer, f"blocks of {entries} entries cannot be cut into tiles of {tiles.tokens}")
        pieces, offset = [], 0
        for number, state in enumerate(made["states"]):
            size, whole = state["kind"]["format"]["bytes"], _bytes(state)
            # Keys come first.
            cut = list(specs.cut(tiles, bool(number), whole))
            for (first, end), start, token in cut:
                part = {**state, "bounds": [[first // size, end // size]]}
                tile = (0, 0)
                if tiles is not None and len(cut) > 1 and entries > tiles.tokens:
                    tile = (tiles.tokens, tiles.tokens * whole)
                where = view.at(offset + start, [size], token=token, tile=tile)
                pieces.append(self._piece(layer, spec, part, where))
            offset += whole * entries
        return pieces, []

    def _recurrent(
        self, layer: str, spec: Any, tensor: Any, view: View
    ) -> tuple[list[Fact], list[Fact]]:
        """States of a fixed size for the whole sequence, one after the other in a page."""
        if view.kernel is not None:
            raise refuse(layer, "a state's block cannot be divided")
        ranks = 1 if spec.tp_replicated else self.tp_size
        kind = specs.recurrent_kind(layer, spec)
        told = specs.KINDS[kind]["tensors"]
        formats = {
            tensor["states"][0]["format"]: specs.format_of(layer, dtype)
            for tensor, dtype in zip(told, spec.dtypes, strict=False)
        }
        # After a prefill, speculative tokens have not used their columns yet.
        spare = self.config.num_speculative_tokens if any(it["spare"] for it in told) else 0
        shapes = spec.shapes[: len(told)]
        sizes = self._sizes(layer, kind, shapes, ranks, spare)
        pieces, scratch, offset = [], [], 0
        tensors = self._states(layer, kind, sizes, formats, ranks)
        for made, shape in zip(tensors, shapes, strict=True):
            size = made["states"][0]["kind"]["format"]["bytes"]
            if made["packing"] == "convolution":
                found, unused = self._convolution(layer, made, shape, spare, offset, view)
                pieces += found
                scratch += unused
            else:
                (state,) = made["states"]
                strides = [prod(shape[axis + 1 :]) * size for axis in range(len(shape))]
                if self._is_transposed(layer, spec, tensor, tensors, size):
                    strides[1:] = [size, shape[1] * size]
                where = view.at(offset, strides, token=0)
                pieces.append(self._piece(layer, None, state, where))
            offset += prod(shape) * size
        if dead := spec.state_content_size_bytes - offset:
            at = {"region": view.region, "offset": view.offset + offset, "block": view.block}
            scratch.append({**at, "run": dead, "dims": []})
        return pieces, scratch

    def _sizes(
        self, layer: str, kind: str, shapes: Sequence[Sequence[int]], ranks: int, spare: int
    ) -> dict[str, int]:
        """The sizes of a recurrent layer in the whole model, from its shapes on this rank. Where several
        ranks may hold the same part, the model's class decides."""
        needed: list[str] = specs.KINDS[kind]["sizes"]
        hint = "; say how many groups there are with `mamba_groups`" if "groups" in needed else ""

        def solved(
            shapes: Sequence[Sequence[int]], told: dict[str, int], ranks: int, by_column: bool
        ) -> dict[str, int]:
            held = specs.recurrent_shapes(layer, shapes, kind, by_column, spare)
            try:
                return solve(kind, held, told, ranks=ranks)
            except (OverflowError, ValueError) as error:
                raise refuse(layer, f"{error}{hint}") from error

        told = {}
        if self.mamba_groups is not None and "groups" in needed:
            told["groups"] = self.mamba_groups
        sizes = solved(shapes, told, ranks, self.by_column)
        if len(sizes) < len(needed) and ranks > 1:
            from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

            # The class speaks of the running engine, whose order may be another than that of what is described.
            alone = self.model.shapes_alone(layer, kind, hint)
            sizes = solved(alone, sizes, 1, not is_conv_state_dim_first())
            sizes = solved(shapes, sizes, ranks, self.by_column)
        if missing := [size for size in needed if size not in sizes]:
            raise refuse(
                layer,
                f"its shapes {list(shapes)} do not tell the sizes {', '.join(missing)} of its kind "
                f"'{kind}'{hint}",
            )
        return sizes

    def _is_transposed(
        self, layer: str, spec: Any, tensor: Any, tensors: Sequence[Fact], size: int
    ) -> bool:
        """Whether a delta net's state lies in memory by key and then by value, which its shape does not
        say: asked of its kernels; if they cannot be, those for CPUs look at it so."""
        from vllm.platforms import current_platform

        if self.backends.get(layer) != specs.DELTA_NET:
            return False
        lengths = {
            state["name"]: tuple(end - start for start, end in state["bounds"])
            for made in tensors
            for state in made["states"]
        }
        answer = self.asking.answer(layer, kernels.recurrent, spec, tensor, lengths)
        if answer is None:
            return bool(current_platform.is_cpu())
        at = answer.places("ssm", ("head", "value", "key"), size).at
        return at.shape[2] > 1 and int(at[0, 0, 1] - at[0, 0, 0]) != size

    def _convolution(
        self, layer: str, made: Fact, shape: tuple[int, ...], spare: int, offset: int, view: View
    ) -> tuple[list[Fact], list[Fact]]:
        """The sections of a convolution's channels, and the columns that speculative tokens use."""
        spare = spare if made["spare"] else 0
        columns, channels = shape if self.by_column else tuple(reversed(shape))
        size = made["states"][0]["kind"]["format"]["bytes"]
        channel, column = (size, channels * size) if self.by_column else (columns * size, size)
        pieces, at, live = [], offset, columns - spare
        for state in made["states"]:
            (first, end), _ = state["bounds"]
            where = view.at(at, [channel, column], token=0)
            pieces.append(self._piece(layer, None, state, where))
            at += (end - first) * channel
        if not spare:
            return pieces, []
        scratch = {
            "region": view.region,
            "offset": view.offset + offset + live * column,
            "block": view.block,
            "run": spare * (channels * size if self.by_column else size),
            "dims": [] if self.by_column else [[channels, columns * size]],
        }
        return pieces, [scratch]

    def _states(
        self,
        layer: str,
        kind: str,
        sizes: dict[str, int],
        formats: dict[str, tuple[str, int]],
        ranks: int,
    ) -> list[Fact]:
        """What this rank of `ranks` holds of a kind of states."""
        try:
            rank = self.tp_rank if ranks > 1 else 0
            return states(kind, sizes, formats, rank=rank, ranks=ranks)
        except ValueError as error:
            raise refuse(layer, str(error)) from error

    def _piece(self, layer: str, spec: Any | None, state: Fact, view: Fact) -> Fact:
        """A piece whose state is named without its layer. `spec` is that of a cache that grows with
        tokens."""
        kind = state["kind"]
        if spec is not None:
            kind = {**kind, "law": specs.law_of(layer, spec)}
        if kind not in self.kinds:
            self.kinds.append(kind)
        return {
            "state": state["name"],
            "kind": self.kinds.index(kind),
            "bounds": state["bounds"],
            "phase": self._phase(spec),
            "view": view,
        }

    def _phase(self, spec: Any | None) -> Fact:
        ranks = 1 if spec is None else self.turns(spec)
        if ranks == 1:
            return ALL_ENTRIES
        first = self.token_rank % ranks * self.turn
        return {"modulus": ranks * self.turn, "held": [first, first + self.turn]}


#: What is asked about each kind of pages.
_KERNELS: dict[Pages, Make] = {
    Pages.ATTENTION: kernels.attention,
    Pages.LATENT: kernels.latent,
    Pages.INDEXER: kernels.indexer,
    Pages.HIDDEN: kernels.nothing,
    Pages.RING: kernels.nothing,
    Pages.STATES: kernels.recurrent,
}


def _in_full(spec: Any, pages: Pages, described: dict[str, Places]) -> dict[str, Places]:
    """Records that are nothing but numbers of a byte each, number by number: a record's name says in
    which order they are."""
    if pages is Pages.ATTENTION and "kv" in described:
        numbers = {"k": spec.head_size, "v": spec.head_size_v}
        record = described["kv"]
    elif pages is Pages.LATENT and "latent" in described:
        numbers = {"latent": spec.head_size}
        record = described["latent"]
    else:
        return described
    if record.size != sum(numbers.values()) or record.axes[-1] == "dim":
        return described
    full, first = {}, 0
    for name, count in numbers.items():
        at = record.at[..., None] + first + np.arange(count)
        full[name] = Places((*record.axes, "dim"), at, 1)
        first += count
    return full


def _heads(state: Fact, formats: list[tuple[str, int]] | None) -> Iterator[tuple[Fact, int]]:
    """What is held of a state, and how many heads come before it: all heads at once, or, where each has a
    format of its own, a state for each of them."""
    if formats is None:
        yield state, 0
        return
    (first, _), *others = state["bounds"]
    for number, (name, size) in enumerate(formats):
        head = first + number
        kind = {**state["kind"], "format": {"name": name, "bytes": size}}
        bounds = [[head, head + 1], *others]
        yield {**state, "name": f"{state['name']}.{head}", "kind": kind, "bounds": bounds}, number


def _format(layer: str, dtype: Any, tensor: Any) -> tuple[str, int]:
    if tensor.dtype != dtype:
        raise refuse(layer, f"its spec says {dtype}, but its tensor holds {tensor.dtype}")
    return specs.format_of(layer, dtype)


def _bytes(state: Fact) -> int:
    """Bytes of one entry of what is held of a state."""
    lengths = (end - start for start, end in state["bounds"])
    return int(prod(lengths) * state["kind"]["format"]["bytes"])
