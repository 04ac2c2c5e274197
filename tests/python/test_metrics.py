"""What is counted reaches vLLM's Prometheus endpoint and its log line."""

import json
import pathlib
import pickle
import re
import types

import pytest
from handmade import grant, load
from kvferry.vllm import FerryConnector
from kvferry.vllm.stock import source as stock
from kvferry.vllm.scheduler.decode import COUNTS as OF_DECODE
from kvferry.vllm.scheduler.decode import RECOMPUTED, recomputed
from kvferry.vllm.scheduler.keep import COUNTS as OF_KEEP
from kvferry.vllm.metrics import COUNTS, REASONS, Stats, ended, refused
from kvferry.vllm.worker.side import WorkerSide
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

ROOT = pathlib.Path(__file__).parents[2]
LABELLED = ("loads", "prompts_recomputed")
HISTOGRAMS = {"load_seconds", "load_phase_seconds", "load_bytes", "load_copies"}
TRANSFER = KVTransferConfig(
    kv_connector="FerryConnector", kv_connector_module_path="kvferry.vllm", kv_role="kv_both"
)


class Config:
    kv_transfer_config = TRANSFER


@pytest.fixture
def seen(engines):
    """The stats of a load that was done on two ranks, one that failed, the leases behind them, and what the
    ranks counted, as the server's process gets them."""
    prefill, decode = engines("prefill", 1, 4), engines("decode", 2, 8)
    facts = dict(tokens=6, source_blocks=[[7, 2]], destination_blocks=[[3]])
    done = load(decode, "a", grant(prefill, "a", **facts), **facts)
    prefill.scheduler.released(60)
    failed = load(decode, "b", grant(prefill, "b", **facts), **facts | dict(source_blocks=[[7, 99]]))
    first, *others = [ended(ending) for ending in done + failed]
    stats = pickle.loads(pickle.dumps(Stats.of_loads([first])))
    stats = stats.aggregate(Stats.of_loads([*others, refused("lost"), refused("cancelled")]))
    stats = stats.aggregate(Stats.of_counts(prefill.scheduler.counts(), {}))
    for worker in decode.workers:
        stats = stats.aggregate(Stats.of_counts(worker.counts(), {}))
    assert not stats.is_empty()
    # The agents' counters, and those of engines without kvferry, are those that have a description here.
    counted = set(prefill.scheduler.counts()) | set(decode.workers[0].counts())
    assert counted | set(stock.COUNTS) | set(OF_DECODE) | set(OF_KEEP) == set(COUNTS)
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
    # `increase` sees the first failure of any kind, because there was a 0 before it.
    assert {"mismatch", "peer_misbehaved", "lost"} <= set(REASONS)
    assert all(value("loads_total", engine="0", outcome="failed", reason=why) == 0 for why in REASONS)
    assert value("loads_total", engine="0", outcome="failed", reason="") is None
    assert all(value("prompts_recomputed_total", engine="1", reason=why) == 0 for why in RECOMPUTED)
    metrics.observe(data, 1)
    metrics.observe(Stats.of_counts({recomputed("draining"): 3, "prompts_offered": 5}, {}).to_dict(), 1)
    for name, labels, expected in [
        ("loads_total", dict(outcome="done", reason=""), 2),
        ("loads_total", dict(outcome="failed", reason="bad_request"), 2),
        ("loads_total", dict(outcome="failed", reason="lost"), 1),
        ("loads_total", dict(outcome="expired", reason=""), 0),
        ("loads_total", dict(outcome="aborted", reason=""), 1),
        ("leases_granted_total", {}, 2),
        ("leases_confirmed_total", {}, 1),
        # The first requests of a pair are always compared.
        ("audits_matched_total", {}, 2),
        ("audits_mismatched_total", {}, 0),
        ("packed_refused_total", {}, 0),
        ("data_connections_turned_away_total", {}, 0),
        ("prompts_offered_total", {}, 5),
        ("prompts_recomputed_total", dict(reason="draining"), 3),
        ("prompts_recomputed_total", dict(reason="states"), 0),
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
    log.observe(Stats.of_counts({recomputed("states"): 1, recomputed("params"): 3}, {}).to_dict())
    # What it has added to is its own.
    assert len(data["loads"]) == 6 and "leases_expired" not in data["counts"]
    lines = []
    log.log(lambda form, *values: lines.append(form % values))
    (line,) = lines
    expected = ("Loads=2", "Loads failed=3", "Leases granted=2", "Leases expired=3", "MiB/s on", "Prompts recomputed=4")
    for part in expected:
        assert part in line, line


def test_nothing_is_said_when_nothing_happened(engines):
    prefill = engines("prefill", 1, 4)
    counts = prefill.scheduler.counts()
    assert Stats.of_counts(counts, counts).is_empty() and Stats.of_loads([]).is_empty()
    log = KVConnectorLogging(TRANSFER)
    log.observe(Stats().to_dict())
    log.log(lambda *_: pytest.fail("a line for nothing"))


def test_a_rank_reports_growth_once(engines):
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    facts = dict(tokens=4, source_blocks=[[1]], destination_blocks=[[1]])
    side = types.SimpleNamespace(ended=[refused("lost")], agent=decode.workers[0], counted={})
    assert WorkerSide.stats(side).data == {"loads": [refused("lost")], "counts": {}}
    for request in ("a", "b"):
        load(decode, request, grant(prefill, request, **facts), **facts)
        assert WorkerSide.stats(side).data["counts"]["audits_matched"] == 1
    assert WorkerSide.stats(side).is_empty()
    # Before there is memory.
    assert WorkerSide.stats(types.SimpleNamespace(ended=[], agent=None, counted={})).is_empty()


def test_the_page_names_every_metric():
    named = re.findall(r"`vllm:kvferry_(\w+)`", (ROOT / "docs" / "vllm.md").read_text())
    assert set(named) == {f"{name}_total" for name in (*COUNTS, *LABELLED)} | HISTOGRAMS


def test_the_page_names_every_reason_to_compute_a_prompt_again():
    (row,) = re.findall(r"^\| `vllm:kvferry_prompts_recomputed_total` \|.*", (ROOT / "docs/vllm.md").read_text(), re.M)
    assert set(re.findall(r"`([a-z_]+)` \(", row)) == set(RECOMPUTED)


def test_no_page_names_a_metric_that_vllm_does_not_have():
    there = {f"vllm:kvferry_{name}_total" for name in (*COUNTS, *LABELLED)}
    there |= {f"vllm:kvferry_{name}" for name in HISTOGRAMS}
    crates = {folder.name.replace("-", "_") for folder in (ROOT / "crates").iterdir()}
    for page in (ROOT / "docs").glob("*.md"):
        named = set(re.findall(r"(?<![\w/])(?:vllm:)?kvferry_[a-z_]+", page.read_text()))
        assert named - crates <= there, page.name


def test_alerts_ask_for_reasons_that_there_are():
    rules = (ROOT / "deploy" / "alerts.yaml").read_text()
    asked = {reason for reasons in re.findall(r'reason=~?"([^"]+)"', rules) for reason in reasons.split("|")}
    assert asked and asked <= set(REASONS)
