"""Where the time of a hand-over goes, step by step, in real `vllm serve` pairs behind the real router.

    tools/trace-vllm.sh [--model qwen3|nemotron-h] [--concurrent N,N,…] [--rounds N] [--tokens N]
                        [--serve 'OPTION …'] [--extra JSON] [--prefill-extra JSON]

Two servers and a router, started as README.md says. In every round so many clients ask at once, and each
is answered through the router. What the connector is asked to do is noted with the time, in the servers'
own processes; the clock is the machine's, and the same for all.

Times are medians in milliseconds since P has finished the prompt: what happens before is hidden behind
prefill. Below them, how long the parts of a load took.
"""

import argparse
import json
import os
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "engines"))

#: What is noted, in the order of a hand-over that begins when P has finished.
EVENTS = {
    "client asks": ("client", "asks"),
    "P's scheduler has it": ("P", "new"),
    "P begins to compute": ("P", "step"),
    "P has finished": ("P", "finished"),
    "D's scheduler has it": ("D", "new"),
    "D's scheduler asks the connector": ("D", "matched"),
    "D has blocks for it": ("D", "allocated"),
    "the workers have the order": ("D", "load"),
    "the workers report the end": ("D", "ending"),
    "the scheduler hears of it": ("D", "ended"),
    "D's first step": ("D", "step"),
    "client has the first token": ("client", "token"),
}

#: Runs in every process of the servers; wraps the connector's methods when they are imported.
HOOK = '''
import importlib.abc, importlib.util, json, os, sys, time

FILE = open(os.path.join(os.environ["KVFERRY_TRACE"], str(os.getpid())), "a", buffering=1)
SEEN = set()

def note(event, request, once=True, **more):
    if once:
        if (event, request) in SEEN:
            return
        SEEN.add((event, request))
    FILE.write(json.dumps([time.monotonic(), event, request, more]) + "\\n")

def before(kind, name, tell):
    given = getattr(kind, name)
    def wrapped(self, *args, **options):
        tell(self, *args, **options)
        return given(self, *args, **options)
    setattr(kind, name, wrapped)

def scheduler(module):
    side = module.SchedulerSide
    before(side, "on_new_request", lambda self, request: note("new", request.request_id))
    before(side, "matched", lambda self, request, computed: note("matched", request.request_id))
    before(side, "allocated", lambda self, request, blocks, external:
           note("allocated", request.request_id))
    before(side, "ended", lambda self, request, *how: note("ended", request))
    before(side, "finished", lambda self, request, blocks: note("finished", request.request_id))

def connector(module):
    def steps(self, output):
        for request in output.num_scheduled_tokens:
            note("step", request)
    before(module.FerryConnector, "build_connector_meta", steps)

def worker(module):
    def obey(self, orders):
        for load in orders.loads:
            note("load", load["request"])
    before(module.WorkerSide, "obey", obey)
    def endings(self):
        made = given_endings(self)
        for ending in made:
            note("ending", ending.request, outcome=ending.outcome, seconds=dict(ending.seconds))
        return made
    given_endings = module.WorkerSide._endings
    module.WorkerSide._endings = endings

HOOKS = {"kvferry.vllm.scheduler.side": scheduler, "kvferry.vllm.connector": connector,
         "kvferry.vllm.worker.side": worker}

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in HOOKS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        given = spec.loader.exec_module
        def run(module):
            given(module)
            HOOKS[name](module)
        spec.loader.exec_module = run
        return spec

sys.meta_path.insert(0, Finder())
'''


def read_notes(folder, side):
    """What the processes of one server have noted: by request, without what vLLM adds to its name."""
    found = {}
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            at, event, request, more = json.loads(line)
            stem = re.sub(r"-[0-9a-f]{8}$", "", request)
            found.setdefault(stem, {}).setdefault((side, event), (at, more))
    return found


class Client:
    """Asks, and notes when the first token comes."""

    def __init__(self, pair, tokens):
        self.pair, self.tokens = pair, tokens

    def ask(self, prompt, into):
        asked = time.monotonic()
        stream = self.pair.client("router").completions.create(
            model=self.pair.model,
            prompt=prompt,
            max_tokens=self.tokens,
            temperature=0.0,
            stream=True,
            timeout=300,
            extra_body={"ignore_eos": True},
        )
        first = None
        for chunk in stream:
            first = first or time.monotonic()
            name = chunk.id
        into[f"{name}-0"] = {("client", "asks"): (asked, {}), ("client", "token"): (first, {})}


