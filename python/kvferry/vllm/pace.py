"""When D takes blocks for a request that P still computes: they are of no use to anybody else meanwhile.

D needs them for as long as the transfer takes, so that it is over when P is: what is left of P's work and
what the transfer needs are both known from before.
"""

from __future__ import annotations

from typing import Any

#: Seconds from when D takes blocks until its workers read, with time to spare: steps of an engine.
AHEAD = 0.1
#: How much of what is new counts for what is known.
WEIGHT = 0.25
#: Below this share of free blocks they are taken only when P has finished; above the other one also for
#: what P has not begun.
SHORT, PLENTY = 0.125, 0.5


class Pace:
    def __init__(self) -> None:
        #: Tokens a second: of transfers, and of the engines that compute.
        self.rate: float | None = None
        self.speeds: dict[str, float] = {}

    def is_time(self, frontier: dict[str, Any], tokens: int, free: float) -> bool:
        """Whether to take blocks for a request of so many tokens; `free` is the share that is free."""
        engine = frontier["ticket"]["engine"]
        if frontier["speed"]:
            self.speeds[engine] = _blend(self.speeds.get(engine), frontier["speed"])
        if frontier["sealed"]:
            return True
        if free < SHORT:
            return False
        begun = frontier["tokens"] > 0
        if not begun and free < PLENTY:
            # It may wait on P for long.
            return False
        speed = frontier["speed"] or self.speeds.get(engine)
        if speed is None:
            # The first one: whatever it costs, there is something to learn from it.
            return begun or free >= PLENTY
        left: float = max(0, tokens - frontier["tokens"]) / speed
        return left <= AHEAD + (tokens / self.rate if self.rate else 0.0)

    def moved(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long on the wire."""
        if seconds > 0:
            self.rate = _blend(self.rate, tokens / seconds)


def _blend(known: float | None, new: float) -> float:
    return new if known is None else (1 - WEIGHT) * known + WEIGHT * new
