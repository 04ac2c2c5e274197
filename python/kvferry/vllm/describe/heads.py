"""Layers that keep keys and values of heads, or a vector for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..kernels import probe
from ..kernels import writers as kernels
from ..refusal import refuse
from . import specs
from .geometry import View
from .rank import Rank, format_of
from .specs import Fact


class Heads(Rank):
    """Such layers of one rank."""

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
            form = format_of(layer, spec.dtype, tensor)
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
