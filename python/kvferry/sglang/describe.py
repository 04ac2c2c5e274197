"""One rank's pools, as a manifest: what SGLang's pools are called, what lies where in them, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._core import Manifest, solve, states
from .._identity import identity, weights
from .._memory import FORMATS, Regions
from .._refusal import refuse

Fact = dict[str, Any]

#: By exact class, because what SGLang derives from one of these lies otherwise: the pools that are described.
POOLS = {
    "MHATokenToKVPool": "keys and values of heads, token by token",
    "MLATokenToKVPool": "a latent and a rotated key, token by token",
    "SWAKVPool": "two such pools, one of them for layers with a window",
    "HybridLinearKVPool": "such a pool, and one of states: a slot for a sequence",
}
#: The pool of states.
STATES = "MambaPool"
#: Classes that are refused, and why.
REFUSED = {
    "KVCache": "what all pools derive from",
    "BaseSWAKVPool": "what the pools with windows derive from",
    "MHATokenToKVPoolFP4": "keys and values of 4 bits are not described",
    "MHATokenToKVPoolMXFP8": "blocks of 8-bit numbers with scales of their own are not described",
    "MHATokenToKOnlyPool": "keys without values are not described",
    "NoOpMHATokenToKVPool": "it keeps nothing",
    "PageMajorMHATokenToKVPool": "all layers of a page lie together: leave out --enable-page-major-kv-layout",
    "MLATokenToKVPoolFP4": "latents of 4 bits are not described",
    "DSATokenToKVPool": "the indexer of sparse attention (DeepSeek-V3.2) is not described",
    "HiSparseDSATokenToKVPool": "HiSparse moves pages between the GPU and host memory",
    "HiSparseMHAMainPool": "HiSparse moves pages between the GPU and host memory",
    "HiSparseC4DevicePool": "HiSparse moves pages between the GPU and host memory",
    "DeepSeekV4SingleKVPool": "DeepSeek-V4 is not described",
    "DeepSeekV4UniformFP8KVPool": "DeepSeek-V4 is not described",
    "DeepSeekV4IndexerPool": "DeepSeek-V4 is not described",
    "DeepSeekV4TokenToKVPool": "DeepSeek-V4 is not described",
    "MiniMaxSparseKVPool": "MiniMax's sparse attention is not described",
    "MiniMaxM3Nvfp4IndexKPool": "MiniMax's sparse attention is not described",
    "MiniMaxM3Nvfp4MainKVPool": "MiniMax's sparse attention is not described",
    "MiniMaxM3Nvfp4KVPool": "MiniMax's sparse attention is not described",
    "QSATokenToKVPool": "Qwen's sparse attention is not described",
    "PageInterleaveMHATokenToKVPool": "pages are dealt out to several ranks",
    "PageInterleaveMLATokenToKVPool": "pages are dealt out to several ranks",
    "PageInterleaveDSATokenToKVPool": "pages are dealt out to several ranks",
    "UnifiedMHATokenToKVPool": "its pages move: leave out --enable-unified-memory",
    "UnifiedMLATokenToKVPool": "its pages move: leave out --enable-unified-memory",
    "UnifiedHybridLinearKVPool": "its pages move: leave out --enable-unified-memory",
    "UnifiedSWAKVPool": "its pages move: leave out --enable-unified-memory",
    "UnifiedDraftKVPool": "its pages move: leave out --enable-unified-memory",
    "UnifiedDraftSWAKVPool": "its pages move: leave out --enable-unified-memory",
}
#: What the recurrent layers of a family keep, by `model_type`. Which sections a convolution has is in no tensor.
RECURRENT = {
    "nemotron_h": "mamba2",
    "falcon_h1": "mamba2",
    "granitemoehybrid": "mamba2",
    "qwen3_next": "gdn",
    "qwen3_5": "gdn",
    "qwen3_5_text": "gdn",
    "qwen3_5_moe": "gdn",
    "qwen3_5_moe_text": "gdn",
    "kimi_linear": "kda",
    "lfm2": "short conv",
    "lfm2_moe": "short conv",
}

#: Families whose layers with a window lie in the pool of the others, and which layers these are `layer_types` says.
SIGHTED = ("gemma3_text",)

ALL_ENTRIES = {"modulus": 1, "held": [0, 1]}
FULL: Fact = {"tokens": None, "chunk": 1, "extra": 0}


@dataclass
class Table:
    """Where the block table of a group comes from: the request's pages, or a state component of SGLang's (by its number)."""

    source: str
    component: int = 0
    #: Tokens in a page; None for what a sequence has once.
    page: int | None = None
    window: bool = False


@dataclass
class Described:
    manifest: Manifest
    tables: list[Table]
    #: What keeps the memory alive.
    memory: list[Any] = field(default_factory=list)


class Rank:
    """One of an engine's tensor-parallel ranks."""

    def __init__(
        self,
        model: Any,
        components: Sequence[str],
        window: int | None,
        rank: int,
        ranks: int,
        *,
        prefills: bool = True,
        caches_prefixes: bool = True,
        tries_others: bool = False,
    ) -> None:
        #: SGLang's configuration of the model.
        self.model = model
        #: Its state components, in its order.
        self.components = components
        #: How far back layers with a window look, the token itself not counted.
        self.window = window
        self.rank, self.ranks, self.prefills = rank, ranks, prefills
        #: Whether later requests may use pages again, and whether it takes from engines of other kinds what was not shown.
        self.caches_prefixes, self.tries_others = caches_prefixes, tries_others
        self.regions = Regions()
        self.kinds: list[Fact] = []
        self.groups: list[Fact] = []
        self.tables: list[Table] = []
        self.memory: list[Any] = []

    def describe(self, engine: str, pool: Any) -> Described:
        for layers, table, states_too in self._parts(pool):
            if states_too:
                self._states(layers, table)
            else:
                self._tokens(layers, table)
        path, revision = str(self.model.model_path), getattr(self.model, "revision", None)
        form, _ = FORMATS[str(self.model.dtype)]
        draft = {
            "identity": identity(
                "SGLang",
                path,
                self.model,
                form,
                weights(path, revision),
                gives=self.prefills,
                takes=not self.prefills,
                tries_others=self.tries_others,
            ),
            "engine": engine,
            "rank": self.rank,
            "label": f"tp{self.rank}",
            "regions": self.regions.list,
            "kinds": self.kinds,
            "groups": self.groups,
        }
        return Described(Manifest(draft), self.tables, self.memory)

    def _parts(self, pool: Any) -> Iterator[tuple[Any, Table, bool]]:
        """The pools that a pool is made of, the table of each, and whether it holds states."""
        name = check(pool)
        if name == "SWAKVPool":
            if pool.full_layer_nums:
                yield pool.full_kv_pool, Table("pages", page=pool.page_size), False
            yield pool.swa_kv_pool, Table("component", self._component("swa"), pool.page_size, window=True), False
        elif name == "HybridLinearKVPool":
            yield pool.full_kv_pool, Table("pages", page=pool.page_size), False
            yield pool.mamba_pool, Table("component", self._component("mamba")), True
        else:
            yield pool, Table("pages", page=pool.page_size), False
        if rest := set(self.components) - {"swa", "mamba"}:
            raise refuse("", f"SGLang keeps states that are not described beside the cache: {', '.join(sorted(rest))}")

    def _component(self, name: str) -> int:
        if name not in self.components:
            raise refuse("", f"SGLang does not name its states '{name}' among {list(self.components)}")
        return self.components.index(name)

    def _tokens(self, pool: Any, table: Table) -> None:
        """Layers that keep something of each token."""
        check(pool)
        size, window = pool.page_size, FULL
        if table.window:
            if self.window is None:
                raise refuse("", "SGLang does not say how far its layers with a window look")
            window = {"tokens": self.window + 1, "chunk": 1, "extra": 0}
        pieces = []
        for at, layer in enumerate(pool.model_layer_ids):
            name = f"layers.{layer}"
            if hasattr(pool, "kv_buffer"):
                tensors = [pool.kv_buffer[at]]
                sizes = {"size": tensors[0].shape[2]}
                held = self._held(name, "latent", sizes, {"model": _format(name, pool, tensors[0])}, 1)
            else:
                tensors = [pool.k_buffer[at], pool.v_buffer[at]]
                heads = self._heads(name, tensors[0].shape[1], table.window)
                sizes = {"heads": heads, "key": tensors[0].shape[2], "value": tensors[1].shape[2]}
                held = self._held(name, "attention", sizes, {"model": _format(name, pool, tensors[0])}, self.ranks)
            for state, tensor in zip(held[0]["states"], tensors, strict=True):
                token, *axes = _strides(tensor)
                where = self._view(tensor, 0, token * size, token, axes[-len(state["bounds"]) :])
                pieces.append(self._piece(name, state, where) | {"need": self._sight(layer, table)})
        blocks = (pool.size + size) // size
        self._group("window" if table.window else "full", table, blocks, window, pieces)

    def _sight(self, layer: int, table: Table) -> Fact | None:
        """How far back a layer looks whose pool keeps everything, where no other request may use its pages again: then the
        other engine need not have kept more."""
        text = self.model.hf_text_config
        if table.window or self.caches_prefixes or str(text.model_type) not in SIGHTED:
            return None
        sliding = text.layer_types[layer] == "sliding_attention"
        return {"tokens": int(text.sliding_window), "chunk": 1, "extra": 0} if sliding else None

    def _heads(self, name: str, local: int, window: bool) -> int:
        """KV heads of a layer in the whole model, of which this rank holds `local`. Where that is one, it may be a share
        or one of several copies: then the configuration decides."""
        if local > 1 or self.ranks == 1:
            return local * self.ranks
        total = int(self.model.get_total_num_kv_heads())
        if window:
            total = int(getattr(self.model.hf_text_config, "swa_num_key_value_heads", None) or total)
        if max(1, total // self.ranks) != local:
            raise refuse(name, f"this rank of {self.ranks} holds {local} KV head, but the model has {total} in all")
        return total

    def _states(self, pool: Any, table: Table) -> None:
        """Recurrent layers: a convolution's last columns, and a state."""
        cache, family = pool.mamba_cache, str(self.model.hf_text_config.model_type)
        if type(pool).__name__ != STATES:
            raise refuse("", f"states in a pool of the kind {type(pool).__name__} are not described")
        kind = RECURRENT.get(family)
        if kind is None:
            raise refuse("", unseen(f"the recurrent layers of '{family}'"))
        extra = [name for name in ("replayssm_d", "replayssm_rawv") if getattr(cache, name, None) is not None]
        if extra or pool._slot_siblings or len(cache.conv) != 1:
            raise refuse("", f"states of {family} with {len(cache.conv)} convolutions and more beside them are not described")
        conv, ssm = cache.conv[0], cache.temporal
        shape = self._shape()
        by_column = getattr(shape, "conv_slice_axis", 0) == 1
        columns, channels = conv.shape[2:] if by_column else reversed(conv.shape[2:])
        formats = {"model": _named(conv)}
        shapes = [[channels, columns]]
        if kind != "short conv":
            formats["state"] = _named(ssm)
            shapes.append(list(ssm.shape[2:]))
        held = self._held(family, kind, self._sizes(family, kind, shapes, shape), formats, self.ranks)
        pieces = []
        for at, layer in enumerate(pool.mamba_layer_ids):
            for made in held:
                if made["packing"] != "convolution":
                    (state,) = made["states"]
                    slot, *axes = _strides(ssm[at])
                    pieces.append(self._piece(f"layers.{layer}", state, self._view(ssm[at], 0, slot, 0, axes)))
                    continue
                slot, *axes = _strides(conv[at])
                channel, column = reversed(axes) if by_column else axes
                offset = 0
                for state in made["states"]:
                    where = self._view(conv[at], offset, slot, 0, [channel, column])
                    pieces.append(self._piece(f"layers.{layer}", state, where))
                    first, end = state["bounds"][0]
                    offset += (end - first) * channel
        self._group("states", table, conv.shape[1], FULL, pieces)

    def _shape(self) -> Any:
        """What SGLang says of its states' shapes: of all ranks together, but for the tensors' own."""
        from sglang.srt.configs.hybrid_arch import mambaish_config

        return mambaish_config(self.model).mamba2_cache_params.shape

    def _sizes(self, family: str, kind: str, shapes: Sequence[Sequence[int]], shape: Any) -> dict[str, int]:
        """The sizes of the states in the whole model. How many groups or key heads there are does not follow from what a
        rank holds where several hold the same."""
        told = {}
        text = self.model.hf_text_config
        if kind == "mamba2":
            told["groups"] = int(getattr(text, "n_groups", None) or text.mamba_n_groups)
        elif kind == "gdn":
            told["keys"] = int(shape.conv_shard_groups[0] // shape.state_size)
        try:
            return solve(kind, shapes, told, ranks=self.ranks)
        except (OverflowError, ValueError) as error:
            raise refuse("", f"the states of {family} have shapes {list(shapes)}, not those of its kind: {error}") from error

    def _held(self, name: str, kind: str, sizes: dict[str, int], formats: dict[str, tuple[str, int]], ranks: int) -> list[Fact]:
        try:
            return states(kind, sizes, formats, rank=self.rank if ranks > 1 else 0, ranks=ranks)
        except ValueError as error:
            raise refuse(name, str(error)) from error

    def _view(self, tensor: Any, offset: int, block: int, entry: int, axes: list[int]) -> Fact:
        known = len(self.regions.list)
        region = self.regions.index(tensor)
        if len(self.regions.list) > known:
            self.memory.append(tensor)
        offset += tensor.storage_offset() * tensor.element_size()
        return {"region": region, "offset": offset, "block": block, "kernel": None, "entry": entry, "axes": axes}

    def _piece(self, name: str, state: Fact, view: Fact) -> Fact:
        if state["kind"] not in self.kinds:
            self.kinds.append(state["kind"])
        return {
            "state": f"{name}/{state['name']}",
            "kind": self.kinds.index(state["kind"]),
            "bounds": state["bounds"],
            "phase": ALL_ENTRIES,
            "need": None,
            "view": view,
        }

    def _group(self, name: str, table: Table, blocks: int, window: Fact, pieces: list[Fact]) -> None:
        self.groups.append(
            {
                "name": f"{len(self.tables)} {name}",
                "blocks": blocks,
                # Page and slot 0 belong to nobody.
                "null_block": 0,
                "tokens_per_block": table.page,
                "window": window,
                "pieces": pieces,
                "scratch": [],
            }
        )
        self.tables.append(table)


def check(pool: Any) -> str:
    """A pool's class, if its layout is known."""
    name = type(pool).__name__
    if name not in POOLS:
        raise refuse("", f"SGLang's pool {name}: {REFUSED[name]}" if name in REFUSED else unseen(f"pools of the kind {name}"))
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        raise refuse("", f"pages in the layout '{layout}' are not described: unset SGLANG_USE_HND_KVCACHE, and let "
                         "SGLANG_AITER_KV_CACHE_LAYOUT be nhd")
    if getattr(pool, "is_quantized_kv_cache", False) or getattr(pool, "store_dtype", pool.dtype) != pool.dtype:
        raise refuse("", f"a quantised cache ({pool.dtype}) is not described: let --kv-cache-dtype be auto")
    for name, why in (
        ("post_capture_active", "its memory is not all there when it is described"),
        ("layer_shard_enabled", "its layers are dealt out to several ranks"),
    ):
        if getattr(pool, name, False):
            raise refuse("", f"a pool with '{name}' is not described: {why}")
    return type(pool).__name__


def unseen(what: str) -> str:
    """What is refused because nobody has looked at it: never guessed."""
    return f"{what} have not been seen before; please report it with the model and SGLang's version"


def dump(manifest: Manifest) -> None:
    """Writes a manifest for `kvferry plan` and `kvferry explain` into the folder that KVFERRY_DUMP_MANIFEST names."""
    if folder := os.environ.get("KVFERRY_DUMP_MANIFEST"):
        path = Path(folder) / f"{manifest.engine}-{manifest.label}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(manifest.to_json())


def _format(name: str, pool: Any, tensor: Any) -> tuple[str, int]:
    if tensor.dtype != pool.dtype:
        raise refuse(name, f"its pool says {pool.dtype}, but its tensor holds {tensor.dtype}")
    return _named(tensor)


def _named(tensor: Any) -> tuple[str, int]:
    form = FORMATS.get(str(tensor.dtype))
    if form is None:
        raise refuse("", f"a cache of {tensor.dtype} is not described")
    return form


def _strides(tensor: Any) -> list[int]:
    """In bytes."""
    return [stride * tensor.element_size() for stride in tensor.stride()]
