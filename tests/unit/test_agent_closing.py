"""What ends when an agent is closed: nobody waits for it, and memory outlives whoever may reach it."""

import errno
import gc
import socket
import threading
import time

import kvferry
import numpy as np
import pytest
from handmade import BLOCKS, HEADS, draft, grant, load, quiet_port

#: Far longer than a busy machine takes for what nobody waits for.
LONG = 600.0
#: Until a thread waits that was started.
SOON = 2.0


class Memory:
    """Says, when it is freed, whether anybody can still reach it by its transport."""

    def __init__(self, port, freed):
        self.port, self.freed = port, freed

    def __del__(self):
        with socket.socket() as client:
            self.freed.append(client.connect_ex(("127.0.0.1", self.port)))


def test_memory_outlives_a_thread_that_waits_while_its_worker_is_closed():
    pool = np.zeros(BLOCKS * 4 * HEADS, dtype=np.uint64)
    port, freed, waited = quiet_port(), [], []
    manifest = kvferry.Manifest(draft("d", (0, 4), 4, pool.ctypes.data))
    worker = kvferry.Worker(
        manifest, ranks=1, memory=Memory(port, freed), transport="tcp", bind=f"127.0.0.1:{port}"
    )
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) == 0
    thread = threading.Thread(target=lambda: waited.append(worker.endings(LONG)))
    began = time.monotonic()
    thread.start()
    time.sleep(SOON)
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
    time.sleep(SOON)
    scheduler.close()
    thread.join(LONG)
    assert waited == [[]] and time.monotonic() - began < LONG / 2


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
