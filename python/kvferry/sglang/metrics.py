"""What a rank counts, for SGLang's `/metrics` (`--enable-metrics`): each of its processes writes to files that its
server reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from .._metrics import Series, grown

#: Seconds between two looks at what is counted inside.
_PAUSE = 1.0


class Metrics:
    def __init__(self, rank: int, counts: Callable[[], Mapping[str, int]]) -> None:
        # Not before SGLang has said where its processes write to.
        from prometheus_client import Counter, Histogram

        self.series = Series("sglang", Counter, Histogram, ["tp_rank"])
        self.labels, self.counts = [str(rank)], counts
        self.before: Mapping[str, int] = {}
        self.next = 0.0
        self.series.begin(self.labels)

    def tell(self, loads: list[dict[str, Any]], ended: bool) -> None:
        """Loads that have ended; and what else there is, when something has `ended` or a while has passed."""
        now = time.monotonic()
        if not loads and not ended and now < self.next:
            return
        self.next, counts = now + _PAUSE, self.counts()
        self.series.observe(self.labels, grown(counts, self.before), loads)
        self.before = counts
