"""A request is seen by operators: one trace of it over both engines, and its name in every line about it."""

import contextlib
import logging
import random
import re
import urllib.request
from pathlib import Path

import collector
import pytest
from environment import REMOTE_DECODE
from exact import prompts
from http_pair import Pair, save_tokenizer, until
from kvferry.vllm import logs
from tiny import save_model

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, PARENT = GIVEN.split("-")[1:3]
TABLE = Path(__file__).parents[2] / "crates" / "kvferry-docs" / "log.txt"

OF_P = ["kvferry.prefill", "kvferry.prefill.compute", "kvferry.prefill.lease", "kvferry.prefill.read"]
OF_A_RANK = ["kvferry.load"] + [
    f"kvferry.load.{part}" for part in ("handshake", "queue", "read", "audit", "confirm")
]
OF_D = [f"kvferry.decode{part}" for part in ("", ".queue", ".allocate", ".order", ".report", ".schedule", ".first_step")]


@pytest.fixture
def collected():
    with contextlib.closing(collector.Collector()) as made:
        yield made


def written(path):
    """Makes an engine write its log to a file."""

    def prepare():
        handler = logging.FileHandler(path)
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        given = logs.start

        def start(level):
            given(level)
            # Now: vLLM takes handlers away when it sets up its own log.
            logs.logger.addHandler(handler)

        logs.start = start

    return prepare


