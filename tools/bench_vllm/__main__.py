"""Times how long a handover keeps D from its first token, side by side with vLLM's own connector.

    tools/bench-vllm.sh [--model NAME] [--rounds N] [--starts N] [--lengths N,N,…]
                        [--contenders NAME,NAME,…] [--against NAME,NAME,…] [--concurrent N] [--chunk N]
                        [--seconds N] [--save PATH] [--json]
    tools/bench-vllm.sh --read PATH      the tables of what --save has written, also of a run that was cut short
    PYTHON=… tools/bench-vllm.sh …       with the Python of an environment that has vllm, nixl and kvferry

A pair of real vLLM engines (TP 1, on the GPU if there is one) per contender, all alive at once. In every
round each pair gets one request of each length, or `--concurrent` of them at once, in random order. The
clock runs from the moment P has finished the prompt until D's first token: what a user waits for beyond
prefill. Ratios are of medians over the same rounds; below 1 kvferry is faster. The first request of a pair,
which includes the handshake, is counted apart. A second table has the whole time to the first token,
prefill included.

Requests go to P, and to D when P has answered. With `+push` behind a transport's name they go to both
at once, as `vllm-router` sends them, and D reads while P computes. With `@40` behind that, the link between
the two, which is this machine's loopback, carries 40 MB/s meanwhile; all runs in a network of its own then,
which wants root.

NixlConnector takes part as it is installed, and as its author would tune it (`tools/rivals.py` says how); a table has
the
ratios to each of those that `--against` names.

The contender `again` is one engine that has answered the same prompt before and holds all of it but the last
block: D's own first step, which no way to hand over avoids.

Whoever is asked the same prompt must answer with the same first token: every D, and P, too, unless it computes
states and so stops a token before the end.

Each engine steps as vLLM's own loop does: it blocks when idle, and sleeps a millisecond after a step
that ran nothing while a request waits.
"""

import argparse
import datetime
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import rivals

from .contenders import AGAIN, CONTENDERS, DEVICE, RIVALS, wrong_with
from .link import Link
from .models import MODELS
from .pairs import Again, Pair, Tokens
from .progress import Progress
from .table import table


def measure(arguments, model, draw, keep):
    """By contender and length: seconds of each round, after P's end and in all. The length 0 stands for a
    pair's first request; of several at once the median counts. And how many first tokens differ."""
    measured = {contender: {} for contender in arguments.contenders}
    tokens = Tokens()
    link, progress = Link(arguments.contenders), Progress(arguments)

    def ask(pairs, contender, length, prompts, count):
        rate = contender.partition("@")[2]
        link.carry(int(rate) if rate else None)
        progress.asks(contender, prompts)
        seconds = pairs[contender].first_tokens(prompts)
        if count:
            middle = tuple(statistics.median(one) for one in zip(*seconds))
            measured[contender].setdefault(length, []).append(middle)

    def in_turn():
        return draw.sample(arguments.contenders, len(arguments.contenders))

    def prompts(length, count):
        return [[draw.randrange(1, 500) for _ in range(length)] for _ in range(count)]

    for start in range(arguments.starts):
        progress.starts()
        pairs = {
            contender: Again(model, arguments, tokens)
            if contender == AGAIN
            else Pair(contender, model, arguments, tokens)
            for contender in arguments.contenders
        }
        try:
            for pair in pairs.values():
                pair.ready()
            for contender in in_turn():
                ask(pairs, contender, 0, prompts(arguments.lengths[0], 1), True)
                for length in arguments.lengths:
                    ask(pairs, contender, length, prompts(length, arguments.concurrent), False)
            began = time.monotonic()
            for _ in range(start, arguments.rounds, arguments.starts):
                keep(measured, tokens)
                if time.monotonic() - began > arguments.seconds / arguments.starts:
                    break
                for length in arguments.lengths:
                    asked = prompts(length, arguments.concurrent)
                    for contender in in_turn():
                        ask(pairs, contender, length, asked, True)
        finally:
            for pair in pairs.values():
                pair.close()
    progress.ends()
    keep(measured, tokens)
    return measured, +tokens.differ


