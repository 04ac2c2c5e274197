"""Requests handed over between two engines, through both halves of their agents, on real memory."""

import json
import time
import uuid

import kvferry
import numpy as np
import pytest
from handmade import LONG, WIDTH, draft, fill, load, value


@pytest.mark.parametrize("transport", ["local", "tcp"])
@pytest.mark.parametrize("key", [None, "a secret that only both sides know"])
def test_a_request_is_handed_over(engines, transport, key):
    options = dict(key=key) if key else {}
    prefill = engines("prefill", 1, 4, transport, **options)
    decode = engines("decode", 2, 8, transport, **options)
    fill(prefill, [7, 2], 6)
    # Through a router, as JSON.
    ticket = json.loads(json.dumps(prefill.scheduler.grant("request-1")))
    assert prefill.scheduler.status()["leases"][0]["request"] == "request-1"
    decode.scheduler.hold(ticket, patience=LONG)
    facts = dict(tokens=6, source_blocks=[[7, 2]], destination_blocks=[[3]])
    endings = load(decode, "request-9", ticket, **facts)
    assert [(e.request, e.outcome, e.reason) for e in endings] == [("request-9", "done", "")] * 2
    decode.scheduler.settle(ticket)
    for rank, (pool, ending) in enumerate(zip(decode.pools, endings)):
        decode.workers[rank].zero(ending)
        expected = np.zeros_like(pool)
        for token in range(6):
            for head in range(2):
                expected[(3 * 8 + token) * 2 + head] = value(token, rank * 2 + head)
        assert (pool == expected).all()
        assert (ending.bytes, ending.copies) == (6 * 2 * WIDTH, 6)
        assert not ending.quarantined
        assert ending.rest.tolist() == [[pool.ctypes.data + (3 * 8 + 6) * 16, 2 * 16]]
        assert set(ending.seconds) == {"queue", "handshake", "plan", "post", "wire", "confirm"}
    assert prefill.scheduler.released(LONG) == [("request-1", "confirmed")]
    assert prefill.scheduler.status()["leases"] == []
    assert "kvferry_" in prefill.scheduler.metrics() and "kvferry_" in decode.workers[0].metrics()


