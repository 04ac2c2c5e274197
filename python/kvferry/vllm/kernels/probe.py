"""Where an engine's kernels put what they are given, asked of the kernels themselves.

vLLM hands every back end a block as a tensor, but a kernel is free in what it makes of the bytes. So it
is made to write a block of scratch memory again and again, each time with other signs on its input: those
of every second head, of every second pair of heads, and so on along each axis. Which of these changes a
byte follows says what the byte holds. No value has to survive: rounding, scales and 8-bit formats all keep
a sign.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

#: Scratch memory that a question may take.
MOST_BYTES = 256 << 20
#: The block that is written: the first one is vLLM's null block, and kernels leave it alone.
BLOCK = 1


#: What a byte is before it is written.
POISON = 0xA5

#: Bits that are enough to count the numbers of a state.
_STATE = 40


class CannotAsk(Exception):
    """Why a kernel cannot be asked."""


class Kernel(Protocol):
    """What stores states in a block."""

    #: The lengths of the axes of each state that it stores, by the state's name. One that grows with
    #: tokens has these as its first axis.
    states: dict[str, tuple[int, ...]]
    #: What it is, for messages.
    writer: str
    #: What the bytes of a block are before it is called.
    blank: int

    def write(self, cache: Any, signs: Mapping[str, Any]) -> None:
        """Stores the same numbers each time in block `BLOCK` of `cache`, with these signs."""


@dataclass(frozen=True)
class Places:
    """Where the numbers of a state lie in a block, in bytes from its start."""

    axes: tuple[str, ...]
    #: By position on the axes. -1 where it is not known.
    at: Numbers
    #: Bytes of a number.
    size: int

    def __str__(self) -> str:
        lost = int((self.at < 0).sum())
        if lost:
            return "nowhere" if lost == self.at.size else f"without {lost} of {self.at.size} numbers"
        first = int(self.at.flat[0])
        strides = [
            int(np.take(self.at, 1, axis).flat[0]) - first if length > 1 else 0
            for axis, length in enumerate(self.at.shape)
        ]
        even = sum(
            np.arange(length).reshape([-1 if at == axis else 1 for at in range(self.at.ndim)]) * stride
            for axis, (length, stride) in enumerate(zip(self.at.shape, strides, strict=True))
        )
        words = [
            f"{stride} from {axis} to {axis}"
            for axis, stride, length in zip(self.axes, strides, self.at.shape, strict=True)
            if length > 1
        ]
        order = f"from byte {first}" + (f", {', '.join(words)}" if words else "")
        if np.array_equal(self.at, even + first):
            return order
        odd = np.argwhere(self.at != even + first)[0]
        place = ", ".join(f"{axis} {at}" for axis, at in zip(self.axes, odd, strict=True))
        return f"{order} at first, but {place} at byte {int(self.at[tuple(odd)])}"


@dataclass(frozen=True)
class Answer:
    """What a kernel's bytes were found to hold."""

    states: dict[str, tuple[int, ...]]
    #: The bytes that hold anything, from the block's start.
    bytes_: Numbers
    #: For each of them: which state by its place in `states`, and which of its numbers. -1 for a byte
    #: that changed as no single number does.
    state: Numbers
    number: Numbers
    #: Whether anything around the block changed.
    outside: bool
    #: The block after all signs were plus: numbers that are the same whatever the block's size.
    page: npt.NDArray[np.uint8]
    #: What wrote it.
    writer: str

    def digest(self, described: Places) -> str:
        """Of what was written of the first token and head at the places where it is described."""
        at = described.at[(0,) * sum(axis in ("token", "head") for axis in described.axes)]
        inside = at.reshape(-1, 1) + np.arange(described.size)
        return hashlib.sha256(self.page[inside].tobytes()).hexdigest()[:16]

    def places(self, name: str, axes: tuple[str, ...], size: int) -> Places:
        """Where a state's numbers of `size` bytes were found: the byte with the sign is a number's last."""
        lengths = self.states[name]
        at = np.full(int(np.prod(lengths)), -1, np.int64)
        own = (self.state == list(self.states).index(name)) & (self.number >= 0)
        at[self.number[own]] = self.bytes_[own] - (size - 1)
        return Places(axes, at.reshape(lengths), size)

    def differs(self, described: Mapping[str, Places]) -> str | None:
        """How a description differs from what was found, in words; None where it does not."""
        if self.outside:
            return "its kernel writes outside of the block that it is given"
        whole = 1 + max(
            int(self.bytes_.max(initial=0)),
            *(int(places.at.max()) + places.size for places in described.values()),
        )
        # For each byte the state and its number in one figure, which makes one array to look in.
        held = np.full(whole, -1, np.int64)
        for index, name in enumerate(self.states):
            places = described[name]
            numbers = np.arange(places.at.size) + (index << _STATE)
            for byte in range(places.size):
                held[places.at.ravel() + byte] = numbers
        wrong = held[self.bytes_] != np.where(self.number < 0, -2, self.number + (self.state << _STATE))
        for index, name in enumerate(self.states):
            own = self.state == index
            found = np.zeros(described[name].at.size, bool)
            found[self.number[own]] = True
            if wrong[own].any() or not found.all():
                places = described[name]
                written = self.places(name, places.axes, places.size)
                return f"'{name}' should lie {places}, but its kernel wrote it {written}"
        if wrong.any():
            byte = int(self.bytes_[wrong][0])
            return f"its kernel writes to byte {byte} of a block, where nothing is described"
        return None


