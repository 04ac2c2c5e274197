"""vLLM's names: the only file of the connector that says what its spec classes, types of states and
attention back ends are called, and which of kvferry's facts they mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from fractions import Fraction
from typing import Any, NamedTuple

from ..._core import facts
from ..._memory import FORMATS
from ..refusal import refuse

Fact = dict[str, Any]

#: What is known of every kind of states.
KINDS: dict[str, Fact] = facts()["kinds"]


class Pages(Enum):
    """How a spec's pages are to be read."""

    ATTENTION = "keys and values of heads"
    LATENT = "one vector for each token, or for several"
    INDEXER = "the keys of a sparse-attention indexer and their scales"
    HIDDEN = "hidden states of several layers for each token"
    RING = "a ring of the last tokens' vectors, one for a sequence"
    STATES = "states of a fixed size, one slot for a sequence"


#: By exact class: a spec that vLLM derives from one of these means something else by its pages.
PAGES = {
    "FullAttentionSpec": Pages.ATTENTION,
    "SlidingWindowSpec": Pages.ATTENTION,
    "ChunkedLocalAttentionSpec": Pages.ATTENTION,
    # Its window is over generated tokens alone: after a prefill it keeps all.
    "RSWASpec": Pages.ATTENTION,
    # The sinks are parameters, which every engine writes into blocks of its own.
    "SinkFullAttentionSpec": Pages.ATTENTION,
    "MLAAttentionSpec": Pages.LATENT,
    "SlidingWindowMLASpec": Pages.LATENT,
    "HiddenStateCacheSpec": Pages.HIDDEN,
    "CircularBufferSpec": Pages.RING,
    "MambaSpec": Pages.STATES,
}
#: Classes that no layer's cache has: those that others derive from, and the one that wraps the specs of
#: layers that share a group.
NOT_A_CACHE = {
    "KVCacheSpec": "what all specs derive from",
    "AttentionSpec": "what the specs of attention derive from",
    "UniformTypeKVCacheSpecs": "wraps the specs of a group's layers, which are looked at one by one",
    "EncoderOnlyAttentionSpec": "keeps nothing: it has no blocks",
    "HiSparseHotSpec": "holds copies of pages in host memory, which move instead",
    "HiSparseResidentSpec": "holds copies of pages in host memory, which move instead",
}
#: Classes that are refused, and why.
REFUSED = {
    "CrossAttentionSpec": "what an encoder left has a length of its own, and vLLM itself runs no "
    "encoder-decoder model with a connector: start it without a connector",
}
#: Types of recurrent layers (`mamba_type`) and the kinds of states that they keep. Kimi's delta nets
#: share a type with the others and are a case of them.
RECURRENT = {
    "MAMBA1": "mamba1",
    "MAMBA2": "mamba2",
    "GDN_ATTN": "gdn",
    "SHORT_CONV": "short conv",
    "LINEAR": "linear",
}

#: What some engines keep behind a recurrent layer's states: a type, and how many tensors. It belongs to
#: tokens that are still being guessed or replayed, so it is dead after a prefill.
DEAD_AFTER_PREFILL = {
    # ReplaySSM: the inputs, steps and B of the tokens since its checkpoint.
    "MAMBA2": 3,
    # RecoverSSM: a record of the tokens that are being verified.
    "GDN_ATTN": 2,
}


class Order(Enum):
    """What a back end makes of the bytes of a block."""

    SIDE_BY_SIDE = "a token's key, then its value, head by head"
    APART = "keys of all heads in one slot, values in the other"
    CPU = "asked of the kernel: it depends on the processor"
    ROWS = "one vector after the other"
    INDEXER = "all keys of a kernel block, then all its scales"
    TILES = "keys, then scales, each in tiles of several tokens as aiter says"
    STATES = "states, one after the other"


def _orders(orders: dict[Order, str]) -> dict[str, Order]:
    return {name: order for order, names in orders.items() for name in names.split()}