def measure(pair, arguments, folder):
    """By how many ask at once: what was noted of each request."""
    draw = random.Random(1)
    client = Client(pair, arguments.answer)
    told = {}

    def together(count):
        asked = {}
        threads = [
            threading.Thread(target=client.ask, args=(text(draw, arguments.tokens), asked))
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return asked

    # The handshake is nobody's hand-over, and a router may change how it asks after an answer.
    for count in (1, 1, 4):
        together(count)
    for count in arguments.concurrent:
        told[count] = {}
        for _ in range(max(1, arguments.rounds // count)):
            told[count] |= together(count)
    time.sleep(0.5)
    for side, name in (("P", "prefill"), ("D", "decode")):
        noted = read_notes(folder / name, side)
        for requests in told.values():
            for request, events in requests.items():
                events.update(noted.get(request, {}))
    return told


def text(draw, length):
    return "".join(draw.choice("abcdefghij klmnopqrstuvwxyz,.") for _ in range(length))


def table(told):
    titles = ["", *(f"{count} at once" for count in told)]
    print("| " + " | ".join(titles) + " |\n|---" + "|---:" * len(told) + "|")
    zero = EVENTS["P has finished"]
    for name, event in EVENTS.items():
        cells = []
        for requests in told.values():
            seen = [
                (events[event][0] - events[zero][0]) * 1e3
                for events in requests.values()
                if event in events and zero in events
            ]
            cells.append(f"{statistics.median(seen):.1f}" if seen else "–")
        print("| " + " | ".join([name, *cells]) + " |")
    phases = {}
    for count, requests in told.items():
        for events in requests.values():
            for phase, seconds in events.get(("D", "ending"), (0, {}))[1].get("seconds", {}).items():
                phases.setdefault(phase, {}).setdefault(count, []).append(seconds * 1e3)
    for phase, by_count in phases.items():
        cells = [f"{statistics.median(by_count[count]):.2f}" if count in by_count else "–" for count in told]
        print("| " + " | ".join([f"of a load: {phase}", *cells]) + " |")
    exposed = EVENTS["client has the first token"]
    for count, requests in told.items():
        seen = sorted(
            (events[exposed][0] - events[("client", "asks")][0]) * 1e3 for events in requests.values()
        )
        print(f"time to first token, {count} at once: median {statistics.median(seen):.1f} ms of {len(seen)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("qwen3", "nemotron_h"), default="qwen3")
    parser.add_argument("--concurrent", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=64, help="requests of each concurrency")
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt")
    parser.add_argument("--answer", type=int, default=2, help="tokens of an answer")
    parser.add_argument("--serve", default="", help="more options of both servers")
    parser.add_argument("--extra", default="{}", help="options of the connector")
    parser.add_argument("--prefill-extra", default="{}", help="the same, of P alone")
    parser.add_argument("--logs", action="store_true", help="show what the servers logged at the end")
    arguments = parser.parse_args()
    arguments.concurrent = [int(count) for count in arguments.concurrent.split(",")]
    import http_pair
    import tiny

    http_pair.CALM = ""

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        http_pair.save_tokenizer(tiny.save_model(arguments.model, folder / arguments.model))
        serve = ["--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching"]
        serve += ["--max-model-len", "4096", "--num-gpu-blocks-override", "2048"]
        pair = http_pair.Pair(
            folder / arguments.model,
            folder,
            serve + arguments.serve.split(),
            {},
            json.loads(arguments.extra),
            {"prefill": json.loads(arguments.prefill_extra)},
            # As a user's: with the hook in each of their processes, and none that waits as tests have it.
            alone=("prefill", "decode"),
        )
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK)
        pair.environment["PYTHONPATH"] = str(folder / "hook")
        try:
            for name in ("prefill", "decode"):
                (folder / "notes" / name).mkdir(parents=True)
                pair.environment["KVFERRY_TRACE"] = str(folder / "notes" / name)
                pair.start(name)
            pair.start("router")
            told = measure(pair, arguments, folder / "notes")
        finally:
            if arguments.logs:
                for name in ("prefill", "decode", "router"):
                    print(f"--- {name}\n" + pair.log(name).read_text()[-5000:], file=sys.stderr)
            pair.close()
    print(f"{arguments.model}, prompts of {arguments.tokens} tokens: ms since P has finished, medians")
    table(told)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
