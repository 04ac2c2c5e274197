"""In which order attention back ends keep the keys and values of a block, asked of vLLM's own kernel
where nothing else says it.

vLLM hands every back end a block as `[heads, tokens, content]`, but a back end is free in what it
makes of the bytes. Two sides fit only if each says what it makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from .refusal import refuse

@dataclass(frozen=True)
class Run:
    """Numbers `start` to `end` of every key (or value) of a block and head: those of token `t` lie at
    `offset + t // tile * tile_stride + t % tile * token + i * number`. All counted in elements from
    the head's start; `tile` is 0 where the tokens lie evenly."""

    start: int
    end: int
    offset: int
    tile: int
    tile_stride: int
    token: int
    number: int


def side_by_side(key: int, value: int, token: int) -> tuple[list[Run], list[Run]]:
    """Keys, then values, in each token's content; tokens `token` elements apart."""
    return [Run(0, key, 0, 0, 0, token, 1)], [Run(0, value, key, 0, 0, token, 1)]


def cpu(layer: str, dtype: Any, tokens: int, key: int, value: int) -> tuple[list[Run], list[Run]]:
    """The order that vLLM's CPU back end uses on this machine.

    It depends on the processor's instruction set: keys may be transposed, or in tiles. vLLM does not
    say so anywhere, so it is asked: it writes a block of numbered keys and values, and what was
    written where is the answer.
    """
    if key != value:
        raise refuse(layer, "the CPU back end keeps keys and values of one size only")
    found = _cpu(dtype, tokens, key)
    if isinstance(found, str):
        raise refuse(layer, found)
    return found


@cache
def _cpu(dtype: Any, tokens: int, size: int) -> tuple[list[Run], list[Run]] | str:
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, tokens, size)
    slots = torch.arange(tokens, dtype=torch.int64)
    token = torch.arange(tokens).view(tokens, 1, 1).expand(tokens, 1, size)
    number = torch.arange(size).view(1, 1, size).expand(tokens, 1, size)
    count = tokens * size

    def written(digits: Any, values: bool) -> Any:
        page = torch.zeros(1, 1, 2 * tokens, size, dtype=dtype)
        keys, vals = page.chunk(2, dim=2)
        marked = digits.to(dtype).contiguous()
        nothing = torch.zeros_like(marked)
        pair = (nothing, marked) if values else (marked, nothing)
        ops.cpu_attn_reshape_and_cache(*pair, keys, vals, slots, isa)
        return page.flatten().to(torch.int64)

    answer = []
    for values in (False, True):
        indices = []
        for index in (token, number):
            # Two digits, small enough to be exact in every format and never 0, which is what was
            # not written.
            low, high = written(index % 128 + 1, values), written(index // 128 + 1, values)
            indices.append(low - 1 + (high - 1) * 128)
        places = torch.nonzero(low).flatten()
        order = torch.argsort((indices[0] * size + indices[1])[places])
        offsets = places[order]
        if len(offsets) != count:
            return f"the CPU back end wrote {len(offsets)} of {count} numbers for a block"
        runs = _runs(offsets.view(tokens, size))
        if runs is None:
            return "the order in which the CPU back end keeps a block is not understood"
        answer.append(runs)
    return answer[0], answer[1]


def _runs(offsets: Any) -> list[Run] | None:
    """Runs that put number `d` of token `t` at `offsets[t, d]`, or None if there are none."""
    tokens, size = offsets.shape
    by_token = (offsets[:, 0] - offsets[0, 0]).tolist()
    by_number = (offsets[0] - offsets[0, 0]).tolist()
    if not (offsets == offsets[:, :1] + (offsets[:1] - offsets[0, 0])).all():
        return None
    # Tokens: evenly, or evenly in tiles that lie evenly.
    token = by_token[1] if tokens > 1 else 1
    tile = next((t for t in range(tokens) if by_token[t] != t * token), tokens)
    tile_stride = by_token[tile] if tile < tokens else 0
    if any(at != t // tile * tile_stride + t % tile * token for t, at in enumerate(by_token)):
        return None
    if tile == tokens:
        tile = 0
    # Numbers: as few even runs as there are.
    runs: list[Run] = []
    start = 0
    while start < size:
        end = start + 1
        step = by_number[end] - by_number[start] if end < size else 1
        while end < size and by_number[end] - by_number[end - 1] == step:
            end += 1
        first = int(offsets[0, 0]) + by_number[start]
        runs.append(Run(start, end, first, tile, tile_stride, token, step))
        start = end
    return runs
