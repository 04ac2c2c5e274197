"""When D takes blocks for a request that P still computes: they are of no use to anybody else meanwhile.

D needs them for as long as the transfer takes, so that it is over when P is: what is left of P's work and
what the transfer needs are both known from before.
"""

from __future__ import annotations

from typing import Any

#: Seconds from when D takes blocks until its workers read, with time to spare: steps of an engine.
AHEAD = 0.1
#: How much longer a transfer may take than is known.
MARGIN = 1.25
#: How much of what is new counts for what is known.
WEIGHT = 0.25
#: Below this share of free blocks they are taken only when P has finished; above the other one also for
#: what P has not begun.
SHORT, PLENTY = 0.125, 0.5


class Pace:
    def __init__(self) -> None:
        #: Seconds a token: of transfers, and of the engines that compute. For these by how long a prompt is, to a power
        #: of two: attention takes longer with every token.
        self.transfer: float | None = None
        self.compute: dict[str, dict[int, float]] = {}

    def is_time(self, frontier: dict[str, Any], age: float, tokens: int, free: float) -> bool:
        """Whether to take blocks for a request of so many tokens. The frontier was news `age` seconds ago;
        `free` is the share of blocks that is free."""
        if frontier["sealed"]:
            return True
        if free < SHORT:
            return False
        begun = frontier["begun"]
        if not begun and free < PLENTY:
            # It may wait on P for long.
            return False
        speed, known = frontier["speed"], self.compute.get(frontier["ticket"]["engine"], {})
        # Of another length only: rather too early.
        quickest = min(known.values(), default=None)
        each = 1 / speed if speed else known.get(_class(tokens), quickest)
        if each is None:
            # The first one: there is something to learn from it.
            return True
        # P tells of whole steps, and computes meanwhile.
        left: float = (tokens - frontier["tokens"]) * each - (age if begun else 0.0)
        return left <= AHEAD + MARGIN * tokens * (self.transfer or 0.0)

    def learn(self, frontier: dict[str, Any] | None, tokens: int, seconds: float) -> None:
        """A request was loaded: so many tokens took so long on the wire."""
        if seconds > 0 and tokens > 0:
            each = seconds / tokens
            # Slower than thought: one that comes late costs a user time, one that comes early only blocks.
            late = self.transfer is not None and each > self.transfer
            self.transfer = each if late else _blend(self.transfer, each)
        if frontier is not None and frontier["speed"]:
            known = self.compute.setdefault(frontier["ticket"]["engine"], {})
            length = _class(frontier["tokens"])
            known[length] = _blend(known.get(length), 1 / frontier["speed"])


def _class(tokens: int) -> int:
    """Of lengths that are taken for one. Powers of two are not where one ends: P may leave a token to D."""
    return (tokens + tokens // 4).bit_length()


def _blend(known: float | None, new: float) -> float:
    return new if known is None else (1 - WEIGHT) * known + WEIGHT * new
