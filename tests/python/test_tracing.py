"""Traces of requests that are handed over: two schedulers' sides without engines, and what they export."""

import ast
import inspect
import json
import logging
import random
import re
import sys
import time
from types import SimpleNamespace

import pytest
from handmade import grant, load
from kvferry.vllm import logs
from kvferry.vllm.tracing import sides as tracing, spans as tracing_spans
from kvferry.vllm.messages import Moved
from kvferry.vllm.options import Options
from kvferry.vllm.scheduler.side import SchedulerSide
from kvferry.vllm.worker.side import WorkerSide
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from sides import blocks, request, start_side

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def start():
    made = []

    def start(engine, **options):
        exporter = InMemorySpanExporter()
        tracer = tracing_spans.Tracer(engine, exporter, at_once=True)
        side = start_side(tracing.TracedScheduler, engine, tracer=tracer, **options)
        side.exported = exporter
        made.append(side)
        return side

    yield start
    for side in made:
        side.close()


def spans(side):
    """What has ended, by name."""
    return {span.name: span for span in side.exported.get_finished_spans()}


def until(true):
    end = time.monotonic() + 30
    while not (answer := true()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return answer


def ids(span):
    return f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}" if span.parent else None


def hand_over(prefill, **more):
    """What P answers with, for a request that is computed."""
    asked = request(do_remote_decode=True, **more)
    prefill.on_new_request(asked)
    prefill.orders(["request-1"])
    kept, params = prefill.finished(asked, ([3, 5],))
    assert kept
    return params


def told(outcome="done", reason="", **moments):
    """What a rank says of a load."""
    now = time.time()
    names = ("began", "known", "admitted", "reads", "arrived", "audited", "confirmed")
    at = {name: now + 0.001 * place for place, name in enumerate(names)} | {"ended": now + 0.007}
    at = {name: value for name, value in at.items() if moments.get(name, True)}
    return {
        "rank": 0, "transport": "tcp", "outcome": outcome, "kind": "", "reason": reason, "bytes": 64,
        "copies": 2, "lowerings": ["direct", "packed"], "moments": at,
        "seconds": {"plan": 0.1, "post": 0.2, "wire": 0.3},
    }  # fmt: skip


def take_over(decode, params, **more):
    """As far as the workers: the request, and their orders."""
    wanted = request(**params, **more)
    decode.on_new_request(wanted)
    assert decode.matched(wanted, 32) == (8, True)
    decode.allocated(wanted, blocks([1, 2]), 8)
    return wanted, decode.orders([])


@pytest.mark.parametrize("how", ["headers", "parameters"])
def test_one_trace_from_the_request_s_parent_to_the_first_token(start, how):
    prefill, decode = start("p"), start("d")
    # As vLLM does in every engine: ids must not come from there.
    random.seed(0)
    given = {"trace_headers": {"traceparent": GIVEN}} if how == "headers" else {"traceparent": GIVEN}
    params = hand_over(prefill, **given)
    # Only P was given the parent: D has it from P.
    random.seed(0)
    wanted, orders = take_over(decode, params)
    (load,) = orders.loads
    decode.loaded({"request-1": [told()]})
    decode.ended("request-1", False, 0.1)
    decode.orders(["request-1"])
    decode.stats()
    assert "kvferry.decode" not in spans(decode), "there is no token yet"
    wanted.num_output_tokens = 1
    decode.stats()
    until(lambda: prefill.agent.revoke("request-1"))
    until(lambda: prefill.orders([]).released)

    of_p, of_d = spans(prefill), spans(decode)
    traces = {ids(span)[0] for span in (*of_p.values(), *of_d.values())}
    assert traces == {GIVEN.split("-")[1]}
    root, other = of_p["kvferry.prefill"], of_d["kvferry.decode"]
    assert len({span.context.span_id for span in (*of_p.values(), *of_d.values())}) == len(of_p) + len(of_d)
    assert ids(root)[1] == GIVEN.split("-")[2]
    assert other.parent.span_id == root.context.span_id
    assert orders.traces == {"request-1": tracing_spans.traceparent(other)}
    assert set(of_p) == {"kvferry.prefill", "kvferry.prefill.compute", "kvferry.prefill.lease"}
    assert set(of_d) == {
        "kvferry.decode", "kvferry.decode.queue", "kvferry.decode.allocate", "kvferry.decode.order",
        "kvferry.load", *tracing.PARTS, "kvferry.decode.report", "kvferry.decode.schedule",
        "kvferry.decode.first_step",
    }  # fmt: skip
    facts = other.attributes
    assert facts["kvferry.request"] == facts["kvferry.peer.request"] == "request-1"
    assert (facts["kvferry.peer.engine"], facts["kvferry.tokens"], facts["kvferry.outcome"]) == ("p", 8, "done")
    facts = of_d["kvferry.load"].attributes
    assert (facts["kvferry.lowering"], facts["kvferry.transport"], facts["kvferry.bytes"]) == (
        "direct+packed", "tcp", 64,
    )  # fmt: skip
    assert of_p["kvferry.prefill.lease"].attributes["kvferry.outcome"] == "revoked"
    for span in (*of_p.values(), *of_d.values()):
        assert span.status.status_code == StatusCode.UNSET and span.start_time <= span.end_time, span.name
    assert not prefill.given and not decode.taken


