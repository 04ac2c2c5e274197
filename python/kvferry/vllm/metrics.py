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

from .. import _metrics
from .._metrics import OUTCOMES, REASONS, Series, ended, grown, refused
from .scheduler import decode, keep
from .stock import source as stock

__all__ = ["COUNTS", "OUTCOMES", "REASONS", "PromMetrics", "Stats", "ended", "refused"]

#: What is counted, and what it says.
COUNTS = _metrics.COUNTS | decode.COUNTS | keep.COUNTS | stock.COUNTS
_MIB = float(1 << 20)


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
        return cls({"loads": [], "counts": grown(counts, before)})

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
        self.series = Series("vllm", metric_types[Counter], metric_types[Histogram], labelnames, COUNTS)
        self.recomputed = metric_types[Counter](
            name="vllm:kvferry_prompts_recomputed",
            documentation="Prompts that this engine computed although another one had, by the reason.",
            labelnames=[*labelnames, "reason"],
        )
        for labels in per_engine_labelvalues.values():
            self.series.begin(labels)
            for why in decode.RECOMPUTED:
                self.recomputed.labels(*labels, why)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels, counts = self.per_engine_labelvalues[engine_idx], {}
        for name, count in transfer_stats_data["counts"].items():
            _, _, reason = name.partition(":")
            if reason:
                self.recomputed.labels(*labels, reason).inc(count)
            else:
                counts[name] = count
        self.series.observe(labels, counts, transfer_stats_data["loads"])
