"""How long loads take while somebody attacks P's ports, as ratios to quiet ones, and how many fail.

    python tools/bench-attacks.py            where kvferry is installed (`tools/python-env.sh dev` prints such a python)
    python tools/bench-attacks.py --delay 50 between two hosts (network namespaces; as root) with so many ms each way

P is a process of its own with a key, and the attackers, who have none, are others, at fixed rates that leave the cores
idle: from the victim's own address, and from another one. A known D reads again and again; a new one shakes hands first.
KVFERRY_WIRE names the program that lays the wire. Everything ends by itself.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import socket
import statistics
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS / "unit"), str(TESTS / "engines")]
from handmade import Engine, fill, load  # noqa: E402

KEY = "a key that the attackers do not hold"
FACTS = dict(tokens=8, source_blocks=[[1, 2]], destination_blocks=[[3, 4, 5, 6]])
#: Loads of a known D for each of a new one, and of new ones; sockets that an attacker keeps.
EACH, NEW, KEPT = 3, 20, 2000
ATTACKS = [
    ("control", "half-open", 1000),
    ("control", "storm", 1000),
    ("control", "wrong key", 300),
    ("control", "trickle", 1000),
    ("data", "half-open", 1000),
    ("data", "storm", 1000),
    ("data", "trickle", 1000),
]


#: Where this process is.
_HERE = contextlib.ExitStack()


def enter(host):
    """This process is on that host from now on, with what it starts."""
    if host is not None:
        from wire import on

        _HERE.enter_context(on(host))


def options(host):
    return {"key": KEY} | ({"bind": f"{host.address}:0"} if host is not None else {})


class Listening(Engine):
    """An engine whose ranks listen where it does."""

    trusted = ("key", "bind")


def prefill(pipe, host):
    """P: grants what it is asked for."""
    enter(host)
    engine, number = Listening("prefill", 1, 4, "tcp", **options(host)), 0
    fill(engine, [1, 2], 8)
    pipe.send((os.getpid(), engine.scheduler.address, listening()))
    while pipe.recv():
        number += 1
        pipe.send(engine.scheduler.grant(f"r{number}", tokens=8, blocks=[[1, 2]]))
        engine.scheduler.released()


def listening():
    """The ports of this process, as anybody can find them who scans its host."""
    ours = set()
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            ours.add(os.readlink(f"/proc/self/fd/{file}"))
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return [int(words[1].split(":")[1], 16) for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in ours]


def used(pid):
    """Threads, files and MiB of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd")), int(status["VmRSS"].split()[0]) // 1024


def attack(kind, origin, host, targets, rate, stop):
    """Connects at a fixed rate, and keeps, feeds or drops what it has."""
    enter(host)
    kept, draw, begun, made = [], random.Random(1), time.monotonic(), 0
    while not stop.is_set():
        for _ in range(min(int((time.monotonic() - begun) * rate) - made, 50)):
            made += 1
            one = socket.socket()
            with contextlib.suppress(OSError):
                one.bind((origin, 0))
                one.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    one.connect(draw.choice(targets))
            kept.append((one, time.monotonic()))
        for one, since in draw.sample(kept, min(len(kept), 50)):
            with contextlib.suppress(OSError):
                if kind == "wrong key" and time.monotonic() - since < 1:
                    one.send(b"kvferry\x01\x01" + (48).to_bytes(2, "little") + draw.randbytes(48))
                elif kind == "trickle":
                    one.send(b"k")
        # A storm leaves as soon as it has come; the others stay for as long as they may.
        most = rate // 5 if kind in ("storm", "wrong key") else KEPT
        for one, _ in kept[: max(0, len(kept) - most)]:
            one.close()
        del kept[: max(0, len(kept) - most)]
        time.sleep(0.01)


def measure(pipe, known, pid, host):
    """Milliseconds of loads of a known D and of new ones, how many failed, and the most that P took meanwhile."""
    times, failed, most = {"known": [], "new": []}, 0, used(pid)
    for number in range((EACH + 1) * NEW):
        new = number % (EACH + 1) == 0
        pipe.send(True)
        ticket, before = pipe.recv(), time.perf_counter()
        engine = Listening(f"new {number}", 2, 2, "tcp", **options(host)) if new else known
        endings = load(engine, f"l{number}", ticket, **FACTS)
        times["new" if new else "known"].append((time.perf_counter() - before) * 1e3)
        failed += any(one.outcome != "done" for one in endings)
        if new:
            engine.close()
        most = tuple(max(pair) for pair in zip(most, used(pid), strict=True))
        time.sleep(0.05)
    return {name: statistics.median(these) for name, these in times.items()}, failed, most


def run(left, right):
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    spawn.Process(target=prefill, args=(theirs, left), daemon=True).start()
    pid, address, ports = ours.recv()
    host, control = address.rpartition(":")[0], int(address.rpartition(":")[2])
    targets = {
        "control": [(host, control)],
        "data": [(host, port) for port in ports if port != control],
    }
    enter(right)
    known = Listening("known", 2, 2, "tcp", **options(right))
    origins = {"own": ("127.0.0.1", None), "other": ("127.0.0.2", None)}
    if right is not None:
        origins = {"own": (right.address, right), "other": (left.address, left)}
    measure(ours, known, pid, right)
    quiet, failed, most = measure(ours, known, pid, right)
    row = "{:36} {:>9} {:>9} {:>7} {:>8} {:>6} {:>5}"
    print(row.format("attack on a port of P, from", "known", "new", "failed", "threads", "files", "MiB"))
    print(row.format("none", *(f"{quiet[n]:.1f} ms" for n in ("known", "new")), failed, *most), flush=True)
    for port, kind, rate in ATTACKS:
        for name, (origin, there) in origins.items():
            stop = spawn.Event()
            attacker = spawn.Process(
                target=attack, args=(kind, origin, there, targets[port], rate, stop), daemon=True
            )
            attacker.start()
            # Until it has taken what it can.
            time.sleep(4)
            beside, failed, most = measure(ours, known, pid, right)
            stop.set()
            attacker.join()
            ratios = (f"× {beside[n] / quiet[n]:.2f}" for n in ("known", "new"))
            print(row.format(f"{port}: {kind}, {rate}/s, {name}", *ratios, failed, *most), flush=True)
    known.close()
    ours.send(False)


def main():
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--delay", type=float, metavar="MS", help="between two hosts, each way (default: loopback)")
    delay = asked.parse_args().delay
    if delay is None:
        run(None, None)
        return
    if "KVFERRY_WIRE" not in os.environ:
        asked.error("--delay needs kvferry-wire (cargo build --workspace): name the program in KVFERRY_WIRE")
    from wire import Wire

    with contextlib.closing(Wire()) as wire:
        wire.set(delay_ms=delay)
        run(wire.left, wire.right)


if __name__ == "__main__":
    main()
