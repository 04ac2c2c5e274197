"""Questions with answers, and who answers them: one engine, or two of which one hands over to the other."""

import functools
import os
import re
import tempfile
from pathlib import Path

import cards
import questions
from life.inside import forget
from life.pushed import push
from serving import Server

import patches
import rivals

from . import ROOT, models
from .models import AT_ONCE, STATES, merged
from .models import DS as CHANNELS_FIRST

#: One more than the longest answer: it goes on from there, too.
TOKENS = 4
#: About, as long as most streams of the training.
LENGTH = 200
OURS = "kvferry"
#: Nothing is given up because a machine is busy.
LEASE = {"extra": {"kv_lease_duration": 600}}


class Questions:
    """So many of each kind, mixed: neighbours in a batch are of different kinds."""

    def __init__(self, count, seed=1, tasks=tuple(questions.TASKS)):
        asked = {task: questions.prompts(task, count, LENGTH, seed) for task in tasks}
        short = {task: len(some) for task, some in asked.items() if len(some) < count}
        if short:
            raise SystemExit(f"error: of {count} prompts there are only {short}; ask for fewer")
        self.tasks = [task for _ in range(count) for task in asked]
        mixed = [one for several in zip(*asked.values()) for one in several]
        self.prompts, self.answers = [prompt for prompt, _ in mixed], [answer for _, answer in mixed]

    def right(self, made):
        """By kind: right answers, and questions."""
        found = {task: [0, 0] for task in self.tasks}
        for task, tokens, wanted in zip(self.tasks, made, self.answers, strict=True):
            found[task][0] += tokens[: len(wanted)] == wanted
            found[task][1] += 1
        return found


class Failed(Exception):
    """An engine that does not start or does not answer, in its own words."""


class Engines:
    """Engines of a family, which takes them long to start: those that were asked for are kept, up to `most`. `site`
    says how
    they are started: `models` on a CPU, `on_card` on a GPU."""

    def __init__(self, family, site=models, most=8):
        self.family, self.site, self.most, self.running = family, site, most, {}
        self.said = tempfile.TemporaryDirectory()
        self.folder = site.weights(ROOT / "models" / "tiny" / family, Path(self.said.name))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        self.said.cleanup()

    def close(self):
        while self.running:
            self.running.popitem()[1].close()

    def alone(self, options=None):
        """One engine, without any connector."""
        return self._both([("alone", None, options or {})])[0]

    def ours(self, prefill, decode):
        return self._both([("P", "kv_producer", prefill), ("D", "kv_consumer", decode)])

    def rivals(self, prefill, decode, name=rivals.INSTALLED):
        """As its documentation starts it: a role for each, states channels first. It keeps cores busy while it is idle:
        nobody else runs meanwhile."""
        self.close()
        states = CHANNELS_FIRST if self.family in STATES else {}
        environment, extra = rivals.settings(name, self.site.DEVICE)
        set_ = {"prepare": [patches.environment(**environment)], "extra": extra}
        both = [merged({"stock": True}, LEASE, states, set_, side) for side in (prefill, decode)]
        return self._both([("rival P", "kv_producer", both[0]), ("rival D", "kv_consumer", both[1])])

    def _both(self, sides):
        """They start side by side; none of them is ended for another of them."""
        keys = [(side, repr(sorted(options.items(), key=str))) for side, _, options in sides]
        for key in keys:
            if key in self.running:
                self.running[key] = self.running.pop(key)
        begun = []
        for key, (_, role, options) in zip(keys, sides, strict=True):
            if key in self.running:
                continue
            while len(self.running) >= max(self.most, len(sides)):
                self.running.pop(next(iter(self.running))).close()
            self.running[key] = self._begun(role, options)
            begun.append(key)
        for key in begun:
            server = self.running[key]
            try:
                server.ask("ready")
            except (AssertionError, EOFError) as error:
                raise Failed(_reason(f"{error}\n{server.log.read_text()}")) from None
        return [self.running[key] for key in keys]

    def _begun(self, role, options):
        log = Path(self.said.name) / f"{len(os.listdir(self.said.name))}.log"
        log.touch()
        into = {"prepare": [functools.partial(_say_into, log)]}
        everybody = merged(self.site.USUAL, into, (self.site.FAMILIES | self.site.REAL)[self.family], options)
        server = Server(self.folder, role, wait=False, **everybody)
        server.log = log
        return server


def _say_into(log):
    """What an engine and its ranks say goes to a file from now on."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.dup2(2, 1)


#: A line that names an error, in a log's own line or by itself; not the line of a program that raises it.
NAMED = re.compile(r"(?:^|\s)((?:[\w.]+(?:Error|Exception)|[\w.]*Unsupported)(?:: .*)?)$")
#: What stands around an error of vLLM's ranks, and is none.
AROUND = ("See root cause above", "Worker failed with error", "Engine core initialization failed", "cancelled")


def _reason(text):
    """The error that a text names last, which is where the others come from."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [one.group(1) for one in map(NAMED.search, lines) if one and not any(word in one.group(1) for word in AROUND)]
    return (named or lines or ["it ended without a word"])[-1][:300]


def answers(server, asked):
    """Of one engine."""
    return [tokens for tokens, _ in server.generate_all(asked.prompts, TOKENS)]


def handed_over(prefill, decode, asked, how="pull"):
    """D's answers from P's state, with so many requests at once; and that nothing is left behind."""

    def ask(_, prompts, params):
        return [tokens for tokens, _ in decode.generate_all(prompts, TOKENS, params)]

    return handing(prefill, decode, asked.prompts, ask, how)


def handing(prefill, decode, prompts, ask, how="pull"):
    """The same, and `ask` says how D is asked for the prompts from one on, with what P has said of them."""
    made = []
    for at in range(0, len(prompts), AT_ONCE):
        some = prompts[at : at + AT_ONCE]
        try:
            made += _batch(prefill, decode, some, functools.partial(ask, at), how)
        except (AssertionError, EOFError) as error:
            raise Failed(_reason("\n".join([str(error), prefill.log.read_text(), decode.log.read_text()]))) from None
    if failed := sum(one in ([], ([], [])) for one in made):
        raise Failed(f"{failed} of {len(made)} requests fail: {_reason(decode.log.read_text())}")
    left = prefill.idle(), decode.idle()
    if any(left):
        raise Failed(f"{left[0]} blocks are still in use on P, and {left[1]} on D")
    return made


def _batch(prefill, decode, prompts, ask, how):
    if how == "push":
        return push(prefill, decode, prompts, TOKENS)
    if how == "prefix":
        # Each side has some part of each prompt, and P all of some.
        prefill.generate_all([prompt[: len(prompt) // 2] for prompt in prompts[::2]] + prompts[1::4], 1)
        decode.generate_all([prompt[: len(prompt) // 2] for prompt in prompts[::3]], 1)
    params = prefill.prefill(prompts)
    if not all(params):
        raise Failed("P hands nothing over")
    made = ask(prompts, params)
    if how == "prefix":
        for server in (prefill, decode):
            server.idle()
            server.call(forget)
    return made
