"""One request that goes from pools to pools, and the judge of every byte of it."""

import ctypes
from dataclasses import dataclass
from typing import Any

import kvferry
import torch
from pools import poison


@dataclass
class Request:
    """A request that P has computed, and for which D has blocks. All other memory is poisoned."""

    source: Any
    target: Any
    tokens: int
    #: Block tables of the two sides.
    tables: list
    own: list
    cached: list
    #: What each layer of D is to hold, and from which token on: what P has forgotten cannot come.
    states: dict
    there: dict
    #: D's memory, rank by rank.
    before: list

    @property
    def words(self):
        """As plans are asked for it."""
        return dict(
            tokens=self.tokens,
            cached=self.cached,
            source_blocks=self.tables,
            destination_blocks=self.own,
        )

    def move(self):
        """Carries every copy out. Returns D's plans and the number of copies."""
        count, plans = 0, []
        for rank in self.target.ranks:
            plan = kvferry.compile(rank.manifest, [one.manifest for one in self.source.ranks])
            plans.append(plan)
            for copies in plan.copies(**self.words):
                for start, end, length in copies.tolist():
                    ctypes.memmove(end, start, length)
                count += len(copies)
        return plans, count

    def zero(self, plans):
        """Zeroes the rest of the request's own blocks, as vLLM wants it."""
        for plan in plans:
            for start, length in plan.rest(**self.words).tolist():
                ctypes.memset(start, 0, length)

    def check(self, zeroed):
        """Whether D's pools are what its own kernels make of what was there before."""
        found = [rank.memory.clone() for rank in self.target.ranks]
        for rank, memory in zip(self.target.ranks, self.before):
            rank.memory.copy_(memory)
        self.target.write(
            self.own, self.states, self.tokens, self.cached, zero=zeroed, there=self.there
        )
        for rank, memory in zip(self.target.ranks, found):
            wrong = torch.nonzero(rank.memory != memory).flatten()
            assert not len(wrong), (
                f"{rank.manifest.label}: {len(wrong)} of {len(memory)} bytes are wrong, the first at "
                f"{wrong[0]}"
            )
            rank.memory.copy_(memory)


def request(source, target, tokens, draw, cached=None, makers=None):
    """`makers` are the layers of P whose numbers other layers of D hold."""
    poison(source, 1)
    poison(target, 2)
    tables, own = source.tables(draw, tokens), target.tables(draw, tokens)
    states = {
        layer: kept.states(100 * number, tokens, source.side)
        for number, (layer, kept) in enumerate(source.layers.items())
    }
    source.write(tables, states, tokens)
    there = {
        layer: source.window(source.group_of(layer))(tokens) for layer in source.layers
    }
    for layer, maker in (makers or {}).items():
        states[layer], there[layer] = states[maker], there[maker]
    before = [rank.memory.clone() for rank in target.ranks]
    cached = cached or [0] * len(own)
    return Request(source, target, tokens, tables, own, cached, states, there, before)


def transfer(source, target, tokens, draw, cached=None, makers=None):
    """Moves one request and judges every byte. Returns the number of copies."""
    moved = request(source, target, tokens, draw, cached, makers)
    plans, count = moved.move()
    moved.check(zeroed=False)
    moved.zero(plans)
    moved.check(zeroed=True)
    return count
