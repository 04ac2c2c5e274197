"""Requests handed over between two engines, through both halves of their agents, on real memory."""

import json
import os
import time
import uuid

import kvferry
import numpy as np
import pytest
from handmade import LONG, WIDTH, draft, fill, grant, load, quiet_port, value


@pytest.mark.parametrize("transport", ["local", "tcp"])
@pytest.mark.parametrize("key", [None, "a secret that only both sides know"])
def test_a_request_is_handed_over(engines, transport, key):
    options = dict(key=key) if key else {}
    prefill = engines("prefill", 1, 4, transport, **options)
    decode = engines("decode", 2, 8, transport, **options)
    fill(prefill, [7, 2], 6)
    facts = dict(tokens=6, source_blocks=[[7, 2]], destination_blocks=[[3]])
    # Through a router, as JSON.
    ticket = json.loads(json.dumps(grant(prefill, "request-1", **facts)))
    assert prefill.scheduler.status()["leases"][0]["request"] == "request-1"
    decode.scheduler.hold(ticket, patience=LONG)
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
        assert set(ending.seconds) == {
            "queue",
            "handshake",
            "plan",
            "post",
            "wire",
            "audit",
            "confirm",
        }
    assert prefill.scheduler.released(LONG) == [("request-1", "confirmed")]
    assert prefill.scheduler.status()["leases"] == []
    assert "kvferry_" in prefill.scheduler.metrics() and "kvferry_" in decode.workers[0].metrics()


def listening():
    """The ports of all addresses that this process listens on."""
    inodes = {os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _is_open(number)}
    ports = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def _is_open(number):
    return os.path.lexists(f"/proc/self/fd/{number}")


def test_ranks_listen_where_they_may(engines):
    """Nothing else listens; and who finds no port says which it may have."""
    before = listening()
    first = quiet_port()
    ports = first, first + 7
    engine = engines("ported", 2, 4, "tcp", ports=ports)
    [scheduler] = [port for port in listening() - before if not first <= port <= first + 7]
    assert engine.scheduler.address.endswith(f":{scheduler}")
    taken = {port for port in listening() - before if first <= port <= first + 7}
    # For each rank its tasks and its bytes.
    assert len(taken) == 4
    with pytest.raises(kvferry.Error, match=rf"listening on 127.0.0.1 \(a port from {min(taken)} to {min(taken)}\)"):
        engines("too many", 1, 4, "tcp", ports=(min(taken), min(taken)))


def test_what_waits_is_told_from_what_is_read(engines):
    # Long enough for a busy machine to ask for the first time; what is lost is known after a third of it.
    first, second = engines("first", 1, 4), engines("second", 1, 4, lease=12.0)
    decode = engines("decode", 1, 4)
    tickets = [grant(engine, "request") for engine in (first, second)]
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
    ticket = grant(prefill, "abandoned")
    decode.scheduler.hold(ticket, patience=LONG)
    decode.scheduler.abandon(ticket)
    assert prefill.scheduler.released(LONG) == [("abandoned", "abandoned")]
    grant(prefill, "revoked")
    assert prefill.scheduler.revoke("revoked") and not prefill.scheduler.revoke("revoked")
    assert prefill.scheduler.released(LONG) == [("revoked", "revoked")]


def test_a_lease_that_nobody_extends_expires(engines):
    prefill = engines("prefill", 1, 4, lease=0.1)
    grant(prefill, "forgotten")
    assert prefill.scheduler.released(LONG) == [("forgotten", "expired")]
    # Bytes that are read under it are not used.
    decode = engines("decode", 1, 4)
    ticket = grant(prefill, "late")
    assert prefill.scheduler.released(LONG) == [("late", "expired")]
    facts = dict(tokens=4, source_blocks=[[1]], destination_blocks=[[1]])
    (ending,) = load(decode, "late", ticket, **facts)
    assert ending.outcome == "expired" and ending.reason


def test_what_was_not_granted_is_not_used(engines):
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    fill(prefill, [7, 2], 6)
    facts = dict(tokens=6, source_blocks=[[7, 2]], destination_blocks=[[3, 4]])
    ticket = grant(prefill, "request", **facts)
    forged = [
        dict(source_blocks=[[7, 3]]),
        dict(source_blocks=[[2, 7]]),
        dict(source_blocks=[[7, 2, 5]]),
        dict(tokens=5),
        dict(tokens=7),
    ]
    for change in forged:
        (ending,) = load(decode, "request", ticket, **facts | change)
        assert ending.outcome == "expired" and "not those that the engine granted" in ending.reason
    assert prefill.scheduler.counts()["confirmations_not_granted"] == len(forged)
    # It reads fewer than were granted, and says so. More is not for the asking.
    (ending,) = load(decode, "more", ticket, **facts | dict(tokens=7, granted=6))
    assert (ending.outcome, ending.kind) == ("failed", "bad_request")
    assert "7 tokens are to be read, but 6 were granted" in ending.reason
    assert prefill.scheduler.released(LONG) == [("request", "abandoned")]
    ticket = prefill.scheduler.grant("clipped", tokens=6, blocks=np.array([[7, 2]]), first=[0])
    (ending,) = load(decode, "fewer", ticket, **facts | dict(tokens=5, granted=6))
    assert ending.outcome == "done"
    assert prefill.scheduler.released(LONG) == [("clipped", "confirmed")]


