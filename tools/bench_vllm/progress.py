"""How far the benchmark is, on standard error."""

import sys
import time


class Progress:
    """Counts tokens of prompts: what takes most of the time."""

    def __init__(self, arguments):
        pairs, each = len(arguments.contenders), sum(arguments.lengths) * arguments.concurrent
        # Every pair is warmed up in every start, and takes its turn in every round.
        self.all = pairs * (arguments.starts * (arguments.lengths[0] + each) + arguments.rounds * each)
        self.done, self.began = 0, None
        self.live = sys.stderr.isatty()
        self.said = time.monotonic()

    def starts(self):
        """Engines start, which is not counted."""
        self.say("engines start", True)

    def asks(self, contender, prompts):
        if self.began is None:
            self.began = time.monotonic()
        tokens = sum(map(len, prompts))
        left = ""
        if self.done:
            seconds = (time.monotonic() - self.began) * (self.all - self.done) / self.done
            left = f", about {seconds / 60:.0f} min left" if seconds > 90 else f", about {seconds:.0f} s left"
        self.say(f"{self.done / self.all:4.0%}{left}: {contender}, {tokens} tokens")
        self.done += tokens

    def say(self, text, now=False):
        if self.live:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        elif now or time.monotonic() - self.said > 30:
            print(text, file=sys.stderr, flush=True)
            self.said = time.monotonic()

    def ends(self):
        if self.live:
            sys.stderr.write("\r\x1b[K")
