"""Times how long a handover keeps D from its first token, side by side with vLLM's own connector.

    tools/bench-vllm.sh [--model NAME] [--rounds N] [--starts N] [--lengths N,N,…]
                        [--contenders NAME,NAME,…] [--against NAME] [--concurrent N] [--chunk N] [--json]

A pair of real vLLM engines (TP 1, on the GPU if there is one) per contender, all alive at once. In every
round each pair gets one request of each length, or `--concurrent` of them at once, in random order. The
clock runs from the moment P has finished the prompt until D's first token: what a user waits for beyond
prefill. Ratios are of medians over the same rounds; below 1 kvferry is faster. The first request of a pair,
which includes the handshake, is counted apart. A second table has the whole time to the first token,
prefill included.

Requests go to P, and to D when P has answered. With `+push` behind a transport's name they go to both
at once, as `vllm-router` sends them, and D reads while P computes. With `@40` behind that, the link between
the two, which is this machine's loopback, carries 40 MB/s meanwhile; all runs in a network of its own then,
which wants root. Ratios are to the contender that `--against` names.

The contender `again` is one engine that has answered the same prompt before and holds all of it but the last
block: D's own first step, which no way to hand over avoids.

Whoever is asked the same prompt must answer with the same first token: every D, and P, too, unless it computes
states and so stops a token before the end.

Each engine steps as vLLM's own loop does: it blocks when idle, and sleeps a millisecond after a step
that ran nothing while a request waits.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

from .contenders import AGAIN, CONTENDERS, RIVAL, wrong_with
from .link import Link
from .models import MODELS
from .pairs import Again, Pair, Tokens
from .progress import Progress
from .table import table


def measure(arguments, model, draw):
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
            for _ in range(start, arguments.rounds, arguments.starts):
                for length in arguments.lengths:
                    asked = prompts(length, arguments.concurrent)
                    for contender in in_turn():
                        ask(pairs, contender, length, asked, True)
        finally:
            for pair in pairs.values():
                pair.close()
    progress.ends()
    return measured, +tokens.differ


def main():
    parser = argparse.ArgumentParser("tools/bench-vllm.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--starts", type=int, default=3, help="how often the engines start anew")
    parser.add_argument("--lengths", default="100,512,1000,2048", help="tokens of the prompts")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--against", default=RIVAL, help="the contender that ratios are to")
    parser.add_argument("--concurrent", type=int, default=1, help="requests of a round")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a step, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="every time measured, in seconds")
    arguments = parser.parse_args()
    arguments.lengths = [int(length) for length in arguments.lengths.split(",")]
    arguments.contenders = arguments.contenders.split(",")
    for contender in arguments.contenders:
        if wrong := wrong_with(contender, arguments.model):
            parser.error(f"--contenders: '{contender}': {wrong}")
    if arguments.against not in arguments.contenders:
        parser.error(f"{arguments.against} is not among the contenders: name one of them with --against")
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / arguments.model
        MODELS[arguments.model]().save_pretrained(model)
        measured, differ = measure(arguments, model, draw)
    if arguments.json:
        print(json.dumps(measured))
    if differ:
        sys.exit(f"first tokens that others do not make of the same prompt: {dict(differ)}")
    if arguments.json:
        return
    print("All make the same first token of the same prompt.")
    at_once = f", {arguments.concurrent} at once" if arguments.concurrent > 1 else ""
    for which, what in enumerate(("P's end to D's first token", "request to first token")):
        print(f"{arguments.model}{at_once}: {what}, ms: median (quartiles)")
        table(arguments, measured, which, draw)


if __name__ == "__main__":
    main()