def ask(kernel: Kernel, tensor: Any) -> Answer:
    """What `kernel` puts where in a block that lies as those of `tensor` do."""
    import torch

    cache, page, outside = _scratch(tensor, kernel.blank)
    signs = {
        name: torch.ones(lengths, device=tensor.device) for name, lengths in kernel.states.items()
    }
    with torch.inference_mode():
        kernel.write(cache, signs)
        first, beside = page.clone(), [part.clone() for part in outside]
        # All signs change first: what stays the same then holds nothing.
        everything, *rounds = _flips(kernel.states)
        _again(kernel, cache, page, signs, everything)
        held = torch.nonzero(page != first).flatten()
        strays = any(bool((now != then).any()) for now, then in zip(outside, beside, strict=True))
        before = first[held]
        labels = torch.zeros(len(held), dtype=torch.int64, device=tensor.device)
        for bit, flip in enumerate(rounds):
            _again(kernel, cache, page, signs, flip)
            labels |= (page[held] != before).to(torch.int64) << bit
        read = (kernel.states, held.cpu().numpy(), labels.cpu().numpy(), strays)
        return _read(*read, first.cpu().numpy(), kernel.writer)


def _again(kernel: Kernel, cache: Any, page: Any, signs: Mapping[str, Any], flip: _Flip) -> None:
    page.fill_(kernel.blank)
    kernel.write(cache, {name: _signed(signs[name], flip(name)) for name in signs})


def _scratch(tensor: Any, blank: int) -> tuple[Any, Any, list[Any]]:
    """Blocks that lie as those of `tensor` do, the bytes of one of them, and those around it."""
    import torch

    size = tensor.element_size()
    shape, strides = (BLOCK + 1, *tensor.shape[1:]), tensor.stride()
    block, page = strides[0], 1 + sum(
        (length - 1) * stride for length, stride in zip(shape[1:], strides[1:], strict=True)
    )
    whole = (BLOCK * block + page) * size
    if whole > MOST_BYTES:
        raise CannotAsk(f"{BLOCK + 1} of its blocks take {whole >> 20} MiB")
    memory = torch.full((whole,), blank, dtype=torch.uint8, device=tensor.device)
    cache = memory.view(tensor.dtype).as_strided(shape, strides)
    start, end = BLOCK * block * size, (BLOCK * block + page) * size
    return cache, memory[start:end], [memory[:start], memory[end:]]


