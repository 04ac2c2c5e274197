"""Servers of a trained model answer questions whose answers are known, for as long as they are let, while other
servers end.

    tools/soak.sh [--minutes N] [--model NAME] [--clients N] [--every SECONDS] [--into FOLDER]

Two prefill and two decode servers stand behind `vllm-router`, every load is audited, and clients ask all the while:
streaming or
not, and one in ten leaves before its answer is complete. Every so many seconds a server is killed, or drained and then
stopped, and started again. An answer is wrong that is not what a server says which computed everything by itself,
before
all this began. While servers end, requests may fail: they are counted by what was said.

What servers take of the machine is written down every five seconds: memory that is their own, threads, open files,
blocks in
use. In the end nobody asks any more, and what is left is compared with what was there in the beginning, for the
servers that
ran all the while between two of their starts.

FOLDER (default: soak) has `soak.json`, written as it grows, and `soak.svg`. Ends with 1 for a wrong answer, an audit
that found
a difference, blocks that are held in the end, or threads and files that grow.
"""

import argparse
import collections
import contextlib
import datetime
import json
import random
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

import openai
import questions
import serving  # noqa: F401

from . import ROOT, judge
from .plot import plot
from .servers import BLOCKS, DECODE, LEASE, PREFILL, SERVERS, Fleet, text

#: About, as in training.
LENGTH = 200
#: What is left of an answer's time when nobody gives up on it.
ANSWER = 120
EVENTS = ("kill prefill2", "drain prefill", "kill decode2", "drain decode")


