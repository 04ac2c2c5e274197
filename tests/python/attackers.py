"""Whoever attacks P's ports without its key, at fixed rates, and the engines that this is to disturb: P and the attackers
are processes of their own, each on a host of its own where there are several (`wire`).
"""

import contextlib
import multiprocessing
import os
import random
import resource
import socket
import sys
import time
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("unit", "engines")]
from handmade import Engine, fill, load  # noqa: E402
from wire import on  # noqa: E402

KEY = "a key that the attackers do not hold"
FACTS = dict(tokens=8, source_blocks=[[1, 2]], destination_blocks=[[3, 4, 5, 6]])
#: Sockets that an attacker keeps, and those that one keeps which says something wrong, or leaves at once: for so long.
KEPT, BRIEFLY = 2000, 0.2
KINDS = ["half-open", "storm", "wrong key", "trickle"]
#: What no key proves, on each port: a Noise handshake, and a greeting with its proof.
WRONG = {
    "control": lambda draw: b"kvferry\x01\x01" + (48).to_bytes(2, "little") + draw(48),
    "data": lambda draw: b"kvf-data" + (1).to_bytes(4, "little") + draw(32) + b"\0" + draw(32),
}
_SPAWN = multiprocessing.get_context("spawn")
#: Where this process is.
_HERE = contextlib.ExitStack()


def enter(host):
    """This process is on that host from now on, with what it starts."""
    if host is not None:
        _HERE.enter_context(on(host))


class Listening(Engine):
    """An engine whose ranks listen where it does."""

    trusted = ("key", "bind")

    def __init__(self, name, ranks, tokens, host):
        where = {} if host is None else {"bind": f"{host.address}:0"}
        super().__init__(name, ranks, tokens, "tcp", key=KEY, **where)


def loads(engine, request, ticket):
    """Whether both ranks of a D get what a ticket is for."""
    return [one.outcome for one in load(engine, request, ticket, **FACTS)] == ["done"] * 2


class Prefill:
    """P, in a process that may open so many files."""

    def __init__(self, host=None, files=None):
        self.pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_prefill, args=(theirs, host, files), daemon=True)
        self.process.start()
        address, ports = self._said()
        host, _, control = address.rpartition(":")
        #: Those of its memory, and of the rank that takes tasks, are found by looking.
        self.targets = {
            "control": [(host, int(control))],
            "data": [(host, port) for port in ports if port != int(control)],
        }

    def _said(self):
        assert self.pipe.poll(60), "P says nothing"
        return self.pipe.recv()

    def grant(self):
        self.pipe.send(True)
        return self._said()

    def used(self):
        """Threads, files and MiB."""
        pid = self.process.pid
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        files = len(os.listdir(f"/proc/{pid}/fd"))
        return int(status["Threads"]), files, int(status["VmRSS"].split()[0]) // 1024

    def close(self):
        self.pipe.send(False)
        self.process.join(60)


def _prefill(pipe, host, files):
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    enter(host)
    engine, number = Listening("prefill", 1, 4, host), 0
    fill(engine, [1, 2], 8)
    pipe.send((engine.scheduler.address, _listening()))
    while pipe.recv():
        number += 1
        pipe.send(engine.scheduler.grant(f"r{number}", tokens=8, blocks=[[1, 2]]))
        engine.scheduler.released()
    engine.close()


def _listening():
    """The ports of this process, as anybody can find them who scans its host."""
    ours = set()
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            ours.add(os.readlink(f"/proc/self/fd/{file}"))
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return [int(words[1].split(":")[1], 16) for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in ours]


@contextlib.contextmanager
def attacked(targets, ways, rate, origin, host=None):
    """Meanwhile somebody does each of these (a port, and a kind) so many times a second, from an address of that host."""
    stop = _SPAWN.Event()
    attacker = _SPAWN.Process(target=_attack, args=(targets, ways, rate, origin, host, stop), daemon=True)
    attacker.start()
    try:
        yield
    finally:
        stop.set()
        attacker.join(60)


def _attack(targets, ways, rate, origin, host, stop):
    enter(host)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    attackers = [_Attacker(targets[port], port, kind, rate, origin) for port, kind in ways]
    while not stop.is_set():
        for attacker in attackers:
            attacker.goes_on()
        time.sleep(0.01)


class _Attacker:
    """Connects at a fixed rate, and keeps, feeds or drops what it has."""

    def __init__(self, targets, port, kind, rate, origin):
        self.targets, self.kind, self.rate, self.origin = targets, kind, rate, origin
        # The others stay for as long as they may.
        self.keep = int(rate * BRIEFLY) if kind in ("storm", "wrong key") else KEPT
        self.wrong = WRONG[port]
        self.kept, self.draw, self.begun, self.made = [], random.Random(1), time.monotonic(), 0

    def goes_on(self):
        for _ in range(min(int((time.monotonic() - self.begun) * self.rate) - self.made, 50)):
            self.made += 1
            one = socket.socket()
            self.kept.append(one)
            with contextlib.suppress(OSError):
                one.bind((self.origin, 0))
                one.setblocking(False)
                # It is not there yet.
                one.connect(self.draw.choice(self.targets))
        for one in self.draw.sample(self.kept, min(len(self.kept), 50)):
            with contextlib.suppress(OSError):
                if self.kind == "wrong key":
                    one.send(self.wrong(self.draw.randbytes))
                elif self.kind == "trickle":
                    one.send(b"k")
        gone = max(0, len(self.kept) - self.keep)
        for one in self.kept[:gone]:
            one.close()
        del self.kept[:gone]