class _Flip:
    """Which signs of a state change in one round: all of them, those of some states, or those of some
    positions on an axis."""

    def __init__(self, states: Mapping[str, tuple[int, ...]], axis: int | None, bit: int | None) -> None:
        self.states, self.axis, self.bit = states, axis, bit

    def __call__(self, name: str) -> tuple[int, Numbers] | bool:
        if self.bit is None:
            return True
        if self.axis is None:
            return bool(list(self.states).index(name) >> self.bit & 1)
        lengths = self.states[name]
        if self.axis >= len(lengths):
            return False
        return self.axis, 1 - 2 * (np.arange(lengths[self.axis]) >> self.bit & 1)


def _flips(states: Mapping[str, tuple[int, ...]]) -> list[_Flip]:
    rounds = [_Flip(states, None, None)]
    rounds += [_Flip(states, None, bit) for bit in range(_bits(len(states)))]
    for axis, longest in enumerate(_longest(states)):
        rounds += [_Flip(states, axis, bit) for bit in range(_bits(longest))]
    return rounds


def _longest(states: Mapping[str, tuple[int, ...]]) -> list[int]:
    most = max(len(lengths) for lengths in states.values())
    return [max((own[axis] for own in states.values() if axis < len(own))) for axis in range(most)]


def _bits(count: int) -> int:
    return (count - 1).bit_length()


def _signed(signs: Any, flip: tuple[int, Numbers] | bool) -> Any:
    import torch

    if isinstance(flip, bool):
        return -signs if flip else signs
    axis, along = flip
    shape = [-1 if at == axis else 1 for at in range(signs.dim())]
    return signs * torch.from_numpy(along).to(signs).view(shape)


def _read(
    states: dict[str, tuple[int, ...]],
    held: Numbers,
    labels: Numbers,
    outside: bool,
    page: npt.NDArray[np.uint8],
    writer: str,
) -> Answer:
    """What bytes hold, from the rounds in which they changed: a bit for each."""
    bits = _bits(len(states))
    state, labels = labels & ((1 << bits) - 1), labels >> bits
    positions = []
    for longest in _longest(states):
        bits = _bits(longest)
        positions.append(labels & ((1 << bits) - 1))
        labels = labels >> bits
    number = np.full(len(held), -1, np.int64)
    for index, lengths in enumerate(states.values()):
        own = state == index
        for axis, position in enumerate(positions):
            # A state without this axis does not change with it.
            own &= position < (lengths[axis] if axis < len(lengths) else 1)
        if own.any():
            number[own] = np.ravel_multi_index(
                [position[own] for position in positions[: len(lengths)]], lengths
            )
    return Answer(dict(states), held, np.where(number >= 0, state, -1), number, outside, page, writer)


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


def runs(places: Places, head: int) -> list[Run] | None:
    """Runs that put number `d` of token `t` and head `h` where it was found, heads being `head` bytes
    apart, or None if there are none. Axes are token, head, number."""
    at, size = places.at, places.size
    if (at < 0).any() or (at % size).any():
        return None
    if not (at == at[:, :1] + np.arange(at.shape[1])[:, None] * head).all():
        return None
    offsets = at[:, 0] // size
    tokens, numbers = offsets.shape
    by_token = (offsets[:, 0] - offsets[0, 0]).tolist()
    by_number = (offsets[0] - offsets[0, 0]).tolist()
    if not (offsets == offsets[:, :1] + (offsets[:1] - offsets[0, 0])).all():
        return None
    # Tokens: evenly, or evenly in tiles that lie evenly.
    token = by_token[1] if tokens > 1 else 1
    tile = next((t for t in range(tokens) if by_token[t] != t * token), tokens)
    tile_stride = by_token[tile] if tile < tokens else 0
    if any(where != t // tile * tile_stride + t % tile * token for t, where in enumerate(by_token)):
        return None
    if tile == tokens:
        tile = 0
    # Numbers: as few even runs as there are.
    found: list[Run] = []
    start = 0
    while start < numbers:
        end = start + 1
        step = by_number[end] - by_number[start] if end < numbers else 1
        while end < numbers and by_number[end] - by_number[end - 1] == step:
            end += 1
        first = int(offsets[0, 0]) + by_number[start]
        found.append(Run(start, end, first, tile, tile_stride, token, step))
        start = end
    # A view's strides have no sign.
    return None if any(min(run.token, run.tile_stride, run.number) < 0 for run in found) else found
