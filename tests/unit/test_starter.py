"""Loads wait for what the GPU still has to write; the engine does not."""

import threading
import time

import pytest

from kvferry.vllm.worker.starter import Starter


class Stream:
    """A point of a stream that is passed when the test says so."""

    def __init__(self):
        self.passed = threading.Event()

    def query(self):
        return self.passed.is_set()

    def synchronize(self):
        assert self.passed.wait(20)


def load(request):
    return {"request": request}


@pytest.fixture
def started():
    return []


@pytest.fixture
def starter(started):
    made = Starter(lambda one: started.append(one["request"]))
    yield made
    made.close()


def wait_for(started, wanted):
    until = time.monotonic() + 20
    while started != wanted and time.monotonic() < until:
        time.sleep(0.001)
    assert started == wanted


def test_nothing_to_wait_for_is_started_at_once(starter, started):
    starter.put(None, [load("a")])
    passed = Stream()
    passed.passed.set()
    starter.put(passed, [load("b"), load("c")])
    assert started == ["a", "b", "c"]


def test_a_write_that_is_late_is_waited_for_by_the_load_alone(starter, started):
    late = Stream()
    # Were this to wait, it would wait for ever: nobody lets the stream go on before it is back.
    starter.put(late, [load("a"), load("b")])
    time.sleep(0.05)
    assert started == []
    late.passed.set()
    wait_for(started, ["a", "b"])


def test_loads_keep_their_order(starter, started):
    first, second = Stream(), Stream()
    starter.put(first, [load("a")])
    starter.put(second, [load("b")])
    starter.put(None, [load("c")])
    second.passed.set()
    time.sleep(0.05)
    assert started == []
    first.passed.set()
    wait_for(started, ["a", "b", "c"])


def test_what_is_due_is_started_in_one_go(started):
    """A thread that wakes up costs the engine's own: all that is due by then is started, and nothing else."""
    first, second, third = Stream(), Stream(), Stream()
    slow = Starter(lambda one: started.append(one["request"]), pause=3600.0)
    for stream, name in ((first, "a"), (second, "b"), (third, "c")):
        slow.put(stream, [load(name)])
    second.passed.set()
    first.passed.set()
    wait_for(started, ["a", "b"])
    third.passed.set()
    time.sleep(0.05)
    assert started == ["a", "b"]
    slow.close()


def test_what_is_forgotten_in_time_never_starts(starter, started):
    late = Stream()
    starter.put(late, [load("a"), load("b")])
    assert starter.forget("a")
    assert not starter.forget("a")
    late.passed.set()
    wait_for(started, ["b"])
    assert not starter.forget("b")


def test_closed_is_closed(starter, started):
    late = Stream()
    starter.put(late, [load("a")])
    starter.close()
    late.passed.set()
    time.sleep(0.05)
    assert started == []
