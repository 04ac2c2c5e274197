"""One layer's cache as pieces: kvferry's facts say which states it keeps and what of them a rank
holds; vLLM's spec says how large they are, and its tensor where they lie."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from .. import versions
from ..kernels import writers as kernels
from ..kernels.asking import Make, places
from ..kernels.probe import Places
from ..refusal import refuse
from . import specs
from .geometry import View
from .heads import Heads
from .rank import format_of
from .recurrent import Recurrent
from .specs import Fact, Pages


class Layers(Heads, Recurrent):
    """The layers of one rank, whatever they keep."""

    def describe(
        self, name: str, layer: str, spec: Any, tensor: Any, blocks: int, need: Fact | None
    ) -> tuple[list[Fact], list[Fact]]:
        """The pieces of a layer and the scratch beside them. Its states are called after `name`;
        `need` is what it looks at where that is less than what its group keeps."""
        pages = specs.pages_of(layer, spec, self.backends.get(layer))
        if getattr(getattr(self.asking.running(layer), "impl", None), "_shuffle_kv_layout", False):
            raise refuse(
                layer,
                f"since vLLM 0.33 the back end {self.backends.get(layer)} keeps keys and values in tiles on this GPU "
                "where VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT is set, and they are not described: start the engine without it",
            )
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

        def where() -> tuple[dict[str, Places], dict[str, Places]]:
            named = places(pieces, view, tokens)
            return _in_full(spec, pages, named), named

        writers = self.asking.check(layer, _KERNELS[pages], spec, tensor, view, pieces, where)
        for piece in pieces:
            piece["kind"] = self.number(piece["kind"], writers.get(piece["state"]))
            piece["state"] = f"{name}/{piece['state']}"
            piece["need"] = need
        return pieces, scratch

    def _latent(
        self, layer: str, spec: Any, tensor: Any, view: View
    ) -> tuple[list[Fact], list[Fact]]:
        """One vector for each token, the same on every rank."""
        specs.order_of(layer, self.backends.get(layer))
        cache, content = spec.cache_dtype_str, spec.state_content_size_bytes
        scales = specs.scales_of(layer, spec)
        if spec.state_content_bytes is None and scales is None:
            form = format_of(layer, spec.dtype, tensor)
            kind, sizes, formats = "latent", {"size": spec.head_size}, {"model": form}
        elif scales is specs.OF_THE_LAYER and spec.state_content_bytes is None:
            kind, sizes = "latent", {"size": spec.head_size}
            formats = {"model": self._scaled(layer)}
        elif content in specs.TWO_PARTS and spec.model_version is not None:
            return self._two_parts(layer, spec, tensor, view)
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

    def _two_parts(
        self, layer: str, spec: Any, tensor: Any, view: View
    ) -> tuple[list[Fact], list[Fact]]:
        """Latents whose scales are a state of their own."""
        content, entries = spec.state_content_size_bytes, tensor.shape[2]
        if view.token != content:
            raise refuse(layer, "a block of latents with scales of their own must lie in one piece")
        data, scales = specs.TWO_PARTS[content]
        name = f"{spec.cache_dtype_str} {content}"
        formats = {"record": (name, data), "scales": (f"{name} scales", scales)}
        (made,) = self._states(layer, "latent planes", {}, formats, 1)
        where = [(0, data), (data * entries, scales)]
        if content in specs.MOVED:
            where = self._moved(layer, spec, tensor, made["states"])
        pieces = [
            self._piece(layer, spec, state, view.at(offset, [], token=token))
            for state, (offset, token) in zip(made["states"], where, strict=True)
        ]
        return pieces, []

    def _moved(self, layer: str, spec: Any, tensor: Any, states: list[Fact]) -> list[tuple[int, int]]:
        """Where the first token's data and scales lie, and how far it is to the next token's: as the kernel that
        writes them answers, or else as this version of vLLM is known to do."""
        entries = tensor.shape[2]
        sizes = [state["kind"]["format"]["bytes"] for state in states]
        names = [state["name"] for state in states]
        answer = self.asking.answer(layer, kernels.latent, spec, tensor, {name: (entries,) for name in names})
        if answer is None:
            follows = versions.interleaves_v41_records()
            if follows is None:
                raise refuse(
                    layer,
                    f"records of {sum(sizes)} bytes a token (DeepSeek-V4.1 on Blackwell) lie in one order up to vLLM "
                    "0.32 and in another in 0.33, under the same name and size; the kernel that writes them cannot be asked "
                    f"here, and nobody has looked at vLLM {versions.running()}. Use one of {', '.join(versions.TRIED)}",
                )
            if follows:
                return [(0, sum(sizes)), (sizes[0], sum(sizes))]
            return [(0, sizes[0]), (sizes[0] * entries, sizes[1])]
        found = []
        for name, size in zip(names, sizes, strict=True):
            at = answer.places(name, ("token",), size).at
            stride = int(at[1] - at[0]) if entries > 1 else size
            if (at < 0).any() or stride < size or not (np.diff(at) == stride).all():
                raise refuse(
                    layer,
                    f"where the kernel of {self.backends.get(layer)} keeps '{name}' is not understood: "
                    f"{answer.places(name, ('token',), size)}",
                )
            found.append((int(at[0]), stride))
        return found

    def _hidden(
        self, layer: str, spec: Any, tensor: Any, view: View
    ) -> tuple[list[Fact], list[Fact]]:
        """Hidden states of several layers for each token, the same on every rank."""
        specs.order_of(layer, self.backends.get(layer))
        form = format_of(layer, spec.dtype, tensor)
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
        form = format_of(layer, spec.dtype, tensor)
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
            if sum(map(_bytes, made["states"])) != content:
                continue
            floats = specs.FLOAT_SCALES.get(kind)
            if floats is None or floats == self._has_float_scales(layer):
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

    def _has_float_scales(self, layer: str) -> bool:
        floats = versions.has_float_scales()
        if floats is None:
            raise refuse(
                layer,
                f"vLLM {versions.running()} does not say which numbers it writes as the scales of 8-bit indexer keys "
                "on this GPU: a float32, or four exponents (UE8M0) in the same four bytes. Use one of "
                f"{', '.join(versions.TRIED)}, or an indexer cache of 4 bits",
            )
        return floats


#: What is asked about each kind of pages.
_KERNELS: dict[Pages, Make] = {
    Pages.ATTENTION: kernels.attention,
    Pages.LATENT: kernels.latent,
    Pages.INDEXER: kernels.indexer,
    Pages.HIDDEN: kernels.nothing,
    Pages.RING: kernels.ring,
    Pages.STATES: kernels.recurrent,
}


def _in_full(spec: Any, pages: Pages, described: dict[str, Places]) -> dict[str, Places]:
    """Records that are nothing but numbers of a byte each, number by number: a record's name says in
    which order they are."""
    if pages is Pages.ATTENTION and "kv" in described:
        numbers = {"k": spec.head_size, "v": spec.head_size_v}
        record = described["kv"]
    elif pages is Pages.LATENT and set(described) == {"latent"}:
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


def _bytes(state: Fact) -> int:
    """Bytes of one entry of what is held of a state."""
    lengths = (end - start for start, end in state["bounds"])
    return int(prod(lengths) * state["kind"]["format"]["bytes"])
