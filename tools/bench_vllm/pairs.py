"""What takes its turn: a pair of engines, or one that is asked again. They say how long a first token took."""

import collections
import os
import signal
import time
from multiprocessing.connection import wait

import environment

from .contenders import AGAIN, is_rival
from .engine import PATIENCE, Engine
from .models import hybrid


class Tokens:
    """First tokens by prompt."""

    def __init__(self):
        self.made, self.differ = {}, collections.Counter()

    def note(self, contender, prompt, token):
        self.differ[contender] += self.made.setdefault(tuple(prompt), token) != token


class Pair:
    def __init__(self, contender, model, arguments, tokens):
        self.tokens, self.p_ends_early = tokens, hybrid(arguments.model)
        self.contender = contender.partition("@")[0]
        self.pushes = self.contender.endswith("+push")
        self.prefill = Engine(self.contender, "kv_producer", model, arguments)
        self.decode = Engine(self.contender, "kv_consumer", model, arguments)
        self.where, self.asked = None, 0

    def ready(self):
        self.where, _ = [engine.ready() for engine in (self.prefill, self.decode)]
        self._signal(signal.SIGSTOP)

    def first_tokens(self, prompts):
        """For each prompt, all asked at once: seconds from P's end to D's first token, and from asking."""
        self._signal(signal.SIGCONT)
        began, ended, firsts = {}, {}, {}
        by_name = {}
        for prompt in prompts:
            self.asked += 1
            name = f"r{self.asked}"
            by_name[name], began[name] = prompt, time.monotonic()
            self.prefill.ask(name, prompt, dict(environment.REMOTE_DECODE))
            if self.pushes:
                self.decode.ask(name, prompt, dict(self.where))
        engines = {engine.pipe: engine for engine in (self.prefill, self.decode)}
        while len(firsts) < len(prompts) or len(ended) < len(prompts):
            ready = wait(list(engines), PATIENCE)
            if not ready:
                raise TimeoutError(f"{self.contender}: no answer within {PATIENCE} s")
            for pipe in ready:
                name, at, token, params = engines[pipe].answer()
                if pipe is self.decode.pipe or not self.p_ends_early:
                    self.tokens.note(self.contender, by_name[name], token)
                if pipe is self.decode.pipe:
                    firsts[name] = at
                    continue
                assert params, f"{self.contender}: P hands nothing over"
                ended[name] = at
                if not self.pushes:
                    self.decode.ask(name, by_name[name], params)
        for engine in (self.prefill, self.decode):
            engine.rest()
        self._signal(signal.SIGSTOP)
        return [(firsts[name] - ended[name], firsts[name] - began[name]) for name in by_name]

    def _signal(self, number):
        # NIXL's progress thread, as the rival sets it up, keeps a core busy even when idle. It does
        # so in its own turns only.
        if is_rival(self.contender):
            for engine in (self.prefill, self.decode):
                os.kill(engine.process.pid, number)

    def close(self):
        self._signal(signal.SIGCONT)
        self.decode.close()
        self.prefill.close()


class Again:
    """One engine, asked everything twice."""

    def __init__(self, model, arguments, tokens):
        self.tokens = tokens
        self.engine = Engine(AGAIN, None, model, arguments)

    def ready(self):
        self.engine.ready()

    def first_tokens(self, prompts):
        """For each prompt: seconds from asking for the second time to the first token, twice."""
        by_name = {f"r{at}": prompt for at, prompt in enumerate(prompts)}
        for _ in range(2):
            began, firsts = {}, {}
            for name, prompt in by_name.items():
                began[name] = time.monotonic()
                self.engine.ask(name, prompt, None)
            while len(firsts) < len(prompts):
                name, at, token, _ = self.engine.answer()
                firsts[name] = at
                self.tokens.note(AGAIN, by_name[name], token)
            self.engine.rest()
        return [(firsts[name] - began[name],) * 2 for name in by_name]

    def close(self):
        self.engine.close()