#: Back ends by the names that they give themselves.
BACKENDS = _orders(
    {
        Order.SIDE_BY_SIDE: "FLASH_ATTN FLASH_ATTN_DIFFKV FLASHINFER FLEX_ATTENTION HPC_ATTN "
        "TRITON_ATTN TRITON_ATTN_DIFFKV ROCM_AITER_UNIFIED_ATTN QWEN4_EXP_QSA_TRITON "
        "MINIMAX_M3_SPARSE CUTLASS_MSA TRITON_MSA INKLING_SCONV_SWA TURBOQUANT ULTRAQUANT",
        Order.APART: "B12X ROCM_SEGMENTED_ATTN",
        Order.CPU: "CPU_ATTN",
        Order.ROWS: "AITER_TRITON_MLA AMX_MLA CACHE_ONLY_ATTN CPU_MLA CPU_V4_MLA_SPARSE CUTLASS_MLA "
        "CompressorBackend DEEPSEEK_SPARSE_SWA DOTS3_NOTE_PADDED_MLA_SPARSE FLASHINFER_MLA "
        "FLASHINFER_MLA_SPARSE FLASHINFER_MLA_SPARSE_DSV4 FLASHINFER_MLA_SPARSE_DSV41 "
        "FLASHINFER_MLA_SPARSE_SM120 FLASHINFER_MLA_SPARSE_SM90 FLASHMLA FLASHMLA_MEGA_ATTN_DSV41 "
        "FLASHMLA_SPARSE FLASHMLA_SPARSE_DSV4 FLASHMLA_SPARSE_DSV41 FLASH_ATTN_MLA "
        "FLASH_ATTN_MLA_SPARSE FLASH_ATTN_MLA_SPARSE_FA4 KPOOL_TAIL MINIMAX_M3_SPARSE_INDEXER QWEN4_EXP_EXP_QSA_STATE "
        "ROCM_AITER_MLA ROCM_AITER_MLA_SPARSE ROCM_FLASHMLA_SPARSE_DSV4 ROCM_FLASHMLA_SPARSE_DSV41 "
        "TOKENSPEED_MLA TRITON_MLA XPU_MLA_SPARSE XPU_V4_MLA_SPARSE",
        Order.INDEXER: "CPU_V4_INDEXER DEEPSEEK_V32_INDEXER DEEPSEEK_V4_INDEXER DEEPSEEK_V41_INDEXER "
        "DEEPSEEK_V41_SPARSE_INDEXER",
        Order.TILES: "DEEPSEEK_V41_ROCM_MXFP4_INDEXER DEEPSEEK_V4_ROCM_MXFP4_INDEXER",
        Order.STATES: "BAILING_LINEAR_ATTN GDN_ATTN KIMI_K3_KDA KIMI_K3_KDA_ROCM LINEAR_ATTN "
        "MAMBA1_ATTN MAMBA2_ATTN PLE_SHORT_CONV_ATTN SHORT_CONV_ATTN",
    }
)
#: Back ends that keep a token's keys and values one after the other in its content.
SIDE_BY_SIDE = frozenset(name for name, it in BACKENDS.items() if it is Order.SIDE_BY_SIDE)
#: Back ends that are refused, and why.
REFUSED_BACKENDS = {
    "ROCM_ATTN": "vLLM itself does not run it with a connector; choose ROCM_AITER_UNIFIED_ATTN",
}
#: The back end whose order depends on the processor.
CPU = "CPU_ATTN"
#: The back end of delta nets, whose CPU kernels keep a state by key and then by value.
DELTA_NET = "GDN_ATTN"

#: Connectors that hand requests over by parameters of the same names as ours.
HAND_OVER = frozenset(
    {
        "MoRIIOConnector",
        "MooncakeConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "P2pNcclConnector",
    }
)