class Soak:
    def __init__(self, fleet, asked, seconds):
        self.fleet, self.asked, self.ends = fleet, asked, time.monotonic() + seconds
        self.began, self.lock = time.monotonic(), threading.Lock()
        self.counts, self.said, self.wrong = collections.Counter(), collections.Counter(), []
        self.samples, self.events = [], []

    def now(self):
        return round(time.monotonic() - self.began, 1)

    def ask(self, who, prompt, tokens, stream=False, leave=False):
        answer = self.fleet.client(who).completions.create(
            model=self.fleet.model, prompt=text(prompt), max_tokens=tokens, temperature=0.0, stream=stream, timeout=ANSWER,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        if not stream:
            return list(answer.choices[0].token_ids)
        made = []
        for chunk in answer:
            made += chunk.choices[0].token_ids or ()
            if leave and made:
                answer.close()
                break
        return made

    def client(self, seed):
        draw = random.Random(seed)
        while time.monotonic() < self.ends:
            prompt, wanted = draw.choice(self.asked)
            leave, stream = draw.random() < 0.1, draw.random() < 0.5
            try:
                # Who leaves has asked for more.
                tokens = 64 if leave else len(wanted)
                made = self.ask("router", prompt, tokens, stream or leave, leave)
            except (openai.APIError, OSError) as error:
                with self.lock:
                    self.counts["failed"] += 1
                    self.said[f"{type(error).__name__}: {str(error)[:100]}"] += 1
                time.sleep(0.5)
                continue
            some = min(len(made), len(wanted))
            right = made[:some] == wanted[:some] and (leave or some == len(wanted))
            with self.lock:
                self.counts["left" if leave and right else "right" if right else "wrong"] += 1
                if not right:
                    self.wrong.append({"at": self.now(), "prompt": prompt, "wanted": wanted, "made": made})

    def sample(self, keep):
        while time.monotonic() < self.ends:
            self.samples.append(self.seen())
            keep()
            time.sleep(5)

    def seen(self):
        line = {"at": self.now(), "answers": dict(self.counts), "servers": {}}
        for who in (*SERVERS, "router"):
            try:
                line["servers"][who] = self.fleet.taken(who)
                if who != "router":
                    line["servers"][who]["blocks"] = self.fleet.used_blocks(who, BLOCKS)
                if who in DECODE:
                    line["servers"][who]["audits"] = self.audited(who)
            except (KeyError, OSError, AssertionError):
                # It is being started, or is over.
                continue
        return line

    def disturb(self, every):
        """Ends one server after the other, and starts it again."""
        turn = 0
        while time.monotonic() + every < self.ends:
            time.sleep(every)
            what = EVENTS[turn % len(EVENTS)]
            turn += 1
            how, who = what.split()
            self.note(what)
            if how == "kill":
                self.fleet.kill(who)
            else:
                self.fleet.drain(who)
                time.sleep(5)
                self.fleet.stop(who)
            self.fleet.start(who)
            self.note(f"{who} is back")

    def note(self, what):
        self.events.append({"at": self.now(), "what": what})
        print(f"{self.now():7.1f} s  {what}  {dict(self.counts)}", file=sys.stderr, flush=True)

    def audited(self, who):
        """What its audits have found since it was started."""
        found = {}
        for result in judge.AUDITS:
            with contextlib.suppress(AssertionError):
                found[result] = int(self.fleet.metric(who, f"kvferry_audits_{result}_total"))
        return found


def show(run):
    said = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    print(f"{run['date']}, {said}\n$ {run['command']}")
    answers = run["answers"]
    print(f"{run['model']}, {run['seconds'] / 60:.0f} min, {run['clients']} clients: {answers}; audits: {run['audits']}")
    for what, count in collections.Counter(event["what"] for event in run["events"] if event["what"] in EVENTS).items():
        print(f"{what}: {count} times")
    for said, count in run["failed"].items():
        print(f"{count} failed: {said}")
    for who, one in run["flat"].items():
        taken = ("memory", "threads", "files", "blocks")
        pairs = ", ".join(f"{what} {one['first'].get(what)} → {one['last'].get(what)}" for what in taken)
        print(f"{who}, from {one['from']:.0f} to {one['to']:.0f} s: {pairs}")


def main():
    parser = argparse.ArgumentParser("tools/soak.sh", description=__doc__.splitlines()[0])
    models = sorted(one.name for one in (ROOT / "models" / "tiny").iterdir())
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--model", choices=models, default="falcon-h1")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--every", type=float, default=90, help="seconds between two servers' ends")
    parser.add_argument("--into", type=Path, default=Path("soak"), metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.minutes <= 0 or arguments.clients < 1 or arguments.every <= 0:
        parser.error("--minutes and --every are above 0, and --clients is at least 1")
    arguments.into.mkdir(parents=True, exist_ok=True)
    run = {
        "date": str(datetime.date.today()),
        "command": f"tools/soak.sh --minutes {arguments.minutes:g} --model {arguments.model} --every {arguments.every:g}",
        "versions": {name: version(name) for name in ("kvferry", "vllm", "vllm-router", "torch")},
        "model": arguments.model,
        "clients": arguments.clients,
    }
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(ROOT / "models" / "tiny" / arguments.model, Path(folder))
        try:
            fleet.start(*SERVERS)
            fleet.start("router")
            soak = soaked(fleet, arguments, run)
        except BaseException:
            for who in SERVERS:
                if fleet.log(who).exists():
                    (arguments.into / f"{who}.log").write_text(fleet.log(who).read_text(errors="replace")[-200_000:])
            raise
        finally:
            fleet.close()
    show(run)
    (arguments.into / "soak.svg").write_text(plot(run))
    if soak.wrong:
        print("the first wrong answer:", soak.wrong[0], file=sys.stderr)
    if wrong := judge.verdict(run):
        sys.exit("error: " + "; ".join(wrong))


def soaked(fleet, arguments, run):
    every = [one for task in questions.TASKS for one in questions.prompts(task, 12, LENGTH, seed=1)]
    soak = Soak(fleet, [], 0)
    # What a server says that computes it all: nothing is handed over to it so.
    soak.asked = [(prompt, soak.ask("decode", prompt, len(answer))) for prompt, answer in every]
    known = sum(made == answer for (_, made), (_, answer) in zip(soak.asked, every, strict=True))
    soak.note(f"one server alone knows {known} of {len(every)} answers")
    soak.began, soak.ends = time.monotonic(), time.monotonic() + 60 * arguments.minutes

    def keep():
        run.update(
            seconds=soak.now(), answers=dict(soak.counts), failed=dict(soak.said), events=soak.events,
            samples=soak.samples, audits=judge.audits(soak.samples), flat=judge.flat(soak.samples, soak.events),
            known=[known, len(every)],
        )  # fmt: skip
        part = arguments.into / "soak.part"
        part.write_text(json.dumps(run) + "\n")
        part.replace(arguments.into / "soak.json")

    threads = [threading.Thread(target=soak.client, args=(at,)) for at in range(arguments.clients)]
    threads.append(threading.Thread(target=soak.sample, args=(keep,)))
    for thread in threads:
        thread.start()
    try:
        soak.disturb(arguments.every)
    finally:
        for thread in threads:
            thread.join()
    # Leases of whoever left end by themselves.
    end = time.monotonic() + LEASE + 30
    while time.monotonic() < end:
        time.sleep(2)
        soak.samples.append(soak.seen())
        if not any(one.get("blocks") for one in soak.samples[-1]["servers"].values()):
            break
    keep()
    soak.note("the end")
    return soak


if __name__ == "__main__":
    main()
