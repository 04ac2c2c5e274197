"""Names what has become slow, tests that took more than twice as long as in most of the runs before, and what failed.

    python3 tools/durations.py FOLDER

The folder has a file for each run, a line of JSON for each test (tests/conftest.py) or part of the run (tools/test.sh):
its `name`, its `seconds` and, if known, how many of them it kept a core `busy`; and one for each that `failed`, with how.
The last file is this run's. What runs before were is forgotten but for the last few. This only says so: how long a test
takes is the machine's affair, too.
"""

import json
import statistics
import sys
from pathlib import Path

#: Runs to compare with, and seconds that nobody needs to hear of.
RUNS, LITTLE = 9, 3.0


def read(path):
    """Seconds by name."""
    lines = map(json.loads, path.read_text().splitlines())
    return {line["name"]: line["seconds"] for line in lines if "seconds" in line}


def failures(path):
    """How each test failed that did, by name."""
    lines = map(json.loads, path.read_text().splitlines())
    return {line["name"]: line["failed"] for line in lines if "failed" in line}


def slower(now, before):
    """What doubled, with its seconds before and now, beyond what everything did: another machine is no news."""
    usual = {name: statistics.median(run[name] for run in before if name in run) for name in set().union(*before)}
    known = sorted(now.keys() & usual.keys())
    # What takes no time is no measure.
    rates = [now[name] / usual[name] for name in known if usual[name] >= 1.0]
    pace = max(1.0, statistics.median(rates)) if rates else 1.0
    return [
        (name, usual[name], now[name])
        for name in known
        if now[name] > max(2 * pace * usual[name], usual[name] + LITTLE)
    ]


def main(folder):
    *before, last = sorted(Path(folder).glob("*.jsonl"))
    for path in before[:-RUNS]:
        path.unlink()
    now = read(last)
    for name, usual, seconds in slower(now, [read(path) for path in before[-RUNS:]]):
        print(f"slower: {name}: {seconds:.1f} s, and {usual:.1f} s in the runs before")
    print("the longest:")
    for name, seconds in sorted(now.items(), key=lambda one: -one[1])[:15]:
        print(f"  {seconds:7.1f} s  {name}")
    # Here once more: the output of whole lanes of tests comes after theirs.
    for name, how in failures(last).items():
        print(f"\nfailed: {name}\n{how}")


if __name__ == "__main__":
    main(sys.argv[1])
