"""What the layers of one rank have in common: its place among the ranks, and how a piece is written down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..._core import states
from ..._memory import Regions
from ..kernels.asking import Asking
from ..refusal import refuse
from . import specs
from .model import Model
from .specs import Fact

#: Every entry of a state.
ALL_ENTRIES = {"modulus": 1, "held": [0, 1]}


class Rank:
    """One rank, and what is known of the model that it is part of."""

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
        #: The kinds of states, and by number who writes them, where that is said.
        self.kinds: list[Fact] = []
        self.writers: dict[int, Fact] = {}
        self.asking = Asking(vllm_config)

    def turns(self, spec: Any) -> int:
        """Ranks that take turns at a block's tokens."""
        return self.dcp_size if spec.dcp_sharded else 1

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
        """A piece whose state is named without its layer, and whose kind has no number yet. `spec` is that of a cache
        that grows with tokens."""
        kind = state["kind"]
        if spec is not None:
            kind = {**kind, "law": specs.law_of(layer, spec)}
        return {
            "state": state["name"],
            "kind": kind,
            "bounds": state["bounds"],
            "phase": self._phase(spec),
            "view": view,
        }

    def number(self, kind: Fact, writer: Fact | None) -> int:
        """That of a kind of states that are written so."""
        for number, known in enumerate(self.kinds):
            if known == kind and self.writers.get(number) == writer:
                return number
        self.kinds.append(kind)
        if writer is not None:
            self.writers[len(self.kinds) - 1] = writer
        return len(self.kinds) - 1

    def _phase(self, spec: Any | None) -> Fact:
        ranks = 1 if spec is None else self.turns(spec)
        if ranks == 1:
            return ALL_ENTRIES
        first = self.token_rank % ranks * self.turn
        return {"modulus": ranks * self.turn, "held": [first, first + self.turn]}


def format_of(layer: str, dtype: Any, tensor: Any) -> tuple[str, int]:
    if tensor.dtype != dtype:
        raise refuse(layer, f"its spec says {dtype}, but its tensor holds {tensor.dtype}")
    return specs.format_of(layer, dtype)