def facts(arguments):
    """What a reader has to know of a run."""
    names = [name for name in arguments.contenders if name in RIVALS]
    return {
        "date": str(datetime.date.today()),
        "command": shlex.join(["tools/bench-vllm.sh", *sys.argv[1:]]),
        "device": device(),
        "load": os.getloadavg()[0],
        "versions": {name: version(name) for name in ("kvferry", "vllm", "torch", "nixl")},
        "settings": {name: rivals.words(name, DEVICE) for name in names},
        **{name: getattr(arguments, name) for name in ("model", "lengths", "contenders", "against", "concurrent")},
    }


def device():
    if DEVICE == "cpu":
        return f"{os.cpu_count()} cores"
    from vllm.platforms import current_platform

    return current_platform.get_device_name()


def show(run):
    said = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    print(f"{run['date']}, {run['device']}, load {run['load']:.1f} at the start, {said}\n$ {run['command']}")
    for name, settings in run["settings"].items():
        print(f"{name}: {settings}")
    at_once = f", {run['concurrent']} at once" if run["concurrent"] > 1 else ""
    for which, what in enumerate(("P's end to D's first token", "request to first token")):
        for against in run["against"]:
            print(f"\n{run['model']}{at_once}: {what}, ms: median (quartiles); ratios to {against}\n")
            table(run, against, which, random.Random(1))


def whole(path, text):
    """A reader finds all of it, whenever this ends."""
    part = path.with_suffix(".part")
    part.write_text(text + "\n")
    part.replace(path)


def kept(path):
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"error: --read {path}: {error}")
    if not isinstance(read, dict) or not {"measured", "settings", "against"} <= set(read):
        sys.exit(f"error: --read {path}: it is not what --save writes")
    return read


def main():
    parser = argparse.ArgumentParser("tools/bench-vllm.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--starts", type=int, default=3, help="how often the engines start anew")
    parser.add_argument("--lengths", default="100,512,1000,2048", help="tokens of the prompts")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--against", default=",".join(RIVALS), help="the contenders that ratios are to")
    parser.add_argument("--concurrent", type=int, default=1, help="requests of a round")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a step, at most")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of all rounds; no more begin after that")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, metavar="PATH", help="write the same JSON here, as it grows")
    parser.add_argument("--read", type=Path, metavar="PATH", help="print the tables of this file; nothing is run")
    parser.add_argument("--json", action="store_true", help="every time measured, in seconds")
    arguments = parser.parse_args()
    if arguments.read:
        return show(kept(arguments.read))
    arguments.lengths = [int(length) for length in arguments.lengths.split(",")]
    arguments.contenders = arguments.contenders.split(",")
    for contender in arguments.contenders:
        if wrong := wrong_with(contender, arguments.model):
            parser.error(f"--contenders: '{contender}': {wrong}")
    given = arguments.against.split(",")
    unknown = [name for name in given if name not in [*arguments.contenders, *RIVALS]]
    arguments.against = [name for name in given if name in arguments.contenders]
    if unknown or not arguments.against:
        parser.error(f"{', '.join(unknown or given)}: not among the contenders; name one of them with --against")
    run, draw = facts(arguments), random.Random(arguments.seed)

    def keep(measured, tokens):
        run.update(measured=measured, differ=dict(+tokens.differ))
        if arguments.save:
            whole(arguments.save, json.dumps(run))

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / arguments.model
        MODELS[arguments.model]().save_pretrained(model)
        _, differ = measure(arguments, model, draw, keep)
    if arguments.json:
        print(json.dumps(run))
    if differ:
        sys.exit(f"first tokens that others do not make of the same prompt: {dict(differ)}")
    if arguments.json:
        return
    print("All make the same first token of the same prompt.")
    show(json.loads(json.dumps(run)))


if __name__ == "__main__":
    main()
