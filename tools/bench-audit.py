#!/usr/bin/env python3
"""What audits cost in the demo: runs with `off`, `0.01` and `all` that take turns.

    cargo build --release && tools/bench-audit.py [rounds] [requests]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess

COMMAND = pathlib.Path(__file__).parents[1] / "target" / "release" / "kvferry"
SETTINGS = ("off", "0.01", "all")


def run(audit: str, requests: int, seed: int) -> float:
    """Milliseconds from the queue to the confirmation: the sum of the medians of a load's parts."""
    command = [COMMAND, "demo", "--json", "--audit", audit, "--requests", str(requests), "--seed", str(seed)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    report = json.loads(out.stdout)
    return sum(part["median_ms"] for part in report["times"])


def main() -> None:
    parser = argparse.ArgumentParser(description="What audits cost in the demo.")
    parser.add_argument("rounds", type=int, nargs="?", default=10)
    parser.add_argument("requests", type=int, nargs="?", default=100)
    asked = parser.parse_args()
    rounds, requests = asked.rounds, asked.requests
    if min(rounds, requests) < 1:
        parser.error(f"rounds are {rounds} and requests {requests}: both are 1 or more")
    if not COMMAND.exists():
        parser.error(f"{COMMAND} is not there: cargo build --release makes it")
    found: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    for seed in range(rounds):
        # Another one goes first each time.
        for turn in range(len(SETTINGS)):
            setting = SETTINGS[(seed + turn) % len(SETTINGS)]
            found[setting].append(run(setting, requests, seed + 1))
    print(f"{'audit':8} {'median':>10} {'from':>10} {'to':>10}   ({rounds} runs of {requests} requests each)")
    for setting, times in found.items():
        print(f"{setting:8} {statistics.median(times):7.2f} ms {min(times):7.2f} ms {max(times):7.2f} ms")


if __name__ == "__main__":
    main()