def test_without_a_parent_both_engines_draw_the_same_trace(start):
    prefill, decode = start("p", push="always"), start("d")
    asked = request("cmpl-7-0-0123abcd", do_remote_decode=True)
    prefill.on_new_request(asked)
    host, _, port = prefill.agent.address.rpartition(":")
    both = dict(do_remote_prefill=True, remote_engine_id="p", remote_host=host, remote_port=int(port))
    wanted = request("cmpl-7-0-ba9876ef", **both, remote_request_id="x")
    decode.on_new_request(wanted)
    # D follows, and P notes it.
    until(lambda: decode.agent.frontier("cmpl-7-0-ba9876ef"))
    prefill.finished(asked, ([3, 5],))
    assert decode.matched(wanted, 40) == (0, False)
    decode.allocated(wanted, blocks([]), 0)
    until(lambda: prefill.orders([]).released)
    of_p, of_d = spans(prefill), spans(decode)
    assert of_p["kvferry.prefill"].parent is None and of_d["kvferry.decode"].parent is None
    assert ids(of_p["kvferry.prefill"])[0] == ids(of_d["kvferry.decode"])[0]
    assert of_d["kvferry.decode"].attributes["kvferry.outcome"] == "not needed"
    assert of_p["kvferry.prefill.followed"].attributes["kvferry.peer"] == decode.engine
    assert of_p["kvferry.prefill.lease"].attributes["kvferry.outcome"] == "abandoned"
    # And another request is another trace.
    prefill.on_new_request(request("cmpl-8-0-0123abcd", do_remote_decode=True))
    prefill.finished(request("cmpl-8-0-0123abcd"), ([3, 5],))
    prefill.close()
    assert len({ids(span)[0] for span in prefill.exported.get_finished_spans()}) == 2


def test_a_reader_s_own_trace_is_kept_and_linked(start):
    prefill, decode = start("p"), start("d")
    params = hand_over(prefill)
    own = "00-" + "12" * 16 + "-" + "34" * 8 + "-01"
    take_over(decode, params, trace_headers={"traceparent": own})
    decode.loaded({"request-1": [told()]})
    decode.ended("request-1", True, 0.0)
    span = spans(decode)["kvferry.decode"]
    assert ids(span) == ("12" * 16, "34" * 8)
    (link,) = span.links
    assert f"{link.context.trace_id:032x}" == params["kvferry"]["traceparent"].split("-")[1]


