"""Requests handed over between two engines, through both halves of their agents, on real memory."""

import errno
import gc
import json
import os
import pathlib
import re
import socket
import subprocess
import threading
import time
import uuid

import kvferry
import numpy as np
import pytest
from handmade import BLOCKS, HEADS, LONG, WIDTH, draft, fill, grant, load, value


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


def test_what_waits_is_told_from_what_is_read(engines):
    first, second = engines("first", 1, 4), engines("second", 1, 4, lease=0.3)
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


def heard(engine, request, so=lambda frontier: True):
    """How far a followed request is, once that is `so`."""
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        frontier = engine.scheduler.frontier(request)
        if frontier is not None and so(frontier):
            return frontier
        time.sleep(0.01)
    raise AssertionError(f"{request} is not heard of")


def lost(engine):
    deadline = time.monotonic() + LONG
    while not (found := engine.scheduler.lost()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def test_a_request_is_read_while_it_is_computed(engines):
    prefill, decode = engines("prefill", 1, 4), engines("decode", 2, 8)
    where = dict(engine="prefill", address=prefill.scheduler.address, name="shared name")
    decode.scheduler.follow("d-1", **where, patience=LONG)
    assert decode.scheduler.frontier("d-1") is None
    ticket = prefill.scheduler.open("p-1", name="shared name")
    so_far = heard(decode, "d-1")
    epoch = so_far.pop("epoch")
    assert so_far == dict(ticket=ticket, tokens=0, begun=False, sealed=False, speed=None)
    for worker in decode.workers:
        worker.load("d-1", ticket, tokens=10, destination_blocks=[[3, 5]], patience=LONG)
    fill(prefill, [7, 2, 4], 8)
    prefill.scheduler.advance("p-1", tokens=4, blocks=[[7]])
    prefill.scheduler.advance("p-1", tokens=8, blocks=np.array([[7, 2]]), first=[0])
    assert heard(decode, "d-1", lambda frontier: frontier["tokens"] == 8)["sealed"] is False
    deadline = time.monotonic() + LONG
    while decode.pools[1][(3 * 8 + 7) * 2 + 1] != value(7, 3) and time.monotonic() < deadline:
        time.sleep(0.01)
    fill(prefill, [7, 2, 4], 10)
    assert prefill.scheduler.grant("p-1", tokens=10, blocks=[[7, 2, 4]]) == ticket | {"epoch": epoch}
    for rank, worker in enumerate(decode.workers):
        (ending,) = worker.endings(LONG)
        assert (ending.outcome, ending.reason, ending.bytes) == ("done", "", 10 * 2 * WIDTH)
        worker.zero(ending)
        expected = np.zeros_like(decode.pools[rank])
        for token in range(10):
            for head in range(2):
                block = [3, 5][token // 8]
                expected[(block * 8 + token % 8) * 2 + head] = value(token, rank * 2 + head)
        assert (decode.pools[rank] == expected).all()
    decode.scheduler.settle(ticket)
    assert decode.scheduler.frontier("d-1") is None and decode.scheduler.lost() == []
    assert prefill.scheduler.released(LONG) == [("p-1", "confirmed")]


def test_a_request_that_starts_over_is_another_grant(engines):
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    ticket = prefill.scheduler.open("r")
    decode.scheduler.follow("r", ticket=ticket, patience=LONG)
    prefill.scheduler.advance("r", tokens=4, blocks=[[1]])
    first = heard(decode, "r", lambda frontier: frontier["tokens"] == 4)["epoch"]
    prefill.scheduler.restart("r")
    assert heard(decode, "r", lambda frontier: frontier["epoch"] == first + 1)["tokens"] == 0
    fill(prefill, [7, 2], 6)
    facts = dict(tokens=6, source_blocks=[[7, 2]], destination_blocks=[[3, 4]])
    granted = json.loads(json.dumps(grant(prefill, "r", **facts)))
    assert granted == ticket | {"epoch": first + 1}
    # Of the epoch before, and of none, as the ticket was before the end.
    for other in (ticket | {"epoch": first}, ticket):
        (ending,) = load(decode, "old", other, **facts)
        assert ending.outcome == "expired" and "not those that the engine granted" in ending.reason
    (ending,) = load(decode, "new", granted, **facts)
    assert ending.outcome == "done"
    assert prefill.scheduler.released(LONG) == [("r", "confirmed")]


def test_an_engine_that_drains(engines):
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    prefill.scheduler.open("r")
    assert prefill.scheduler.drain() and not prefill.scheduler.drain()
    assert prefill.scheduler.left() == (1, 0) and prefill.scheduler.status()["draining"]
    for promise in (prefill.scheduler.open, lambda name: prefill.scheduler.grant(name, tokens=4, blocks=[[1]])):
        with pytest.raises(kvferry.AgentError, match="'new' is not handed over") as caught:
            promise("new")
        assert caught.value.kind == "draining"
    where = dict(engine="prefill", address=prefill.scheduler.address, name="never")
    decode.scheduler.follow("r", **where, patience=LONG)
    why = "the engine is being drained, and hands over nothing new"
    assert lost(decode) == [({"follows": "r", "draining": True}, why)]
    assert prefill.scheduler.resume() and not prefill.scheduler.resume()
    prefill.scheduler.open("new")


def test_what_is_followed_can_be_lost(engines):
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    where = dict(engine="prefill", address=prefill.scheduler.address, name="never")
    decode.scheduler.follow("r", **where, patience=0.2)
    assert lost(decode) == [({"follows": "r"}, "the engine never heard of it")]
    ticket = prefill.scheduler.open("r")
    decode.scheduler.follow("r", ticket=ticket, patience=LONG)
    with pytest.raises(kvferry.AgentError, match="already under way") as caught:
        decode.scheduler.follow("r", ticket=ticket, patience=LONG)
    assert caught.value.kind == "duplicate"
    heard(decode, "r")
    decode.workers[0].load("r", ticket, tokens=4, destination_blocks=[[1]])
    prefill.scheduler.revoke("r")
    ((found, why),) = lost(decode)
    assert found == ticket | {"follows": "r"} and why == "the lease ended: revoked"
    (ending,) = decode.workers[0].endings(LONG)
    assert (ending.outcome, ending.reason) == ("expired", "the lease ended: revoked")
    ticket = prefill.scheduler.open("r")
    decode.scheduler.follow("r", ticket=ticket, patience=LONG)
    decode.workers[0].load("r", ticket, tokens=4, destination_blocks=[[1]], patience=0.2)
    (ending,) = decode.workers[0].endings(LONG)
    assert (ending.outcome, ending.kind) == ("failed", "deadline")
    decode.scheduler.unfollow("r")
    decode.scheduler.unfollow("unknown")
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        try:
            prefill.scheduler.advance("r", tokens=0, blocks=[[]])
        except kvferry.AgentError as error:
            assert error.kind == "given_up"
            break
        time.sleep(0.02)
    with pytest.raises(kvferry.AgentError, match="given up") as caught:
        prefill.scheduler.grant("r", tokens=4, blocks=[[1]])
    assert caught.value.kind == "given_up" and prefill.scheduler.released() == []


def test_bad_input_for_what_is_still_computed(engines):
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    ticket = prefill.scheduler.open("r", name="n")
    prefill.scheduler.advance("r", tokens=8, blocks=[[1, 2]])
    for change, kind in [
        (dict(tokens=7, blocks=[[1, 2]]), "changed"),
        (dict(tokens=9, blocks=[[1, 3]]), "changed"),
        (dict(tokens=9, blocks=[list(range(1, BLOCKS)) + [1, 2]]), "table_too_long"),
        (dict(tokens=9, blocks=[[1, 2, 3]], in_flight=[(1, 9)]), "steps_do_not_rise"),
        (dict(tokens=9, blocks=[[1, 2, 3]], in_flight=[(2, 10), (2, 11)]), "steps_do_not_rise"),
        (dict(tokens=9, blocks=[[1, 2, 3]], in_flight=[(2, 10), (3, 10)]), "steps_do_not_rise"),
    ]:
        with pytest.raises(kvferry.AgentError) as caught:
            prefill.scheduler.advance("r", **change)
        assert caught.value.kind == kind
    for method in (prefill.scheduler.restart, prefill.scheduler.open):
        with pytest.raises(kvferry.AgentError) as caught:
            method("unknown" if method == prefill.scheduler.restart else "r")
        assert caught.value.kind in ("no_lease", "already_granted")
    for where in [{}, dict(engine="p"), dict(engine="p", name="n"), dict(ticket=ticket, name="n")]:
        with pytest.raises(ValueError, match="give either ticket, or engine, address and name"):
            decode.scheduler.follow("r", **where, patience=1.0)
    with pytest.raises(ValueError, match="this is not a ticket"):
        decode.scheduler.follow("r", ticket={}, patience=1.0)
    with pytest.raises(ValueError, match="patience: -1 is not a number of seconds"):
        decode.scheduler.follow("r", ticket=ticket, patience=-1)
    worker = decode.workers[0]
    with pytest.raises(ValueError, match="granted says how many tokens the source_blocks hold"):
        worker.load("r", ticket, tokens=4, granted=4, destination_blocks=[[1]])
    with pytest.raises(TypeError, match="'source_blocks' is missing"):
        worker.load("r", ticket, tokens=4, source_first=[0], destination_blocks=[[1]])
    with pytest.raises(ValueError, match="'epoch' is not a number"):
        bad = ticket | {"epoch": "x"}
        worker.load("r", bad, tokens=4, source_blocks=[[1]], destination_blocks=[[1]])


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


def test_strangers_learn_nothing(engines):
    prefill = engines("prefill", 1, 4, key="a secret that only both sides know")
    decode = engines("decode", 1, 4, key="another secret, which is not theirs")
    ticket = grant(prefill, "request")
    facts = dict(tokens=4, source_blocks=[[1]], destination_blocks=[[1]])
    (ending,) = load(decode, "request", ticket, **facts)
    assert ending.outcome == "failed"
    assert (decode.pools[0] == 0).all()


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


@pytest.fixture
def certificates(tmp_path):
    """Makes certificates for 127.0.0.1 of an authority of their own: certificate, key, authority."""

    def openssl(*args):
        subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True, timeout=60)

    def make(name):
        files = {what: tmp_path / f"{name}-{what}.pem" for what in ("own", "key", "root", "root-key")}
        new = ["req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        openssl(*new, "-subj", f"/CN={name}", "-keyout", files["root-key"], "-out", files["root"])
        openssl(
            *new,
            *("-subj", "/CN=engine", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-CA", files["root"], "-CAkey", files["root-key"]),
            *("-keyout", files["key"], "-out", files["own"]),
        )
        return files["own"], files["key"], files["root"]

    return make


def test_certificates_instead_of_a_key(engines, certificates):
    ours, theirs = certificates("ours"), certificates("theirs")
    facts = dict(tokens=4, source_blocks=[[7]], destination_blocks=[[3]])
    prefill, decode = engines("prefill", 1, 4, tls=ours), engines("decode", 2, 8, tls=ours)
    fill(prefill, [7], 4)
    endings = load(decode, "request", grant(prefill, "request", **facts), **facts)
    assert [(e.outcome, e.reason) for e in endings] == [("done", "")] * 2
    assert decode.pools[1][(3 * 8 + 3) * 2 + 1] == value(3, 3)
    assert prefill.scheduler.released(LONG) == [("request", "confirmed")]
    # A certificate of another authority is not let in, nor is a key or nothing at all.
    for name, trust in [("other", dict(tls=theirs)), ("key", dict(key=uuid.uuid4().hex)), ("none", {})]:
        stranger = engines(name, 1, 4, **trust)
        ticket = grant(prefill, name, **facts)
        stranger.workers[0].load(name, ticket, deadline=1.0, **facts)
        (ending,) = stranger.workers[0].endings(LONG)
        assert ending.outcome == "failed", name
        assert (stranger.pools[0] == 0).all()


def test_the_certificates_of_the_page_on_operations(engines, tmp_path):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    (commands,) = re.findall(r"```sh\n(# Once, .*?)```", page, re.DOTALL)
    files = ("server.pem", "server.key", "authority.pem")

    def made(name):
        folder = tmp_path / name
        folder.mkdir()
        script = "set -e\n" + commands.replace("10.0.0.5", "127.0.0.1")
        subprocess.run(["sh", "-c", script], cwd=folder, check=True, capture_output=True, timeout=60)
        return tuple(folder / file for file in files)

    facts = dict(tokens=4, source_blocks=[[7]], destination_blocks=[[3]])
    before, after = made("before"), made("after")
    prefill, decode = engines("prefill", 1, 4, tls=before), engines("decode", 1, 4, tls=before)
    (ending,) = load(decode, "request", grant(prefill, "request", **facts), **facts)
    assert (ending.outcome, ending.reason) == ("done", "")
    # While an authority is replaced, both are believed.
    both = tmp_path / "both.pem"
    both.write_text(before[2].read_text() + after[2].read_text())
    older = engines("older", 1, 4, tls=(*before[:2], both))
    newer = engines("newer", 1, 4, tls=(*after[:2], both))
    for number, (source, reader) in enumerate([(older, newer), (newer, older)]):
        name = f"r{number}"
        (ending,) = load(reader, name, grant(source, name, **facts), **facts)
        assert (ending.outcome, ending.reason) == ("done", "")


def test_certificates_that_cannot_be_used(certificates, tmp_path):
    own, key, root = certificates("ours")
    _, other, _ = certificates("theirs")
    for tls, problem in [
        ((tmp_path / "none.pem", key, root), f"cannot use {tmp_path}/none.pem: .*No such file"),
        ((own, tmp_path / "none.pem", root), f"cannot use {tmp_path}/none.pem: .*No such file"),
        ((own, key, key), f"cannot use {key}: it holds no certificate"),
        ((own, own, root), f"cannot use {own}: "),
        ((own, other, root), f"the private key in {other} does not belong to the certificate in {own}"),
    ]:
        with pytest.raises(kvferry.AgentError, match=problem) as caught:
            kvferry.Scheduler("d", tls=tls)
        assert caught.value.kind == "key"
    with pytest.raises(kvferry.AgentError, match="only one of key, key_file, tls and insecure") as caught:
        kvferry.Scheduler("d", key=uuid.uuid4().hex, tls=(own, key, root))
    assert caught.value.kind == "options"
    with pytest.raises((TypeError, ValueError)):
        kvferry.Scheduler("d", tls=(own, key))


class Memory:
    """Says, when it is freed, whether anybody can still reach it by its transport."""

    def __init__(self, port, freed):
        self.port, self.freed = port, freed

    def __del__(self):
        with socket.socket() as client:
            self.freed.append(client.connect_ex(("127.0.0.1", self.port)))


def test_memory_outlives_a_thread_that_waits_while_its_worker_is_closed():
    pool = np.zeros(BLOCKS * 4 * HEADS, dtype=np.uint64)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    freed, waited = [], []
    manifest = kvferry.Manifest(draft("d", (0, 4), 4, pool.ctypes.data))
    worker = kvferry.Worker(
        manifest, ranks=1, memory=Memory(port, freed), transport="tcp", bind=f"127.0.0.1:{port}"
    )
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) == 0
    thread = threading.Thread(target=lambda: waited.append(worker.endings(LONG)))
    began = time.monotonic()
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    worker.close()
    thread.join(LONG)
    gc.collect()
    assert freed == [errno.ECONNREFUSED], "freed once, after the transport was gone"
    assert waited == [[]] and time.monotonic() - began < LONG / 2, "it does not wait in vain"
    with pytest.raises(kvferry.AgentError, match="stopped"):
        worker.endings(LONG)


def test_a_thread_that_waits_for_leases_does_not_outwait_its_scheduler():
    scheduler = kvferry.Scheduler("p")
    waited = []
    thread = threading.Thread(target=lambda: waited.append(scheduler.released(LONG)))
    began = time.monotonic()
    thread.start()
    time.sleep(0.1)
    scheduler.close()
    thread.join(LONG)
    assert waited == [[]] and time.monotonic() - began < LONG / 2


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


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_who_ends_waits_for_nobody(engines, transport):
    """Neither P for what it has promised and for who follows it, nor D for what it reads and waits for."""
    prefill = engines("prefill", 1, 4, transport, lease=LONG)
    decode = engines("decode", 1, 4, transport)
    facts = dict(tokens=4, source_blocks=[[1]], destination_blocks=[[1]])
    load(decode, "done", grant(prefill, "done", **facts), **facts)
    held = grant(prefill, "held", **facts)
    decode.scheduler.hold(held, patience=LONG)
    where = dict(engine="prefill", address=prefill.scheduler.address, name="never")
    decode.scheduler.follow("never", **where, patience=LONG)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        decode.workers[0].load("late", held | {"address": address}, deadline=LONG, **facts)
        for engine in (prefill, decode):
            began = time.monotonic()
            engine.close()
            assert time.monotonic() - began < LONG / 4, engine.name


def test_what_is_closed_stays_closed(engines):
    engine = engines("engine", 1, 4)
    engine.close()
    engine.close()
    with pytest.raises(kvferry.AgentError, match="stopped"):
        grant(engine, "request")
    with pytest.raises(kvferry.AgentError, match="stopped"):
        engine.workers[0].card()


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