def test_failures_say_why(engines):
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    ticket = grant(prefill, "request")
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
    ticket = grant(prefill, "request")
    worker.load("r", ticket, tokens=4, source_blocks=[[1]], destination_blocks=[[1]])
    (ending,) = worker.endings(LONG)
    assert ending.outcome == "failed" and "'model' differs" in ending.reason
    worker.close()


def test_bad_input(engines, tmp_path):
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    ticket = grant(prefill, "request")
    with pytest.raises(kvferry.AgentError, match="has a lease already") as caught:
        grant(prefill, "request")
    assert caught.value.kind == "already_granted"
    for grants, problem in [
        (dict(tokens=-1, blocks=[[1]]), "negative"),
        (dict(tokens=4, blocks=[[-1]]), "blocks"),
        (dict(tokens=4, blocks=[1]), "blocks"),
        (dict(tokens=4, blocks=[[1]], first=["x"]), "first"),
        (dict(tokens=4, blocks=[[1]], first=[0, 0]), "first has 2 entries, but blocks has 1 tables"),
        (dict(blocks=[[1]]), "tokens"),
        (dict(tokens=4), "blocks"),
    ]:
        with pytest.raises((ValueError, TypeError, OverflowError), match=problem):
            prefill.scheduler.grant("other", **grants)
    for change, problem in [
        (dict(address=None), "'address' is None, which should be text"),
        (dict(nonce="xyz"), "'nonce' is 'xyz', which should be 16 hexadecimal digits"),
        (dict(incarnation=7), "'incarnation' is 7, which should be 16 hexadecimal digits"),
        (dict(term_ms=-1), "'term_ms' is -1, which should be a number of milliseconds"),
    ]:
        with pytest.raises(ValueError, match=f"^this is not a ticket: {problem}$"):
            decode.scheduler.hold(ticket | change, patience=1.0)
    for name in ticket:
        without = {key: value for key, value in ticket.items() if key != name}
        with pytest.raises(ValueError, match=f"^this is not a ticket: '{name}' is missing$"):
            decode.scheduler.hold(without, patience=1.0)
    # What a router has added is nothing to us.
    decode.scheduler.settle(ticket | {"router": {"more": [object()]}})
    with pytest.raises(ValueError, match="patience: -1 is not a number of seconds"):
        decode.scheduler.hold(ticket, patience=-1)
    with pytest.raises(TypeError, match="no keyword 'blocks'"):
        decode.workers[0].load("r", ticket, tokens=1, blocks=[])
    with pytest.raises(kvferry.AgentError, match="it is local, tcp, cuda, nixl or gpu"):
        manifest = kvferry.Manifest(draft("d", (0, 4), 4, decode.pools[0].ctypes.data))
        kvferry.Worker(manifest, ranks=1, memory=None, transport="pigeon")
    with pytest.raises(kvferry.AgentError, match="no key to keep strangers out") as caught:
        kvferry.Scheduler("d", bind="0.0.0.0:0", advertise="localhost")
    assert caught.value.kind == "needs_key"
    with pytest.raises(kvferry.AgentError, match="only one of key, key_file, tls and insecure"):
        kvferry.Scheduler("d", key=uuid.uuid4().hex, insecure=True)
    with pytest.raises(kvferry.AgentError, match="too short"):
        kvferry.Scheduler("d", key="short")
    with pytest.raises(kvferry.AgentError, match="cannot read the key file"):
        kvferry.Scheduler("d", key_file=str(tmp_path / "none"))
    with pytest.raises(ValueError, match='^"here" is not an address to listen on: '):
        kvferry.Scheduler("d", bind="here")
    with pytest.raises(kvferry.AgentError, match="belongs to engine 'decode', this is 'prefill'"):
        prefill.scheduler.publish([decode.workers[0].card()])
    with pytest.raises(kvferry.AgentError):
        prefill.scheduler.publish([b"garbage"])


def test_what_is_counted_is_described_once(engines):
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    told = kvferry._core.metrics()
    assert list(told) == ["counters", "worker_counters", "timings", "outcomes", "failures"]
    assert set(told["counters"]) == set(prefill.scheduler.counts())
    assert set(told["worker_counters"]) == set(decode.workers[0].counts())
    facts = dict(tokens=4, source_blocks=[[1]], destination_blocks=[[1]])
    (ending,) = load(decode, "r", grant(prefill, "r", **facts), **facts)
    assert set(told["timings"]) == set(ending.seconds)
    assert list(told["timings"]) == [
        "queue",
        "handshake",
        "plan",
        "post",
        "wire",
        "audit",
        "confirm",
    ]
    assert ending.outcome in told["outcomes"]
    facts = dict(tokens=4, source_blocks=[[99]], destination_blocks=[[1]])
    (ending,) = load(decode, "s", grant(prefill, "s", **facts), **facts)
    assert ending.outcome in told["outcomes"] and ending.kind in told["failures"]
    assert all(help.endswith(".") for names in told.values() for help in names.values())


def test_cuda_moves_gpu_memory_and_says_what_is_missing():
    facts = draft("d", (0, 4), 4, 4096)
    with pytest.raises(kvferry.AgentError, match="memory on the host: use local or tcp"):
        kvferry.Worker(kvferry.Manifest(facts), ranks=1, memory=None, transport="cuda")
    if os.path.exists("/dev/nvidiactl"):
        return
    facts["regions"][0]["place"] = {"gpu": 0}
    with pytest.raises(kvferry.AgentError, match="CUDA's driver cannot be used here: ") as caught:
        kvferry.Worker(kvferry.Manifest(facts), ranks=1, memory=None, transport="cuda")
    assert caught.value.kind == "transport"