#: Quantised caches. The scales of keys and values are in the page, with each token and head (or
#: latent), or they are numbers of the layer.
IN_THE_PAGE, OF_THE_LAYER = "in the page", "of the layer"
QUANTISED = {
    "NONE": None,
    "FP8_PER_TENSOR": OF_THE_LAYER,
    "INT8_PER_TOKEN_HEAD": IN_THE_PAGE,
    "FP8_PER_TOKEN_HEAD": IN_THE_PAGE,
    "INT4_PER_TOKEN_HEAD": IN_THE_PAGE,
    "NVFP4": IN_THE_PAGE,
    "NVFP4_DS_MLA": IN_THE_PAGE,
    "TURBOQUANT_K8V4": IN_THE_PAGE,
    "TURBOQUANT_4BIT_NC": IN_THE_PAGE,
    "TURBOQUANT_K3V4_NC": IN_THE_PAGE,
    "TURBOQUANT_3BIT_NC": IN_THE_PAGE,
    "ULTRAQUANT_4BIT": IN_THE_PAGE,
}


class Slots(Enum):
    """In which order keys and values have head slots of their own."""

    BY_SIDE = "the keys of all heads, then the values of all"
    BY_HEAD = "key and value of a head, then those of the next"


#: Back ends that keep quantised keys and values in head slots of their own.
SLOTS = {
    "FLASHINFER": Slots.BY_SIDE,
    "MINIMAX_M3_SPARSE": Slots.BY_HEAD,
    "CUTLASS_MSA": Slots.BY_HEAD,
    "TRITON_MSA": Slots.BY_HEAD,
}
#: Latents of DeepSeek-V4 and V4.1 that are two states, data and scales: by the bytes of both together, the bytes of
#: each. All other latents are one record after the other.
TWO_PARTS = {584: (576, 8), 528: (512, 16), 288: (256, 32)}
#: Those of them whose scales do not lie in the same place in every version of vLLM. The scales of the others lie behind
#: the data of all tokens of a kernel block.
MOVED = (528, 288)
#: Latents of so many bytes that are one record after the other, by the names of their formats.
SCALES_INSIDE = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}

#: The keys of indexers, by what their numbers and scales are.
INDEXERS = ("indexer", "indexer with exponents", "indexer 4 bits")
#: Those that only the engine tells apart, and whether their scales are floats.
FLOAT_SCALES = {"indexer": True, "indexer with exponents": False}


class Tiles(NamedTuple):
    """A block whose tokens are cut into tiles: in each, the first bytes of all of its tokens come first,
    then the next, and so on."""

    tokens: int
    bytes: int
    #: Scales are dealt out to so many lanes, each of which has those of all tokens of a tile; one for
    #: scales that lie token by token.
    lanes: int


def tiles_of(layer: str, backend: str | None, spec: Any, heads: int, size: int, entries: int) -> Tiles | None:
    """How an indexer's kernels cut its block, if they do."""
    if BACKENDS.get(backend or "") is Order.TILES:
        from vllm.v1.attention.ops.rocm_paged_mxfp4_indexer import rocm_paged_mxfp4_cache_layout

        try:
            told = rocm_paged_mxfp4_cache_layout(heads, size, entries)
        except (ImportError, ValueError) as error:
            raise refuse(layer, f"aiter does not say how it cuts a block: {error}") from error
        return Tiles(told.n_per_tile, told.d_per_tile, told.scale_lanes)
    # What is compressed by four is not cut, nor is a block of one token.
    if on_rocm() and entries > 1 and spec.tokens_per_state != 4:
        return Tiles(16, 16, 1)
    return None


def on_rocm() -> bool:
    """Whether the engine runs on AMD's GPUs."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_rocm())


def cut(
    tiles: Tiles | None, scales: bool, size: int
) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Where an indexer's keys or scales of `size` bytes a token lie: which of them, where the first
    token's are, and how far it is to the next token's."""
    if tiles is None or (scales and tiles.lanes == 1):
        yield (0, size), 0, size
    elif scales:
        deep = size // tiles.lanes
        for number in range(size):
            lane, depth = number % tiles.lanes, number // tiles.lanes
            yield (number, number + 1), lane * tiles.tokens * deep + depth, deep
    else:
        for first in range(0, size, tiles.bytes):
            yield (first, first + tiles.bytes), first * tiles.tokens, tiles.bytes


#: Every token is kept, or looked at.
FULL: Fact = {"tokens": None, "chunk": 1, "extra": 0}