@pytest.mark.parametrize("nonsense", ["", "00-1-2-3", 7, None, ["x"], "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_parent_that_makes_no_sense_is_none(start, nonsense):
    prefill = start("p")
    params = hand_over(prefill, traceparent=nonsense)
    assert tracing_spans._context(params["kvferry"]) is not None
    prefill.agent.revoke("request-1")
    until(lambda: prefill.orders([]).released)
    assert spans(prefill)["kvferry.prefill"].parent is None


def test_what_is_not_sampled_is_not_exported(start):
    prefill, decode = start("p"), start("d")
    params = hand_over(prefill, traceparent=GIVEN[:-1] + "0")
    assert params["kvferry"]["traceparent"].endswith("-00")
    take_over(decode, params)
    decode.loaded({"request-1": [told("failed", "x")]})
    decode.ended("request-1", True, 0.0)
    assert not spans(decode)


@pytest.mark.parametrize(
    "missing, part",
    [
        (("known", "admitted", "reads", "arrived", "audited", "confirmed"), "handshake"),
        (("admitted", "reads", "arrived", "audited", "confirmed"), "queue"),
        (("arrived", "audited", "confirmed"), "read"),
        (("audited", "confirmed"), "audit"),
        (("confirmed",), "confirm"),
    ],
)
def test_a_failure_ends_the_spans_that_it_concerns_with_an_error(start, caplog, missing, part):
    prefill, decode = start("p"), start("d")
    logs.logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger=logs.logger.name)
    take_over(decode, hand_over(prefill))
    decode.loaded({"request-1": [told("failed", "the cable", **dict.fromkeys(missing, False)), told()]})
    decode.ended("request-1", True, 0.0)
    logs.logger.removeHandler(caplog.handler)
    ended = decode.exported.get_finished_spans()
    wrong = {span.name for span in ended if span.status.status_code == StatusCode.ERROR}
    assert wrong == {"kvferry.decode", "kvferry.load", f"kvferry.load.{part}"}
    root = spans(decode)["kvferry.decode"]
    assert (root.status.description, root.attributes["kvferry.outcome"]) == ("the cable", "failed")
    # The log leads to the trace.
    assert f"request-1 was not loaded; its trace is {tracing_spans.traceparent(root)}" in caplog.text
    assert not decode.taken


def test_a_request_that_cannot_be_read_or_is_not_wanted_ends_its_spans(start):
    prefill, decode = start("p"), start("d")
    params = hand_over(prefill)
    wanted = request(**params)
    decode.on_new_request(wanted)
    decode.finished(wanted, ([],))
    root = spans(decode)["kvferry.decode"]
    assert (root.attributes["kvferry.outcome"], root.status.status_code) == ("aborted", StatusCode.UNSET)
    until(lambda: prefill.orders([]).released)
    # Its own time is over, too.
    decode.exported.clear()
    decode.on_new_request(request("request-2", **params))
    root = spans(decode)["kvferry.decode"]
    assert (root.attributes["kvferry.outcome"], root.status.status_code) == ("computed here", StatusCode.ERROR)
    # P, where the prompt broke off.
    prefill.exported.clear()
    asked = request("request-3", do_remote_decode=True)
    prefill.on_new_request(asked)
    asked.status = "FINISHED_ABORTED"
    assert prefill.finished(asked, ([3],)) == (False, None)
    assert spans(prefill)["kvferry.prefill"].attributes["kvferry.outcome"] == "not kept"


def test_a_lease_that_nobody_uses_is_an_error(start):
    prefill = start("p", lease_seconds=0.05)
    hand_over(prefill)
    until(lambda: prefill.orders([]).released)
    for name in ("kvferry.prefill", "kvferry.prefill.lease"):
        span = spans(prefill)[name]
        assert (span.attributes["kvferry.outcome"], span.status.status_code) == ("expired", StatusCode.ERROR)


def test_what_is_open_when_the_engine_ends_is_exported(start):
    prefill = start("p")
    hand_over(prefill)
    prefill.close()
    assert spans(prefill)["kvferry.prefill"].attributes["kvferry.outcome"] == "engine ended"


def test_a_worker_tells_when_it_did_what(engines):
    side = tracing.TracedWorker(None, None, Options())
    side.rank, side.transport = 1, "local"
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    facts = dict(tokens=6, source_blocks=[[7, 2]], destination_blocks=[[3, 4]])
    (done,) = load(decode, "a", grant(prefill, "a", **facts), **facts)
    assert list(done.moments) == sorted(done.moments)
    moments = ["began", "known", "admitted", "reads", "arrived", "audited", "confirmed", "ended"]
    assert sorted(done.moments, key=done.moments.get) == moments
    assert abs(done.moments["ended"] - time.time()) < 60 and done.lowerings
    side.traces = {"a": GIVEN, "b": GIVEN}
    side.count(done)
    assert side.ended[-1]["exemplar"] == {"trace_id": GIVEN.split("-")[1], "request": "a"}
    (failed,) = load(decode, "b", grant(prefill, "b", **facts), **facts | dict(source_blocks=[[7, 99]]))
    assert "arrived" not in failed.moments and "ended" in failed.moments
    side.count(failed)
    side.refuse("c", "bad_request")
    moved = side.told()
    assert {name: one[0]["outcome"] for name, one in moved.loads.items()} == dict(a="done", b="failed", c="failed")
    assert moved.loads["a"][0]["rank"] == 1 and json.dumps(moved.loads)
    assert side.told() is None and not side.traces
    both = Moved({}, {"a": [1]}).aggregate(Moved({}, {"a": [2], "b": [3]}))
    assert both.loads == {"a": [1, 2], "b": [3]}


def test_readers_are_noted_where_they_are_watched(engines):
    prefill, decode = engines("prefill", 1, 4), engines("decode", 2, 8)
    facts = dict(tokens=6, source_blocks=[[7, 2]], destination_blocks=[[3]])
    load(decode, "a", grant(prefill, "a", **facts), **facts)
    assert prefill.scheduler.notes() == []
    prefill.scheduler.watch()
    load(decode, "b", grant(prefill, "b", **facts), **facts)
    notes = prefill.scheduler.notes()
    assert [(name, did) for name, did, _, _ in notes] == [("b", "read")] * 2
    assert sorted(who.split(" ")[0] for _, _, who, _ in notes) == ["decode/0", "decode/1"]
    assert all(abs(at - time.time()) < 60 for *_, at in notes)


def test_whether_to_trace():
    theirs = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint="http://c:4317"))
    for option, expected in [({}, None), ({"trace": "auto"}, "http://c:4317"), ({"trace": "http://x"}, "http://x")]:
        assert tracing.endpoint(theirs, Options.read(option)) == expected
    theirs.observability_config.otlp_traces_endpoint = None
    assert tracing.endpoint(theirs, Options.read({"trace": "auto"})) is None
    for wrong in ("on", "collector:4317", "http://", ""):
        with pytest.raises(ValueError, match="'trace' .* must be one of off, auto, or begin with http://"):
            Options.read({"trace": wrong})


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ValueError, match="'trace' .* OpenTelemetry is not installed here .*; install"):
        tracing_spans.Tracer.to("p", "http://127.0.0.1:1")