@pytest.mark.parametrize(
    "options, ranks",
    [
        ({}, 1),
        pytest.param({"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, 2, marks=pytest.mark.more),
    ],
)
def test_one_trace_and_one_name_over_both_engines(serve, collected, tmp_path, options, ranks):
    extra = {"trace": collected.url, "logging": "debug", "audit": "all", "push": "never"}
    prefill, decode = (
        serve(
            "qwen3",
            role,
            block_size=32,
            extra=extra,
            failure="recompute",
            prepare=[collector.prepare, written(tmp_path / role)],
            **more,
        )
        for role, more in (("kv_producer", {}), ("kv_consumer", options))
    )
    some, other = prompts(random.Random("traces"), [150, 140])
    alone, alone_too = (decode.generate(prompt)[0] for prompt in (some, other))

    # A good one, whose parent only P was given.
    ((_, params),) = prefill.generate_all([some], 1, [REMOTE_DECODE | {"traceparent": GIVEN}])
    assert decode.generate(some, params=params)[0] == alone
    # One that a router spoils: it is not used, and D computes the prompt itself.
    (spoilt,) = prefill.prefill([other])
    spoilt["remote_block_ids"] = [list(reversed(table)) for table in spoilt["remote_block_ids"]]
    assert decode.generate(other, params=spoilt)[0] == alone_too
    assert prefill.idle() == decode.idle() == 0

    good = collected.wait(TRACE, *OF_P, *OF_D, *OF_A_RANK)
    (root,), (other_root,) = good["kvferry.prefill"], good["kvferry.decode"]
    assert root.parent == PARENT and other_root.parent == root.id
    assert root.resource["kvferry.engine"] != other_root.resource["kvferry.engine"]
    assert set(good) == {*OF_P, *OF_D, *OF_A_RANK}
    everything = [span for spans in good.values() for span in spans]
    assert not any(span.failed for span in everything)
    known = {span.id for span in everything} | {PARENT}
    assert all(span.parent in known and span.start <= span.end for span in everything)
    for name in OF_A_RANK:
        assert sorted(span.facts["kvferry.rank"] for span in good[name]) == list(range(ranks)), name
    assert len(good["kvferry.prefill.read"]) == ranks
    for span in good["kvferry.load"]:
        assert (span.facts["kvferry.outcome"], span.facts["kvferry.transport"]) == ("done", "tcp")
        assert span.facts["kvferry.bytes"] > 0 and span.facts["kvferry.lowering"]
    facts = other_root.facts
    assert facts["kvferry.outcome"] == "done" and facts["kvferry.tokens"] >= len(some) - 1
    names = {"good": {root.facts["kvferry.request"], facts["kvferry.request"]}}
    assert facts["kvferry.peer.request"] == root.facts["kvferry.request"]
    # In the order of a hand-over.
    order = ["kvferry.prefill.compute", *OF_D[1:4], *OF_A_RANK[1:], *OF_D[4:]]
    ends = [max(span.end for span in good[name]) for name in order]
    assert ends == sorted(ends), list(zip(order, ends))

    bad = spoilt["kvferry"]["traceparent"].split("-")[1]
    failed = collected.wait(bad, "kvferry.prefill", "kvferry.decode", "kvferry.load")
    wrong = {name for name, spans in failed.items() if all(span.failed for span in spans)}
    # An audit asks P, too, and comes first.
    assert wrong == {"kvferry.decode", "kvferry.load", "kvferry.load.audit"}, failed
    (bad_root,) = failed["kvferry.decode"]
    assert "not those that the engine granted" in bad_root.why
    (bad_prefill,) = failed["kvferry.prefill"]
    names["bad"] = {bad_root.facts["kvferry.request"], bad_prefill.facts["kvferry.request"]}

    for server in (prefill, decode):
        server.close()
    lines = {role: (tmp_path / role).read_text().splitlines() for role in ("kv_producer", "kv_consumer")}
    check_log(lines, names, root, bad_root)


def check_log(lines, names, root, bad_root):
    """Whatever is said about a request says which, and nothing is said that the page does not explain."""
    table = {}
    for entry in TABLE.read_text().split("\n\n"):
        about, message = re.match(r"\[(.*?)\] (.*)", entry).groups()
        table[message] = (about, re.compile(".*?".join(map(re.escape, message.split("…"))) + r"( \w+=|$)"))
    found = {name: set() for name in names}
    for line in lines["kv_producer"] + lines["kv_consumer"]:
        level, _, said = line.partition(" kvferry: ")
        about = {message: about for message, (about, shape) in table.items() if shape.match(said)}
        assert about, f"the page does not explain: {line}"
        if set(about.values()) == {"a request"}:
            mine = [name for name, ids in names.items() if any(id in said for id in ids)]
            assert mine, f"which request? {line}"
            for name in mine:
                found[name] |= set(about)
    assert {"granted", "released", "ended", "asked for confirmation", "… is traced as …"} <= found["good"]
    assert not found["good"] & {"what was read is not used", "… was not loaded; its trace is …"}
    assert {
        "granted",
        "a peer asks about tables that were not granted: refused",
        "what was read is not used",
        "… was not loaded; its trace is …",
    } <= found["bad"]
    text = "\n".join(lines["kv_consumer"])
    assert f"{bad_root.facts['kvferry.request']} was not loaded; its trace is 00-{bad_root.trace}-{bad_root.id}" in text
    # A line of a worker has the names on both sides.
    used = [line for line in lines["kv_consumer"] if "what was read is not used" in line]
    assert used and all(f"theirs={bad_root.facts['kvferry.peer.request']}" in line for line in used)


@pytest.mark.more
def test_one_trace_from_the_router_to_the_first_token(collected, tmp_path):
    save_tokenizer(save_model("qwen3", tmp_path / "qwen3"))
    serve = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    serve += ["--num-gpu-blocks-override", "128", "--otlp-traces-endpoint", collected.url]
    # As a user sets it: where vLLM sends its own traces.
    pair = Pair(tmp_path / "qwen3", tmp_path, serve, {}, {"trace": "auto", "logging": "debug", "push": "auto"})
    pair.environment |= collector.ENVIRONMENT

    def ask(**headers):
        pair.client("router").completions.create(
            model=pair.model, prompt="a ferry " * 60, max_tokens=4, temperature=0.0, extra_headers=headers
        )

    try:
        pair.start("prefill", "decode")
        pair.start("router")
        # The router passes the header on to both engines.
        ask(traceparent=GIVEN)
        found = collected.wait(TRACE, *OF_P, *OF_D, *OF_A_RANK)
        assert found["kvferry.prefill"][0].parent == found["kvferry.decode"][0].parent == PARENT
        # It asks both at once, and D follows what P computes.
        assert "kvferry.prefill.followed" in found
        until("vLLM's own spans are there", 60, lambda: len(collected.trace(TRACE).get("llm_request", ())) == 2)
        # A request that nobody gave a trace: both draw the same one.
        ask()

        def called(span):
            return span.name == "kvferry.decode" and span.trace != TRACE

        named = until("it is traced", 60, lambda: list(filter(called, collected.spans)))
        found = collected.wait(named[0].trace, *OF_P, *OF_D, *OF_A_RANK)
        assert found["kvferry.prefill"][0].parent == found["kvferry.decode"][0].parent == ""
        # Its name is in the lines of both, and metrics lead to its trace.
        for who in ("prefill", "decode"):
            assert named[0].trace in pair.log(who).read_text(errors="replace")
        wanted = f'trace_id="{named[0].trace}"'
        until("the metrics name it", 60, lambda: wanted in open_metrics(pair, "decode"))
    finally:
        pair.close()


def open_metrics(pair, who):
    """Beside `/metrics`, where vLLM writes plain text to everybody."""
    asked = urllib.request.Request(f"{pair.url(who)}/metrics/", headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return answer.read().decode()