def attention_backends() -> Iterator[tuple[str, Any]]:
    """vLLM's back ends of keys and values that can be loaded here, by name."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for name, member in AttentionBackendEnum.__members__.items():
        if member.value and "MLA" not in name:
            try:
                backend = member.get_class()
                backend.get_impl_cls()
            except Exception:
                # For another platform.
                continue
            yield name, backend


def pages_of(layer: str, spec: Any, backend: str | None = None) -> Pages:
    """How a layer's pages are to be read. The spec alone does not say which latents are the keys of an
    indexer: some models do not mark them, and others keep theirs as plain vectors."""
    name = type(spec).__name__
    pages = PAGES.get(name)
    if pages is None:
        why = REFUSED.get(name) or NOT_A_CACHE.get(name)
        raise refuse(layer, f"{name}: {why}" if why else _unseen(f"caches of the kind {name}"))
    if pages is Pages.LATENT:
        order = BACKENDS.get(backend or "")
        role = getattr(spec, "cache_role", None)
        marked = role is not None and role.value == "indexer"
        if order in (Order.INDEXER, Order.TILES) or (marked and order is not Order.ROWS):
            return Pages.INDEXER
    return pages


def order_of(layer: str, backend: str | None) -> Order:
    """What a layer's back end makes of a block."""
    order = BACKENDS.get(backend or "")
    if order is None:
        why = REFUSED_BACKENDS.get(backend or "")
        if why is None:
            why = _unseen(f"pages of the attention back end {backend}")
        raise refuse(layer, f"the attention back end {backend} is not described: {why}")
    return order


def scales_of(layer: str, spec: Any) -> str | None:
    """Where the scales of a quantised cache are."""
    mode = spec.kv_quant_mode
    # Of two names for one number nothing says which is meant: in vLLM 0.33 CUSTOM, for whatever a plug-in keeps, is
    # also OCTAVE_K3V4.
    called = [name for name, it in type(mode).__members__.items() if it is mode]
    if any(name not in QUANTISED for name in called):
        raise refuse(layer, _unseen(f"caches quantised as {' or '.join(called)}"))
    return QUANTISED[mode.name]


def _unseen(what: str) -> str:
    """What is refused because nobody has looked at it: never guessed."""
    return (
        f"{what} have not been seen before; please report it with the model, vLLM's version and the "
        "attention back end"
    )


def layer_spec(group: Any, layer: str) -> Any:
    """A layer's spec in its group. Where the group has one for all of its layers, it may be merged:
    it says of a window that some layer has it, not which."""
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return group.kv_cache_spec if by_layer is None else by_layer[layer]


def first_spec(spec: Any) -> Any:
    """The spec of a group, or of one of its layers where each has its own."""
    by_layer = getattr(spec, "kv_cache_specs", None)
    return spec if by_layer is None else next(iter(by_layer.values()))


def all_specs(spec: Any) -> list[Any]:
    """The specs of a group's layers."""
    by_layer = getattr(spec, "kv_cache_specs", None)
    return [spec] if by_layer is None else list(by_layer.values())


def is_state_group(spec: Any) -> bool:
    """Whether a group keeps states of a fixed size, one slot for a sequence."""
    return PAGES.get(type(first_spec(spec)).__name__) in (Pages.STATES, Pages.RING)


def current_slot(spec: Any, tokens: int) -> int:
    """Which of its blocks a group of states uses after so many tokens: a ring has one."""
    if PAGES.get(type(first_spec(spec)).__name__) is Pages.RING:
        return 0
    return (tokens - 1) // int(first_spec(spec).block_size)


def keeps_window(spec: Any) -> bool:
    """Whether a group keeps no more than what the next token can see."""
    return window_of(first_spec(spec)) != FULL


def is_clipped(spec: Any) -> bool:
    """Whether vLLM's own connector hands over no more of a group's table than its window."""
    return any(kind.__name__ == "SlidingWindowSpec" for kind in type(spec).__mro__)


def is_replayed(spec: Any) -> bool:
    """Whether a group's cache is rebuilt from the last tokens of a prefix that is already there."""
    return bool(spec.prefix_replay_tokens > 0)