def test_without_tracing_not_a_line_of_it_runs(start):
    assert tracing.sides(None, Options()) == (SchedulerSide, WorkerSide)
    traced = tracing.sides(None, Options.read({"trace": "http://x"}))
    assert traced == (tracing.TracedScheduler, tracing.TracedWorker)
    # OpenTelemetry is imported by what runs.
    for module in (tracing, tracing_spans):
        top = ast.parse(inspect.getsource(module)).body
        imports = [ast.unparse(node) for node in top if isinstance(node, ast.Import | ast.ImportFrom)]
        assert imports and not any("opentelemetry" in line for line in imports)

    def lines_of_tracing(prefill, decode):
        """Functions of ours, and of OpenTelemetry, that a request enters."""
        entered = []

        def note(frame, event, _):
            if event == "call" and re.search(r"kvferry/vllm/tracing|opentelemetry", frame.f_code.co_filename):
                entered.append(frame.f_code.co_name)

        sys.setprofile(note)
        try:
            wanted, _ = take_over(decode, hand_over(prefill))
            decode.ended("request-1", False, 0.1)
            decode.orders(["request-1"])
            decode.stats()
        finally:
            sys.setprofile(None)
        return entered

    plain = [start_side(SchedulerSide, engine) for engine in ("p", "d")]
    assert lines_of_tracing(*plain) == []
    assert "on_new_request" in lines_of_tracing(start("p"), start("d"))
    for side in plain:
        side.close()
