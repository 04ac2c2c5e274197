"""Requests of both engines that share a name, or use that of another."""

import random
import time

import pytest
from environment import REMOTE_DECODE
from exact import prompts

from .common import USUAL, eventually, more
from .inside import abort, begin, side, steps, turn, whats_left, where
from .pushed import CHUNKS, BOUNDED, answers, epochs, hasty, knows, refused, start


def test_two_with_one_name(pair):
    """Whoever has it first reads it, and the other one is computed."""
    prefill, decode = pair("qwen3", None, CHUNKS, BOUNDED | {"failure": "recompute"})
    (prompt,) = prompts(random.Random(34), [150])
    alone = decode.generate(prompt)[0]
    there = prefill.call(where)
    prefill.call(begin, "twin", prompt, 1, dict(REMOTE_DECODE))
    made = decode.call(twins, prompt, there)
    # Before one has read it and P has forgotten it, which the other one would wait for.
    eventually(lambda: decode.call(steps, 1) or decode.call(computed_here))
    until = time.monotonic() + 60
    while len(made) < 2:
        assert time.monotonic() < until
        prefill.call(turn)
        made |= decode.call(turn)
    assert [one[0] for one in made.values()] == [alone] * 2


def test_a_twin_leaves(pair):
    """The other one goes on reading what both have the name of."""
    prefill, decode = pair("qwen3", None, CHUNKS, BOUNDED)
    (prompt,) = prompts(random.Random(44), [150])
    alone = decode.generate(prompt)[0]
    eventually(knows, prefill, decode, prompt)
    prefill.call(begin, "twin", prompt, 1, dict(REMOTE_DECODE))
    decode.call(twins, prompt, prefill.call(where))
    prefill.call(steps, 1)
    eventually(lambda: decode.call(steps, 1) or decode.call(computed_here))
    (twin,) = decode.call(computed_here)
    decode.call(abort, twin)
    ((name, (made, _, how)),) = turns_until(prefill, decode).items()
    assert (made, how) == (alone, "length") and name != twin
    assert not decode.call(whats_left)["unwanted"], "D steps for nothing"


def twins(engine, prompt, there):
    """Two requests whose names differ in what vLLM adds to them."""
    for name in ("twin-1", "twin-2"):
        begin(engine, name, prompt, 12, dict(there))
    # Names of one stem: vLLM's own digits come last.
    for name, wanted in side(engine).decode.wanted.items():
        assert wanted.follows["name"] in ("twin-1:150", "twin-2:150"), name
        side(engine).agent.unfollow(name)
        wanted.follows["name"] = "twin:150"
        side(engine).agent.follow(name, **wanted.follows, patience=20.0)
    return {}


def computed_here(engine):
    """Requests that do not wait for what another engine has, without what vLLM adds to their names."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    here = (name for name in scheduler.requests if name not in side(engine).decode.wanted)
    return [name.rpartition("-")[0] for name in here]


def turns_until(prefill, decode):
    """Both engines work until D has an answer."""
    made, until = {}, time.monotonic() + 90
    while not made:
        assert time.monotonic() < until
        prefill.call(turn)
        made = decode.call(turn)
    return made


@pytest.mark.more
def test_one_name_at_two_engines(engines, pair):
    """Both follow it: one of them has it at least, and the other one has it or computes it."""
    options = BOUNDED | {"failure": "recompute"}
    prefill, decode = pair("qwen3", None, CHUNKS, options)
    other = engines("qwen3", "kv_both", **USUAL["qwen3"] | options)
    (prompt,) = prompts(random.Random(41), [150])
    alone = decode.generate(prompt)[0]
    there = prefill.call(where)
    for engine in (decode, other):
        engine.call(begin, "both", prompt, 12, dict(there))
    prefill.call(begin, "both", prompt, 1, dict(REMOTE_DECODE))
    # P keeps it for as long as nobody has come for it.
    eventually(lambda: decode.call(epochs) and other.call(epochs))
    made, until = [], time.monotonic() + 90
    # Whoever has not begun to read it when the other one is done waits for a P that has forgotten it.
    with hasty(decode, other):
        while len(made) < 2:
            assert time.monotonic() < until
            prefill.call(turn)
            for engine in (decode, other):
                made += [tokens for tokens, _, _ in engine.call(turn).values()]
    assert made == [alone] * 2
    assert prefill.idle() == decode.idle() == other.idle() == 0


@pytest.mark.parametrize("policy", [more("fail"), "recompute"])
def test_a_name_of_somebody_else(pair, policy):
    """Names of requests are no secret, and tables are P's own: the prompt tells."""
    prefill, decode = pair("qwen3", None, CHUNKS, BOUNDED | {"failure": policy})
    prompt, theirs = prompts(random.Random(38), [150, 150])
    alone = decode.generate(prompt)[0]
    before = prefill.call(refused)
    (name,) = start(prefill, decode, [theirs], sent=[prompt])
    ((made, how),) = answers(prefill, decode, [name])
    assert (how == "error") if policy == "fail" else (made == alone)
    assert prefill.call(refused) - before == 1
    assert decode.idle() == prefill.idle() == 0