def test_what_waits_is_told_from_what_is_read(engines):
    first, second = engines("first", 1, 4), engines("second", 1, 4, lease=0.3)
    decode = engines("decode", 1, 4)
    tickets = [engine.scheduler.grant("request") for engine in (first, second)]
    for ticket in tickets:
        decode.scheduler.hold(ticket, patience=LONG)
    decode.scheduler.reading(tickets[1])
    holds = decode.scheduler.status()["holds"]
    assert [(h["engine"], h["reading"]) for h in holds] == [("first", False), ("second", True)]
    decode.scheduler.settle(tickets[0])
    assert [hold["engine"] for hold in decode.scheduler.status()["holds"]] == ["second"]
    second.scheduler.revoke("request")
    deadline = time.monotonic() + LONG
    while not (lost := decode.scheduler.lost()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [ticket for ticket, _ in lost] == tickets[1:]


def test_what_is_not_wanted_any_more_comes_back(engines):
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    ticket = prefill.scheduler.grant("abandoned")
    decode.scheduler.abandon(ticket)
    assert prefill.scheduler.released(LONG) == [("abandoned", "abandoned")]
    prefill.scheduler.grant("revoked")
    assert prefill.scheduler.revoke("revoked") and not prefill.scheduler.revoke("revoked")
    assert prefill.scheduler.released(LONG) == [("revoked", "revoked")]


def test_a_lease_that_nobody_extends_expires(engines):
    prefill = engines("prefill", 1, 4, lease=0.1)
    prefill.scheduler.grant("forgotten")
    assert prefill.scheduler.released(LONG) == [("forgotten", "expired")]
    # Bytes that are read under it are not used.
    decode = engines("decode", 1, 4)
    ticket = prefill.scheduler.grant("late")
    assert prefill.scheduler.released(LONG) == [("late", "expired")]
    facts = dict(tokens=4, source_blocks=[[1]], destination_blocks=[[1]])
    (ending,) = load(decode, "late", ticket, **facts)
    assert ending.outcome == "expired" and ending.reason


def test_failures_say_why(engines):
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    ticket = prefill.scheduler.grant("request")
    facts = dict(tokens=8, source_blocks=[[1]], destination_blocks=[[1, 2]])
    (ending,) = load(decode, "request", ticket, **facts)
    assert ending.outcome == "failed" and "position 1 is needed" in ending.reason
    prefill.close()
    facts = dict(tokens=4, source_blocks=[[1]], destination_blocks=[[1]])
    (ending,) = load(decode, "again", ticket | {"address": "127.0.0.1:1"}, **facts)
    assert ending.outcome == "failed"


def test_a_pair_that_does_not_fit_is_refused(engines):
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    other = draft("other", (0, 4), 4, decode.pools[0].ctypes.data, identity={"model": "another"})
    worker = kvferry.Worker(kvferry.Manifest(other), ranks=1, memory=decode.pools[0])
    ticket = prefill.scheduler.grant("request")
    worker.load("r", ticket, tokens=4, source_blocks=[[1]], destination_blocks=[[1]])
    (ending,) = worker.endings(LONG)
    assert ending.outcome == "failed" and "'model' differs" in ending.reason
    worker.close()


def test_strangers_learn_nothing(engines):
    prefill = engines("prefill", 1, 4, key="a secret that only both sides know")
    decode = engines("decode", 1, 4, key="another secret, which is not theirs")
    ticket = prefill.scheduler.grant("request")
    facts = dict(tokens=4, source_blocks=[[1]], destination_blocks=[[1]])
    (ending,) = load(decode, "request", ticket, **facts)
    assert ending.outcome == "failed"
    assert (decode.pools[0] == 0).all()


def test_bad_input(engines, tmp_path):
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    ticket = prefill.scheduler.grant("request")
    with pytest.raises(kvferry.AgentError, match="has a lease already") as caught:
        prefill.scheduler.grant("request")
    assert caught.value.kind == "already_granted"
    with pytest.raises(ValueError, match="this is no ticket: "):
        decode.scheduler.hold({"engine": "prefill"}, patience=1.0)
    with pytest.raises(ValueError, match="patience: -1 is no number of seconds"):
        decode.scheduler.hold(ticket, patience=-1)
    with pytest.raises(TypeError, match="no keyword 'blocks'"):
        decode.workers[0].load("r", ticket, tokens=1, blocks=[])
    with pytest.raises(kvferry.AgentError, match="it is local, tcp or nixl"):
        manifest = kvferry.Manifest(draft("d", (0, 4), 4, decode.pools[0].ctypes.data))
        kvferry.Worker(manifest, ranks=1, memory=None, transport="pigeon")
    with pytest.raises(kvferry.AgentError, match="no key to keep strangers out") as caught:
        kvferry.Scheduler("d", bind="0.0.0.0:0", advertise="localhost")
    assert caught.value.kind == "needs_key"
    with pytest.raises(kvferry.AgentError, match="one of key, key_file and insecure"):
        kvferry.Scheduler("d", key=uuid.uuid4().hex, insecure=True)
    with pytest.raises(kvferry.AgentError, match="too short"):
        kvferry.Scheduler("d", key="short")
    with pytest.raises(kvferry.AgentError, match="cannot read the key file"):
        kvferry.Scheduler("d", key_file=str(tmp_path / "none"))
    with pytest.raises(ValueError, match='bind: "here" is no address'):
        kvferry.Scheduler("d", bind="here")
    with pytest.raises(kvferry.AgentError, match="belongs to engine 'decode', this is 'prefill'"):
        prefill.scheduler.publish([decode.workers[0].card()])
    with pytest.raises(kvferry.AgentError):
        prefill.scheduler.publish([b"garbage"])


def test_what_is_closed_stays_closed(engines):
    engine = engines("engine", 1, 4)
    engine.close()
    engine.close()
    with pytest.raises(kvferry.AgentError, match="stopped"):
        engine.scheduler.grant("request")
    with pytest.raises(kvferry.AgentError, match="stopped"):
        engine.workers[0].card()
