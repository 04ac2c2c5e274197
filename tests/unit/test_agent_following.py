"""Requests that are followed and read while they are computed."""

import json
import time

import kvferry
import numpy as np
import pytest
from handmade import BLOCKS, LONG, WIDTH, fill, grant, load, value


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
    with pytest.raises(ValueError, match="'epoch' is 'x', which should be a number"):
        bad = ticket | {"epoch": "x"}
        worker.load("r", bad, tokens=4, source_blocks=[[1]], destination_blocks=[[1]])
