"""P starts requests over that D reads while they are computed."""

import random
import time

import pytest
from environment import REMOTE_DECODE
from exact import prompts

from .common import eventually, more
from .inside import (
    begin,
    blank,
    filled,
    filled_of_each,
    pump,
    restarts,
    side,
    steps,
    take_at_once,
    waiting,
)
from .pushed import CHUNKS, FEW, BOUNDED, answers, begin_to_read, preempt, refused, start


@pytest.mark.parametrize("kind", ["qwen3", more("nemotron_h")])
def test_p_starts_requests_over(pair, kind):
    """On few blocks, while D reads them: what was read before counts for nothing."""
    few = {"blocks": FEW[kind], "max_model_len": 256, "scheduler_reserve_full_isl": False}
    # The hybrid's blocks are of 128 tokens: two requests have one when the first one needs another.
    chunk, shortest = (24, 50) if kind == "qwen3" else (32, 140)
    chunks = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": chunk}
    prefill, decode = pair(kind, None, few | chunks | {"extra": CHUNKS["extra"]}, {})
    draw = random.Random(31)
    many = prompts(draw, [draw.randrange(shortest, 180) for _ in range(12)])
    alone = [decode.generate(prompt)[0] for prompt in many]
    decode.call(take_at_once, True)
    names = start(prefill, decode, many)
    eventually(lambda: decode.call(steps, 1) or len(decode.call(waiting)) < 6)
    decode.call(blank)
    # D gives nothing back yet, so P gets short of blocks on every machine.
    again, until = set(), time.monotonic() + 90
    while not again:
        assert time.monotonic() < until
        eventually(lambda: behind(prefill, decode) == set())
        there = {name for name, count in decode.call(filled_of_each).items() if count}
        prefill.call(steps, 1)
        again = there & set(prefill.call(preempted))
    decode.call(take_at_once, False)
    assert [made for made, _ in answers(prefill, decode, names)] == alone


def behind(prefill, decode):
    """Requests of which D has not read all whole blocks that P has computed."""
    done, here = prefill.call(whole_blocks), decode.call(filled_of_each)
    return {name for name in done.keys() & here.keys() if here[name] < done[name]}


def whole_blocks(engine):
    """How many full blocks of each prompt D may read already, by request."""
    from kvferry.vllm.params import stem

    prefill = side(engine).prefill
    # The smallest: a state's is as long as a prompt may be.
    size = min(prefill.groups.block_sizes(prefill.manager))
    return {stem(name): one.tokens // size for name, one in prefill.growing.items()}


def preempted(engine):
    """Requests that it has started over and not yet said anything of since."""
    from kvferry.vllm.params import stem

    growing = side(engine).prefill.growing.values()
    return [stem(one.request.request_id) for one in growing if one.request.status.name == "PREEMPTED"]


@pytest.mark.parametrize("kind, length", [("qwen3", 300), more("nemotron_h", 480)])
def test_a_request_that_is_started_over_while_it_is_read(pair, kind, length):
    prefill, decode = pair(kind, None, CHUNKS)
    draw = random.Random(32)
    prompt, other = prompts(draw, [length, 300])
    alone = prefill.generate(prompt)[0]
    (name,) = begin_to_read(prefill, decode, prompt)
    decode.call(blank)
    prefill.call(steps, length // 64)
    eventually(lambda: decode.call(filled) > 0)
    # Its blocks go to somebody else before it gets others.
    prefill.call(preempt, other)
    prefill.call(steps, 3)
    decode.call(steps, 3)
    ((made, _),) = answers(prefill, decode, [name])
    assert made == alone
    prefill.call(pump)


@pytest.mark.parametrize("policy", [more("fail"), "recompute"])
def test_an_epoch_of_the_past(pair, policy):
    """What P has started over is another grant: nobody reads by the one before."""
    prefill, decode = pair("qwen3", None, CHUNKS, BOUNDED | {"failure": policy})
    prompt, other = prompts(random.Random(37), [300, 300])
    alone = decode.generate(prompt)[0]
    made = {}
    for change in (-1, 1, 0):
        prefill.call(begin, "r", prompt, 1, dict(REMOTE_DECODE))
        prefill.call(steps, 3)
        prefill.call(preempt, other)
        eventually(lambda: prefill.call(steps, 1) or prefill.call(restarts) == [1])
        while "r" not in made:
            made |= prefill.call(pump)
        _, params, _ = made.pop("r")
        params["kvferry"]["ticket"]["epoch"] += change
        before = prefill.call(refused)
        decode.call(begin, "r", prompt, 12, params)
        ((tokens, _, how),) = decode.call(pump).values()
        if change and policy == "fail":
            assert how == "error"
        else:
            assert tokens == alone, change
        assert prefill.call(refused) - before == bool(change)
        assert decode.idle() == prefill.idle() == 0
