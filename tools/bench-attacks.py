"""How long loads take while somebody attacks P's ports, beside quiet ones: medians, and how many fail.

    python tools/bench-attacks.py        where kvferry is installed (tools/python-env.sh dev prints such a python)

P is a process of its own with a key, and D and the attackers, who have none, are others. Attackers work at fixed rates
that leave the cores idle, from the victim's own address and from another one (127.0.0.2). A known D reads again and again;
a new one shakes hands first. Everything ends by itself, and what it has to do with is on loopback.
"""

import multiprocessing
import os
import random
import socket
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))
from handmade import Engine, fill, load  # noqa: E402

KEY = "a key that the attackers do not hold"
FACTS = dict(tokens=8, source_blocks=[[1, 2]], destination_blocks=[[3, 4]])
LOADS, NEW = 60, 20
OWN, OTHER = "127.0.0.1", "127.0.0.2"


def prefill(pipe):
    """P: grants what it is asked for, and says what it costs itself."""
    engine = Engine("prefill", 1, 4, "tcp", key=KEY)
    fill(engine, [1, 2], 8)
    number = 0
    pipe.send((os.getpid(), engine.scheduler.address))
    while pipe.recv():
        number += 1
        pipe.send(engine.scheduler.grant(f"r{number}", tokens=8, blocks=[[1, 2]]))
        engine.scheduler.released()


def used(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return int(status["Threads"]), files, int(status["VmRSS"].split()[0]) // 1024


def data_port(pid, control):
    """The port on which P's rank serves bytes, as anybody on the host can find it."""
    sockets = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    ports = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
            ports.append(int(words[1].split(":")[1], 16))
    return [port for port in ports if port != control]


def attack(kind, origin, targets, rate, stop):
    """Connects at a fixed rate, and keeps, feeds or drops what it has."""
    limit = 2000
    kept, draw, begun, made = [], random.Random(1), time.monotonic(), 0
    while not stop.is_set():
        due = int((time.monotonic() - begun) * rate) - made
        for _ in range(min(due, 50)):
            made += 1
            try:
                one = socket.socket()
                one.bind((origin, 0))
                one.settimeout(0.2)
                one.connect(draw.choice(targets))
                if kind == "wrong key":
                    one.send(b"kvferry\x01\x01" + (48).to_bytes(2, "little") + draw.randbytes(48))
                elif kind == "trickle":
                    one.send(b"k")
                if kind in ("half-open", "trickle"):
                    kept.append(one)
                else:
                    one.close()
            except OSError:
                one.close()
        if kind == "trickle":
            for one in draw.sample(kept, min(len(kept), 20)):
                try:
                    one.send(b"v", socket.MSG_DONTWAIT)
                except OSError:
                    one.close()
                    kept.remove(one)
        while len(kept) > limit:
            kept.pop(0).close()
        time.sleep(0.01)


def measure(pipe, known, pid):
    """Milliseconds of loads of a known D and of new ones, how many failed, and the most that P took meanwhile."""
    times, failed, most = {"known": [], "new": []}, 0, used(pid)
    for number in range(LOADS + NEW):
        new = number % (LOADS // NEW + 1) == 0
        pipe.send(True)
        ticket = pipe.recv()
        before = time.perf_counter()
        engine = Engine(f"new {number}", 2, 2, "tcp", key=KEY) if new else known
        (ending, *rest) = load(engine, f"l{number}", ticket, **FACTS | {"destination_blocks": [[3, 4, 5, 6]]})
        times["new" if new else "known"].append((time.perf_counter() - before) * 1e3)
        failed += any(one.outcome != "done" for one in (ending, *rest))
        if new:
            engine.close()
        most = tuple(max(pair) for pair in zip(most, used(pid), strict=True))
        time.sleep(0.05)
    return {name: statistics.median(all_) for name, all_ in times.items()}, failed, most


def main():
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=prefill, args=(theirs,), daemon=True)
    server.start()
    pid, address = ours.recv()
    control = int(address.rpartition(":")[2])
    data = [("127.0.0.1", port) for port in data_port(pid, control)]
    ports = {"control": [("127.0.0.1", control)], "data": data}
    known = Engine("known", 2, 2, "tcp", key=KEY)
    quiet, failed, most = measure(ours, known, pid)
    quiet, failed, most = measure(ours, known, pid)
    row = "{:34} {:>10} {:>10} {:>7} {:>8} {:>6} {:>7}"
    print(row.format("attack", "known", "new", "failed", "threads", "files", "MiB"))
    print(row.format("none (ms)", *(f"{quiet[n]:.1f}" for n in ("known", "new")), failed, *most))
    for port, kind, rate in [
        ("control", "half-open", 1000),
        ("control", "storm", 1000),
        ("control", "wrong key", 300),
        ("control", "trickle", 1000),
        ("data", "half-open", 1000),
        ("data", "storm", 1000),
        ("data", "trickle", 1000),
    ]:
        for origin in (OWN, OTHER):
            stop = multiprocessing.Event()
            attacker = multiprocessing.Process(target=attack, args=(kind, origin, ports[port], rate, stop), daemon=True)
            attacker.start()
            # Until it has taken what it can.
            time.sleep(3)
            beside, failed, most = measure(ours, known, pid)
            stop.set()
            attacker.join()
            name = f"{port}: {kind}, {rate}/s, {'own' if origin == OWN else 'other'}"
            ratios = (f"× {beside[n] / quiet[n]:.2f}" for n in ("known", "new"))
            print(row.format(name, *ratios, failed, *most), flush=True)
    known.close()
    ours.send(False)
    server.join()


if __name__ == "__main__":
    main()
