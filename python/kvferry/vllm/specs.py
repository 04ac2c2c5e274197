"""vLLM's names: the only file of the connector that says what its spec classes, types of states and
attention back ends are called, and which of kvferry's facts they mean."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from fractions import Fraction
from typing import Any

from .._core import facts
from .refusal import refuse

Fact = dict[str, Any]

#: What is known of every kind of states.
KINDS: dict[str, Fact] = facts()["kinds"]
#: Names and sizes of formats, by what torch calls them.
FORMATS: dict[str, tuple[str, int]] = {
    f"torch.{called}": (name, int(it["bytes"]))
    for name, it in facts()["formats"].items()
    for called in it["names"]
}


class Pages(Enum):
    """How a spec's pages are to be read."""

    ATTENTION = "attention"
    LATENT = "latent"
    INDEXER = "indexer"
    STATES = "states"


#: By exact class: a spec that vLLM derives from one of these means something else by its pages.
_PAGES = {
    "FullAttentionSpec": Pages.ATTENTION,
    "SlidingWindowSpec": Pages.ATTENTION,
    "ChunkedLocalAttentionSpec": Pages.ATTENTION,
    "MLAAttentionSpec": Pages.LATENT,
    "SlidingWindowMLASpec": Pages.LATENT,
    "MambaSpec": Pages.STATES,
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

#: Back ends that keep a token's keys and values one after the other in its content.
SIDE_BY_SIDE = frozenset(
    {
        "FLASH_ATTN",
        "FLASH_ATTN_DIFFKV",
        "FLASHINFER",
        "FLEX_ATTENTION",
        "HPC_ATTN",
        "TRITON_ATTN",
        "TRITON_ATTN_DIFFKV",
    }
)
#: The back end whose order depends on the processor.
CPU = "CPU_ATTN"
#: The back end of delta nets, whose CPU kernels keep a state by key and then by value.
DELTA_NET = "GDN_ATTN"

#: Every token is kept, or looked at.
FULL: Fact = {"tokens": None, "chunk": 1, "extra": 0}


def pages_of(layer: str, spec: Any) -> Pages:
    name = type(spec).__name__
    pages = _PAGES.get(name)
    if pages is None:
        raise refuse(layer, f"caches of the kind {name} are not described yet")
    if pages is Pages.LATENT and getattr(spec, "cache_role", None) is not None:
        return Pages.INDEXER if spec.cache_role.value == "indexer" else pages
    return pages


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
    return _PAGES.get(type(first_spec(spec)).__name__) is Pages.STATES


def keeps_window(spec: Any) -> bool:
    """Whether a group keeps no more than what the next token can see."""
    return window_of(first_spec(spec)) != FULL


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


def recurrent_kind(layer: str, spec: Any) -> str:
    """The kind of states that a recurrent layer keeps."""
    name = spec.mamba_type.name
    kind = RECURRENT.get(name)
    if kind is None:
        raise refuse(layer, f"states of the type {name} are not described yet")
    tensors = KINDS[kind]["tensors"]
    if len(spec.shapes) != len(tensors):
        names = [tensor["states"][0]["name"].partition(".")[0] for tensor in tensors]
        raise refuse(
            layer,
            f"{name} states of shapes {list(spec.shapes)} are not described: it should be "
            f"{' and '.join(names)}. Run without ReplaySSM and RecoverSSM: what they keep beside "
            "these is dead after a prefill, but not described yet",
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
