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

from . import ROOT
from .models import AT_ONCE, FAMILIES, STATES, USUAL, merged
from .models import DS as CHANNELS_FIRST

#: One more than the longest answer: it goes on from there, too.
TOKENS = 4
#: About, as long as most streams of the training.
LENGTH = 200
OURS, RIVAL = "kvferry", "NixlConnector"
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
    """Engines of a family, which takes them long to start: those that were asked for are kept, up to `most`."""

    def __init__(self, family, most=8):
        self.folder = ROOT / "models" / "tiny" / family
        cards.checked(self.folder)
        self.family, self.most, self.running = family, most, {}
        self.said = tempfile.TemporaryDirectory()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        self.said.cleanup()

    def close(self):
        while self.running:
            self.running.popitem()[1].close()

    def alone(self):
        """One engine, without any connector."""
        return self._started("alone", None, {})

    def ours(self, prefill, decode):
        return [self._started("P", "kv_producer", prefill), self._started("D", "kv_consumer", decode)]

    def rivals(self, prefill, decode):
        """As its documentation starts it: a role for each, states channels first. It keeps cores busy while it is idle:
        nobody else runs meanwhile."""
        self.close()
        states = CHANNELS_FIRST if self.family in STATES else {}
        both = [merged({"stock": True}, LEASE, states, side) for side in (prefill, decode)]
        roles = ("kv_producer", "kv_consumer")
        return [self._started(f"rival {role}", role, options) for role, options in zip(roles, both, strict=True)]

    def _started(self, side, role, options):
        key = (side, repr(sorted(options.items(), key=str)))
        if key in self.running:
            self.running[key] = self.running.pop(key)
            return self.running[key]
        while len(self.running) >= self.most:
            self.running.pop(next(iter(self.running))).close()
        log = Path(self.said.name) / f"{len(os.listdir(self.said.name))}.log"
        into = {"prepare": [functools.partial(_say_into, log)]}
        try:
            server = Server(self.folder, role, **merged(USUAL, into, FAMILIES[self.family], options))
        except (AssertionError, EOFError) as error:
            raise Failed(_reason(f"{error}\n{log.read_text()}")) from None
        server.log = log
        self.running[key] = server
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
    made = []
    for at in range(0, len(asked.prompts), AT_ONCE):
        some = asked.prompts[at : at + AT_ONCE]
        try:
            made += _batch(prefill, decode, some, how)
        except (AssertionError, EOFError) as error:
            raise Failed(_reason("\n".join([str(error), prefill.log.read_text(), decode.log.read_text()]))) from None
    if failed := made.count([]):
        raise Failed(f"{failed} of {len(made)} requests fail: {_reason(decode.log.read_text())}")
    left = prefill.idle(), decode.idle()
    if any(left):
        raise Failed(f"{left[0]} blocks are still in use on P, and {left[1]} on D")
    return made


def _batch(prefill, decode, prompts, how):
    if how == "push":
        return push(prefill, decode, prompts, TOKENS)
    if how == "prefix":
        # Each side has some part of each prompt, and P all of some.
        prefill.generate_all([prompt[: len(prompt) // 2] for prompt in prompts[::2]] + prompts[1::4], 1)
        decode.generate_all([prompt[: len(prompt) // 2] for prompt in prompts[::3]], 1)
    params = prefill.prefill(prompts)
    if not all(params):
        raise Failed("P hands nothing over")
    made = [tokens for tokens, _ in decode.generate_all(prompts, TOKENS, params)]
    if how == "prefix":
        for server in (prefill, decode):
            server.idle()
            server.call(forget)
    return made
