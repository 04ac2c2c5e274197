"""How long loads take while somebody attacks P's ports, as ratios to quiet ones, and how many fail.

    python tools/bench-attacks.py            where kvferry is installed (`tools/python-env.sh dev` prints such a python): 3 minutes
    python tools/bench-attacks.py --delay 50 between hosts (network namespaces; as root) with so many ms each way: 8 minutes

P is a process of its own with a key, and the attackers, who have none, are others, at fixed rates that leave the cores
idle: from the victim's own address, and from another one. A known D reads again and again; a new one shakes hands first.
KVFERRY_WIRE names the program that lays the wire. Everything ends by itself.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "python"))
from attackers import Listening, Prefill, attacked, enter, loads  # noqa: E402

#: Loads of a known D for each of a new one; and of new ones, as long as a row's seconds are not over.
EACH, NEW, SECONDS = 3, 20, 25
ATTACKS = [
    ("control", "half-open", 1000),
    ("control", "storm", 1000),
    ("control", "wrong key", 300),
    ("control", "trickle", 1000),
    ("data", "half-open", 1000),
    ("data", "storm", 1000),
    ("data", "trickle", 1000),
]
ROW = "{:>9} {:>9} {:>5} {:>6} {:>8} {:>6} {:>5}"


def measure(prefill, known, host):
    """Milliseconds of loads of a known D and of new ones, how many there were and failed, and the most that P took."""
    times, failed, most, end = {"known": [], "new": []}, 0, prefill.used(), time.monotonic() + SECONDS
    for number in range((EACH + 1) * NEW):
        if time.monotonic() > end:
            break
        new = number % (EACH + 1) == 0
        ticket, before = prefill.grant(), time.perf_counter()
        engine = Listening(f"new {number}", 2, 2, host) if new else known
        failed += not loads(engine, f"l{number}", ticket)
        times["new" if new else "known"].append((time.perf_counter() - before) * 1e3)
        if new:
            engine.close()
        most = tuple(map(max, most, prefill.used()))
        time.sleep(0.05)
    medians = {name: statistics.median(these) for name, these in times.items()}
    return medians, sum(map(len, times.values())), failed, most


def run(left=None, right=None, third=None):
    with contextlib.ExitStack() as parts:
        prefill = parts.enter_context(contextlib.closing(Prefill(left)))
        enter(right)
        known = parts.enter_context(contextlib.closing(Listening("known", 2, 2, right)))
        origins = {"own": ("127.0.0.1", None), "other": ("127.0.0.2", None)}
        if right is not None:
            origins = {"own": (right.address, right), "other": (third.address, third)}
        print(f"{'attack on a port of P, from':36}", ROW.format("known", "new", "loads", "failed", "threads", "files", "MiB"))
        print(f"{'none':36}", end=" ", flush=True)
        loads(known, "first", prefill.grant())
        quiet, count, failed, most = measure(prefill, known, right)
        print(ROW.format(*(f"{quiet[n]:.1f} ms" for n in ("known", "new")), count, failed, *most))
        for port, kind, rate in ATTACKS:
            for name, (origin, there) in origins.items():
                print(f"{f'{port}: {kind}, {rate}/s, {name}':36}", end=" ", flush=True)
                with attacked(prefill.targets, [(port, kind)], rate, origin, there):
                    # Until it has taken what it can.
                    time.sleep(4)
                    beside, count, failed, most = measure(prefill, known, right)
                print(ROW.format(*(f"× {beside[n] / quiet[n]:.2f}" for n in ("known", "new")), count, failed, *most))


def main():
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--delay", type=float, metavar="MS", help="between hosts, each way (default: loopback)")
    delay = asked.parse_args().delay
    if delay is None:
        run()
        return
    if "KVFERRY_WIRE" not in os.environ:
        asked.error("--delay needs kvferry-wire (cargo build --workspace): name the program in KVFERRY_WIRE")
    from wire import Wire

    with contextlib.closing(Wire()) as wire:
        wire.set(delay_ms=delay)
        run(wire.left, wire.right, wire.third)


if __name__ == "__main__":
    main()