def window_of(spec: Any) -> Fact:
    """The tokens that a spec keeps."""
    name = type(spec).__name__
    if name in ("SlidingWindowSpec", "SlidingWindowMLASpec"):
        return {"tokens": spec.sliding_window, "chunk": 1, "extra": spec.extra_retained_tokens}
    if name == "ChunkedLocalAttentionSpec":
        return {"tokens": 1, "chunk": spec.attention_chunk_size, "extra": 0}
    return FULL


def sight_of(spec: Any) -> Fact:
    """The tokens that a spec's layer looks at: fewer than are kept where vLLM keeps a sliding layer
    in full (no hybrid allocator, or pages that it cannot make equal)."""
    if type(spec).__name__ == "FullAttentionSpec":
        if spec.sliding_window is not None:
            return {"tokens": spec.sliding_window, "chunk": 1, "extra": 0}
        if spec.attention_chunk_size is not None:
            return {"tokens": 1, "chunk": spec.attention_chunk_size, "extra": 0}
    return window_of(spec)


def slides(window: Fact) -> bool:
    """Whether a window follows every token, unlike one that jumps from chunk to chunk."""
    return window["tokens"] is not None and window["chunk"] == 1


def word_of(spec: Any) -> str:
    """A word for messages."""
    if type(spec).__name__ == "MambaSpec":
        return str(spec.mamba_type.name).lower()
    return str(type(spec).__name__).removesuffix("Spec").lower()


def law_of(layer: str, spec: Any) -> Fact:
    """Entries that tokens add to a cache that grows with them."""
    rate = Fraction(spec.tokens_per_state)
    if rate <= 0:
        raise refuse(layer, f"a state for every {rate} tokens makes no sense")
    return {"entries": rate.denominator, "tokens": rate.numerator, "open": 0}


def format_of(layer: str, dtype: Any) -> tuple[str, int]:
    """The name and the bytes of a number."""
    form = FORMATS.get(str(dtype))
    if form is None:
        raise refuse(layer, f"numbers of type {dtype} are not described yet")
    return form


def eight_bits(layer: str, cache: str) -> str:
    """The format of 8-bit numbers that a cache data type means here."""
    from vllm.platforms import current_platform

    if cache == "fp8_e5m2":
        return FORMATS["torch.float8_e5m2"][0]
    named = FORMATS.get(str(current_platform.fp8_dtype()))
    if cache not in ("fp8", "fp8_e4m3") or named is None:
        raise refuse(layer, _unseen(f"8-bit caches of the data type {cache}"))
    return named[0]


def recurrent_kind(layer: str, spec: Any) -> str:
    """The kind of states that a recurrent layer keeps."""
    name = spec.mamba_type.name
    kind = RECURRENT.get(name)
    if kind is None:
        raise refuse(layer, _unseen(f"states of the type {name}"))
    tensors = KINDS[kind]["tensors"]
    extra = len(spec.shapes) - len(tensors)
    if extra not in (0, DEAD_AFTER_PREFILL.get(name)):
        names = [tensor["states"][0]["name"].partition(".")[0] for tensor in tensors]
        raise refuse(
            layer,
            _unseen(f"{name} states of shapes {list(spec.shapes)}, where {' and '.join(names)} belong,"),
        )
    return kind


def recurrent_shapes(
    layer: str, shapes: Sequence[Sequence[int]], kind: str, by_column: bool, spare: int
) -> list[list[int]]:
    """The shapes of a recurrent layer's states as kvferry's facts order their axes: channels come
    first, and the `spare` columns for speculative tokens do not count."""
    ordered = []
    for tensor, shape in zip(KINDS[kind]["tensors"], shapes, strict=False):
        lengths = list(shape)
        if tensor["packing"] == "convolution" and len(lengths) == 2:
            channels, columns = reversed(lengths) if by_column else lengths
            unused = spare if tensor["spare"] else 0
            if columns <= unused:
                raise refuse(layer, f"a convolution of {columns} columns has none left beside the "
                                    f"{unused} for speculative tokens")
            lengths = [channels, columns - unused]
        ordered.append(lengths)
    return ordered
