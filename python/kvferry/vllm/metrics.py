"""What the connector counts, for vLLM's Prometheus endpoint and its periodic log line.

The workers of D report every load that ended; they and the scheduler report what their agents' counters have
grown by. (How many leases are open is what was granted less what has ended: a gauge would stand still
with an idle engine. What an idle engine counts comes with its next step.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from .._core import Ending
from .._core import metrics as _told
from .scheduler import decode, keep
from .stock import source as stock

_TOLD = _told()
#: The counters of both halves of an agent, and what they say.
COUNTS = _TOLD["counters"] | _TOLD["worker_counters"] | decode.COUNTS | keep.COUNTS | stock.COUNTS
#: Where a load's time can go, in order.
PHASES = tuple(_TOLD["timings"])
OUTCOMES = tuple(_TOLD["outcomes"])
#: Why a load can fail: as the agent says, or because its lease was lost before it began.
REASONS = (*_TOLD["failures"], "lost")
_MIB = float(1 << 20)
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_BYTES = tuple(float(1 << power) for power in range(12, 38, 2))
_COPIES = tuple(float(4**power) for power in range(11))


@dataclass
class Stats(KVConnectorStats):
    """Plain data: it is sent from the workers to the scheduler, and from there to the server."""

    data: dict[str, Any] = field(default_factory=lambda: {"loads": [], "counts": {}})

    @classmethod
    def of_loads(cls, loads: list[dict[str, Any]]) -> Stats:
        """Each from `ended` or `refused`."""
        return cls({"loads": loads, "counts": {}})

    @classmethod
    def of_counts(cls, counts: Mapping[str, int], before: Mapping[str, int]) -> Stats:
        """What an agent's counters have grown by."""
        grown = {name: count - before.get(name, 0) for name, count in counts.items()}
        return cls({"loads": [], "counts": {name: n for name, n in grown.items() if n}})

    def reset(self) -> None:
        self.data = {"loads": [], "counts": {}}

    def is_empty(self) -> bool:
        return not self.data["loads"] and not self.data["counts"]

    def aggregate(self, other: KVConnectorStats) -> Stats:
        self.data["loads"].extend(other.data["loads"])
        counts = self.data["counts"]
        for name, count in other.data["counts"].items():
            counts[name] = counts.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """The log line: what must be seen at a glance. A load is one request on one rank."""
        loads, counts = self.data["loads"], self.data["counts"]
        done = [load for load in loads if load["outcome"] == "done"]
        seconds = sorted(sum(load["seconds"].values()) for load in done)
        mib = sum(load["bytes"] for load in done) / _MIB
        line: dict[str, int | float] = {"Loads": len(done)}
        if done:
            wire = sum(load["seconds"]["wire"] for load in done)
            line["Median load (ms)"] = round(seconds[len(seconds) // 2] * 1e3, 3)
            line["Worst load (ms)"] = round(seconds[-1] * 1e3, 3)
            line["MiB per load"] = round(mib / len(done), 3)
            line["Copies per load"] = round(sum(load["copies"] for load in done) / len(done), 1)
            line["MiB/s on the wire"] = round(mib / wire, 1) if wire else 0.0
        for outcome in OUTCOMES[1:]:
            line[f"Loads {outcome}"] = sum(load["outcome"] == outcome for load in loads)
        line["Leases granted"] = counts.get("leases_granted", 0)
        line["Leases confirmed"] = counts.get("leases_confirmed", 0)
        line["Leases expired"] = counts.get("leases_expired", 0)
        if recomputed := sum(count for name, count in counts.items() if name.startswith("prompts_recomputed:")):
            line["Prompts recomputed"] = recomputed
        for name in (
            "audits_mismatched",
            "confirmations_not_granted",
            "holds_lost",
            "refusals",
            "connections_turned_away",
            "connections_misbehaved",
            "data_connections_turned_away",
        ):
            if counts.get(name):
                line[name.replace("_", " ").capitalize()] = counts[name]
        return line


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


class PromMetrics(KVConnectorPromMetrics):
    """`vllm:kvferry_*`"""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self.counts = {
            name: counter(
                name=f"vllm:kvferry_{name}", documentation=says, labelnames=labelnames
            )
            for name, says in COUNTS.items()
        }
        self.loads = counter(
            name="vllm:kvferry_loads",
            documentation="Requests that a rank of this engine loaded, by how each load ended.",
            labelnames=[*labelnames, "outcome", "reason"],
        )
        self.recomputed = counter(
            name="vllm:kvferry_prompts_recomputed",
            documentation="Prompts that this engine computed although another one had, by the reason.",
            labelnames=[*labelnames, "reason"],
        )
        self.phases = histogram(
            name="vllm:kvferry_load_phase_seconds",
            documentation="Where the time of completed loads went.",
            buckets=_SECONDS,
            labelnames=[*labelnames, "phase"],
        )
        self.seconds = histogram(
            name="vllm:kvferry_load_seconds",
            documentation="How long completed loads took.",
            buckets=_SECONDS,
            labelnames=labelnames,
        )
        self.bytes = histogram(
            name="vllm:kvferry_load_bytes",
            documentation="Bytes that each completed load moved.",
            buckets=_BYTES,
            labelnames=labelnames,
        )
        self.copies = histogram(
            name="vllm:kvferry_load_copies",
            documentation="Copies that each completed load was made of.",
            buckets=_COPIES,
            labelnames=labelnames,
        )
        # A series that has counted nothing says so, rather than being absent: Prometheus does not see the growth
        # of one that begins with 1, and an alert would miss the first event.
        for labels in per_engine_labelvalues.values():
            for metric in (*self.counts.values(), self.seconds, self.bytes, self.copies):
                metric.labels(*labels)
            for why in decode.RECOMPUTED:
                self.recomputed.labels(*labels, why)
            for outcome in OUTCOMES:
                for reason in REASONS if outcome == "failed" else ("",):
                    self.loads.labels(*labels, outcome, reason)
            for phase in PHASES:
                self.phases.labels(*labels, phase)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data["counts"].items():
            family, _, reason = name.partition(":")
            if reason:
                self.recomputed.labels(*labels, reason).inc(count)
            elif family in self.counts:
                self.counts[family].labels(*labels).inc(count)
        for load in transfer_stats_data["loads"]:
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
