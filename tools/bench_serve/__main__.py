"""Runs `vllm bench serve` with its own data sets on a prefill and a decode server behind `vllm-router`, with kvferry
and with
vLLM's NixlConnector, at rising rates of requests.

    tools/bench-serve.sh [--contenders NAME,…] [--data random,prefix] [--rates N,N,…] [--prompts N] [--rounds N] [--model NAME]
                         [--save PATH]
    tools/bench-serve.sh --read PATH    the tables of what --save has written, also of a run that was cut short

Contenders take turns: in each round each starts its two servers and its router anew, is asked a few requests that do
not
count, and then at all rates. `random` has prompts of 512 tokens, `prefix` has 4 prefixes of 384 tokens with 128 others
behind
them; answers have 16 tokens. Servers keep prefixes, as they do by themselves. NixlConnector takes part as it is
installed, and as
its author would tune it (`tools/rivals.py`).

A table has requests a second and the time to the first token (the median and the 99th of 100), as the middle one of
all rounds;
with as many prompts as `--prompts` says, the 99th of 100 is little more than the slowest.
"""

import argparse
import datetime
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import rivals
import serving  # noqa: F401
from bench_vllm.models import MODELS
from forked import Forked
from http_pair import Pair, free_ports, save_tokenizer

#: By name, when requests go to both servers at once: as it is installed, and as its page says for a machine that is to
#: be fast.
KVFERRY = {"kvferry": "never", "kvferry+push": "auto"}
NAMES = [*KVFERRY, *rivals.NAMES[:2]]
OUTPUT = 16
DATA = {
    "random": ["--dataset-name", "random", "--random-input-len", "512", "--random-output-len", str(OUTPUT)],
    "prefix": [
        *("--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "384"),
        *("--prefix-repetition-suffix-len", "128", "--prefix-repetition-num-prefixes", "4"),
        *("--prefix-repetition-output-len", str(OUTPUT)),
    ],
}
SERVE = [
    *("--dtype", "float32", "--enforce-eager", "--load-format", "dummy", "--max-model-len", "1024", "--block-size", "32"),
    *("--num-gpu-blocks-override", "1500", "--max-num-seqs", "32"),
    *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
]
#: What is asked for, and what vLLM calls it.
SHOWN = {"requests/s": "request_throughput", "p50": "median_ttft_ms", "p99": "p99_ttft_ms"}
PATIENCE = 600


class Contender(Pair):
    """A pair as the README starts it; a rival's differs in its connector."""

    def __init__(self, name, model, folder):
        self.rival = name in rivals.NAMES
        transfer, extra = {}, {"push": KVFERRY.get(name)}
        environment = {}
        if self.rival:
            environment, extra = rivals.settings(name, "cpu")
            transfer = {"kv_connector": rivals.INSTALLED, "kv_buffer_device": "cpu"}
        super().__init__(model, folder, SERVE, transfer, extra)
        self.environment |= environment | {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_CPU_KVCACHE_SPACE": "4"}

    def command(self, who):
        # Asked for right before a server starts: two on one host need two.
        self.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_ports(1)[0])
        return super().command(who)

    def bench(self, data, rate, prompts, seed):
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        words = [
            *("vllm", "bench", "serve", "--backend", "openai", "--base-url", self.url("router"), "--model", self.model),
            *("--request-rate", str(rate), "--num-prompts", str(prompts), "--seed", str(seed), "--ignore-eos"),
            *("--percentile-metrics", "ttft", "--metric-percentiles", "99", "--disable-tqdm", "--temperature", "0"),
            *("--save-result", "--result-dir", str(self.folder), "--result-filename", result.name, *DATA[data]),
        ]
        with open(self.log("bench"), "ab") as log:
            code = Forked(words, self.environment, log).wait(PATIENCE)
        if code or not result.exists():
            raise SystemExit(f"error: vllm bench serve ended with {code}:\n{self.log('bench').read_text()[-3000:]}")
        found = json.loads(result.read_text())
        return {name: round(found[key], 3) for name, key in SHOWN.items()} | {"failed": prompts - found["completed"]}


def measure(arguments, model, run, keep):
    for at in range(arguments.rounds):
        # Whoever is first in one round is last in the next.
        for name in arguments.contenders if at % 2 == 0 else arguments.contenders[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                pair = Contender(name, model, Path(folder))
                try:
                    pair.start("prefill", "decode")
                    pair.start("router")
                    pair.bench("random", 4, 8, 1000 + at)
                    for data in arguments.data:
                        for rate in arguments.rates:
                            # Each gets the same prompts, and others in each round and at each rate.
                            seed = 1 + at * 100 + arguments.rates.index(rate)
                            found = pair.bench(data, rate, arguments.prompts, seed)
                            load = round(os.getloadavg()[0], 1)
                            run["found"].append({"round": at, "by": name, "data": data, "rate": rate, "load": load} | found)
                            keep()
                            print(f"round {at + 1}: {name}, {data}, {rate} a second: {found}", file=sys.stderr, flush=True)
                finally:
                    pair.close()


def show(run):
    said = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    loads = [one["load"] for one in run["found"]] or [0]
    print(f"{run['date']}, {os.cpu_count()} cores, load {min(loads)} to {max(loads)}, {said}\n$ {run['command']}")
    for name, settings in run["settings"].items():
        print(f"{name}: {settings}")
    for data in dict.fromkeys(one["data"] for one in run["found"]):
        print(f"\n{data}: requests a second; first token after, ms: p50 / p99\n")
        names = [name for name in run["contenders"] if any(one["by"] == name for one in run["found"])]
        print("| asked a second | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1))
        for rate in dict.fromkeys(one["rate"] for one in run["found"] if one["data"] == data):
            cells = [str(rate)]
            for name in names:
                some = [one for one in run["found"] if (one["by"], one["data"], one["rate"]) == (name, data, rate)]
                cells.append(_cell(some))
            print("| " + " | ".join(cells) + " |")


def _cell(some):
    if not some:
        return ""
    rate, middle, late = (statistics.median(one[name] for one in some) for name in SHOWN)
    failed = sum(one["failed"] for one in some)
    return f"{rate:.2f}; {middle:.0f} / {late:.0f}" + (f"; **{failed} failed**" if failed else "")


def main():
    parser = argparse.ArgumentParser("tools/bench-serve.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--contenders", default=",".join(NAMES))
    parser.add_argument("--data", default="random,prefix")
    parser.add_argument("--rates", default="1,2,4,8", help="requests a second")
    parser.add_argument("--prompts", type=int, default=40, help="requests of each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, default="qwen3")
    parser.add_argument("--save", type=Path, metavar="PATH", help="write what is found here, as it grows")
    parser.add_argument("--read", type=Path, metavar="PATH", help="print the tables of this file; nothing is run")
    arguments = parser.parse_args()
    if arguments.read:
        return show(json.loads(arguments.read.read_text()))
    arguments.contenders, arguments.data = arguments.contenders.split(","), arguments.data.split(",")
    arguments.rates = [float(rate) for rate in arguments.rates.split(",")]
    for option, given, there in (("contenders", arguments.contenders, NAMES), ("data", arguments.data, list(DATA))):
        if unknown := [one for one in given if one not in there]:
            parser.error(f"--{option}: there are {', '.join(there)}, and {unknown[0] or 'nothing'} is none of them")
    if min(arguments.rates) <= 0 or arguments.prompts < 2 or arguments.rounds < 1:
        parser.error("--rates are above 0, --prompts is at least 2, and --rounds at least 1")
    run = {
        "date": str(datetime.date.today()),
        "command": shlex.join(["tools/bench-serve.sh", *sys.argv[1:]]),
        "versions": {name: version(name) for name in ("kvferry", "vllm", "vllm-router", "nixl", "torch")},
        "settings": {name: rivals.words(name, "cpu") for name in arguments.contenders if name in rivals.NAMES},
        "contenders": arguments.contenders,
        "found": [],
    }

    def keep():
        if arguments.save:
            part = arguments.save.with_suffix(".part")
            part.write_text(json.dumps(run, indent=1) + "\n")
            part.replace(arguments.save)

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / arguments.model
        MODELS[arguments.model]().save_pretrained(model)
        save_tokenizer(model)
        measure(arguments, model, run, keep)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    show(run)


if __name__ == "__main__":
    main()
