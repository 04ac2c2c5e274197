"""Layers that keep states of a fixed size for a whole sequence: Mamba, delta nets and their like."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ..._core import solve
from ..kernels import writers as kernels
from ..refusal import refuse
from . import specs
from .geometry import View
from .rank import Rank
from .specs import Fact


class Recurrent(Rank):
    """Such layers of one rank."""

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
