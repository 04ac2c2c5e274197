"""What is counted reaches vLLM's Prometheus endpoint and its log line."""

import json
import pathlib
import pickle
import re

import pytest
from handmade import grant, load
from kvferry.vllm import FerryConnector, stock
from kvferry.vllm.metrics import COUNTS, Stats, ended, refused
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "vllm.md"
TRANSFER = KVTransferConfig(
    kv_connector="FerryConnector", kv_connector_module_path="kvferry.vllm", kv_role="kv_both"
)


class Config:
    kv_transfer_config = TRANSFER


@pytest.fixture
def seen(engines):
    """The stats of a load that was done on two ranks, one that failed, and the leases behind them, as
    the server's process gets them."""
    prefill, decode = engines("prefill", 1, 4), engines("decode", 2, 8)
    facts = dict(tokens=6, source_blocks=[[7, 2]], destination_blocks=[[3]])
    done = load(decode, "a", grant(prefill, "a", **facts), **facts)
    prefill.scheduler.released(60)
    failed = load(decode, "b", grant(prefill, "b", **facts), **facts | dict(source_blocks=[[7, 99]]))
    first, *others = [ended(ending) for ending in done + failed]
    stats = pickle.loads(pickle.dumps(Stats.of_loads([first])))
    stats = stats.aggregate(Stats.of_loads([*others, refused("lost")]))
    stats = stats.aggregate(Stats.of_counts(prefill.scheduler.counts(), {}))
    assert not stats.is_empty()
    # The agent's counters, and those of engines without kvferry, are those that have a description here.
    assert set(prefill.scheduler.counts()) | set(stock.COUNTS) == set(COUNTS)
    return json.loads(json.dumps(stats.to_dict())), done


def test_prometheus_has_every_load_and_lease(seen):
    data, done = seen
    registry = CollectorRegistry()
    kinds = {
        kind: (lambda kind: lambda **facts: kind(**facts, registry=registry))(kind)
        for kind in (Counter, Gauge, Histogram)
    }
    metrics = FerryConnector.build_prom_metrics(
        Config, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )

    def value(name, **labels):
        return registry.get_sample_value(f"vllm:kvferry_{name}", dict(model_name="m") | labels)

    assert value("leases_granted_total", engine="1") == 0
    metrics.observe(data, 1)
    for name, labels, expected in [
        ("loads_total", dict(outcome="done", reason=""), 2),
        ("loads_total", dict(outcome="failed", reason="bad_request"), 2),
        ("loads_total", dict(outcome="failed", reason="lost"), 1),
        ("loads_total", dict(outcome="expired", reason=""), 0),
        ("leases_granted_total", {}, 2),
        ("leases_confirmed_total", {}, 1),
        ("load_bytes_sum", {}, sum(ending.bytes for ending in done)),
        ("load_bytes_count", {}, 2),
        ("load_copies_sum", {}, sum(ending.copies for ending in done)),
        ("load_seconds_count", {}, 2),
        ("load_phase_seconds_count", dict(phase="wire"), 2),
    ]:
        assert value(name, engine="1", **labels) == expected, name
    assert value("loads_total", engine="0", outcome="done", reason="") == 0


def test_the_log_line_says_what_a_glance_must_show(seen):
    data, _ = seen
    log = KVConnectorLogging(TRANSFER)
    log.observe(data)
    log.observe(Stats.of_counts({"leases_expired": 5}, {"leases_expired": 2}).to_dict())
    # What it has added to is its own.
    assert len(data["loads"]) == 5 and "leases_expired" not in data["counts"]
    lines = []
    log.log(lambda form, *values: lines.append(form % values))
    (line,) = lines
    for part in ("Loads=2", "Loads failed=3", "Leases granted=2", "Leases expired=3", "MiB/s on"):
        assert part in line, line


def test_nothing_is_said_when_nothing_happened(engines):
    prefill = engines("prefill", 1, 4)
    counts = prefill.scheduler.counts()
    assert Stats.of_counts(counts, counts).is_empty() and Stats.of_loads([]).is_empty()
    log = KVConnectorLogging(TRANSFER)
    log.observe(Stats().to_dict())
    log.log(lambda *_: pytest.fail("a line for nothing"))


def test_the_page_names_every_metric():
    named = set(re.findall(r"`vllm:kvferry_(\w+)`", PAGE.read_text()))
    histograms = {"load_seconds", "load_phase_seconds", "load_bytes", "load_copies"}
    assert named == {f"{name}_total" for name in (*COUNTS, "loads")} | histograms
