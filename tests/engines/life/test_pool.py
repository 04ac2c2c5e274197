"""What it costs D's pool that requests wait for P: blocks in use over time, with and without a pace."""

import random
import time

from exact import prompts

from .common import PATIENT
from .inside import side, take_at_once, turn
from .pushed import start

#: Seconds of a step of P, of 64 tokens: D can tell how long it will take.
STEP = 0.1
CHUNKS = {
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "async_scheduling": False,
    "extra": PATIENT | {"push": "always"},
}


def test_blocks_are_taken_when_they_are_needed(pair):
    prefill, decode = pair("qwen3", None, CHUNKS)
    draw = random.Random(40)
    (first,) = prompts(draw, [480])
    decode.call(transfers_take_no_time, True)
    alone = decode.generate(first, 2)[0]
    # What D learns from.
    assert usage(prefill, decode, [first])[0] == [alone]
    some = prompts(draw, [480] * 3)
    alone = [decode.generate(prompt, 2)[0] for prompt in some]
    made, late = usage(prefill, decode, some)
    assert made == alone
    decode.call(take_at_once, True)
    made, at_once = usage(prefill, decode, some)
    decode.call(take_at_once, False)
    decode.call(transfers_take_no_time, False)
    assert made == alone
    for name, used in (("when needed", late), ("at once", at_once)):
        print(f"D's blocks {name}: " + " ".join(map(str, used)))
    # Fifteen blocks a request; each waits for its turn on P.
    assert sum(late) < 0.6 * sum(at_once)
    # And nobody waits longer for it: the last answer comes at about the same step of P.
    assert len(late) < 1.5 * len(at_once)


def transfers_take_no_time(engine, none):
    """Whether D takes them for nothing. Otherwise it comes as early as the slowest needs that it has seen, in
    whatever test: on a busy machine as soon as P has heard of a request."""
    pace = side(engine).decode.pace
    if none:
        learn = pace.learn
        pace.transfer = None
        pace.learn = lambda frontier, tokens, seconds: learn(frontier, tokens, 0.0)
    else:
        del pace.learn


def usage(prefill, decode, prompts):
    """The answers, and D's blocks in use after each step of P."""
    names = start(prefill, decode, prompts, 2)
    done, used, began = {}, [], time.monotonic()
    while len(done) < len(names):
        assert time.monotonic() < began + 90
        prefill.call(turn)
        until = time.monotonic() + STEP
        while time.monotonic() < until and len(done) < len(names):
            done |= decode.call(turn)
        used.append(decode.used_blocks())
    assert prefill.idle() == decode.idle() == 0
    return [done[name][0] for name in names], used
