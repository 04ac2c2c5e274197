"""What is counted, for the Prometheus endpoint of every engine: by the same names behind the engine's own
(`vllm:kvferry_loads`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ._core import Ending, metrics

_TOLD = metrics()
#: The counters of both halves of an agent, and what they say.
COUNTS: dict[str, str] = _TOLD["counters"] | _TOLD["worker_counters"]
#: Where a load's time can go, in order.
PHASES = tuple(_TOLD["timings"])
OUTCOMES = tuple(_TOLD["outcomes"])
#: Why a load can fail: as the agent says, or because its lease was lost before it began.
REASONS = (*_TOLD["failures"], "lost")
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_BYTES = tuple(float(1 << power) for power in range(12, 38, 2))
_COPIES = tuple(float(4**power) for power in range(11))


def grown(counts: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """What counters have grown by."""
    more = {name: count - before.get(name, 0) for name, count in counts.items()}
    return {name: n for name, n in more.items() if n}


def refused(kind: str) -> dict[str, Any]:
    """A load that could not even begin, or (`cancelled`) that was not wanted any more before it did."""
    outcome, kind = ("aborted", "") if kind == "cancelled" else ("failed", kind)
    return {"outcome": outcome, "kind": kind, "bytes": 0, "copies": 0, "seconds": {}}


def ended(ending: Ending) -> dict[str, Any]:
    return {
        "outcome": ending.outcome,
        "kind": ending.kind,
        "bytes": ending.bytes,
        "copies": ending.copies,
        "seconds": ending.seconds,
    }


class Series:
    """The series of an engine. `counter` and `histogram` are the classes to make them of."""

    def __init__(
        self, engine: str, counter: Any, histogram: Any, labelnames: Sequence[str], counts: Mapping[str, str] = COUNTS
    ) -> None:
        def counted(name: str, says: str, *more: str) -> Any:
            return counter(name=f"{engine}:kvferry_{name}", documentation=says, labelnames=[*labelnames, *more])

        def measured(name: str, says: str, buckets: tuple[float, ...], *more: str) -> Any:
            labels = [*labelnames, *more]
            return histogram(name=f"{engine}:kvferry_{name}", documentation=says, buckets=buckets, labelnames=labels)

        self.counts = {name: counted(name, says) for name, says in counts.items()}
        says = "Requests that a rank of this engine loaded, by how each load ended."
        self.loads = counted("loads", says, "outcome", "reason")
        self.phases = measured("load_phase_seconds", "Where the time of completed loads went.", _SECONDS, "phase")
        self.seconds = measured("load_seconds", "How long completed loads took.", _SECONDS)
        self.bytes = measured("load_bytes", "Bytes that each completed load moved.", _BYTES)
        self.copies = measured("load_copies", "Copies that each completed load was made of.", _COPIES)

    def begin(self, labels: Sequence[object]) -> None:
        """A series that has counted nothing says so, rather than being absent: Prometheus does not see the growth of one
        that begins with 1, and an alert would miss the first event."""
        for metric in (*self.counts.values(), self.seconds, self.bytes, self.copies):
            metric.labels(*labels)
        for outcome in OUTCOMES:
            for reason in REASONS if outcome == "failed" else ("",):
                self.loads.labels(*labels, outcome, reason)
        for phase in PHASES:
            self.phases.labels(*labels, phase)

    def observe(self, labels: Sequence[object], counts: Mapping[str, int], loads: Iterable[Mapping[str, Any]]) -> None:
        """What counters have grown by, and loads that have ended."""
        for name, count in counts.items():
            if name in self.counts:
                self.counts[name].labels(*labels).inc(count)
        for load in loads:
            # Which request it was, where those are traced: for who reads OpenMetrics.
            said = {"exemplar": load["exemplar"]} if "exemplar" in load else {}
            self.loads.labels(*labels, load["outcome"], load["kind"]).inc(**said)
            if load["outcome"] != "done":
                continue
            self.seconds.labels(*labels).observe(sum(load["seconds"].values()), **said)
            self.bytes.labels(*labels).observe(load["bytes"])
            self.copies.labels(*labels).observe(load["copies"])
            for phase in PHASES:
                self.phases.labels(*labels, phase).observe(load["seconds"][phase])
