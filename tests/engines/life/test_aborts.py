"""Requests that end before their end, on either side and at any time."""

import random

import pytest
from environment import REMOTE_DECODE
from exact import prompts

from .common import USUAL, eventually
from .inside import abort, begin, counter, give_up, steps, whats_left


@pytest.fixture(params=[False, True], ids=["", "async"])
def qwen(request, pair):
    return pair("qwen3", {"async_scheduling": request.param})


def blocks(prompt):
    return -(-len(prompt) // USUAL["qwen3"]["block_size"])


def test_an_abort_before_it_is_scheduled(qwen):
    prefill, decode = qwen
    (prompt,) = prompts(random.Random(4), [100])
    (params,) = prefill.prefill([prompt])
    assert prefill.used_blocks() == blocks(prompt)
    decode.call(begin, "r", prompt, 12, params)
    decode.call(abort, "r")
    # P learns of it: its lease is longer than anybody waits here.
    assert prefill.idle() == 0


def test_an_abort_while_it_loads(qwen):
    prefill, decode = qwen
    draw = random.Random(5)
    warm, prompt, after = prompts(draw, [40, 300, 70])
    alone = decode.generate(after)[0]
    assert decode.generate(warm, params=prefill.prefill([warm])[0])
    for wait in (0, 1, 5, 50):
        params, again = prefill.prefill([prompt, after])
        with prefill.stopped():
            decode.call(begin, "r", prompt, 12, params)
            decode.call(steps, wait)
            if wait == 50:
                eventually(lambda: decode.call(counter, "kvferry_loads_in_flight") == 1)
                assert decode.used_blocks() == blocks(prompt)
            decode.call(abort, "r")
            # Its blocks come back without a word from P.
            assert decode.idle() == 0
            assert decode.call(counter, "kvferry_loads_in_flight") == 0
        # Whatever still arrives finds its blocks unused, or goes nowhere.
        assert decode.generate(after, params=again)[0] == alone
        assert decode.idle() == 0


def test_an_abort_after_it_was_loaded(qwen):
    prefill, decode = qwen
    (prompt,) = prompts(random.Random(6), [100])
    (params,) = prefill.prefill([prompt])
    decode.call(begin, "r", prompt, 400, params)
    eventually(lambda: decode.call(steps, 3) or not decode.call(whats_left)["wanted"])
    decode.call(steps, 3)
    # The few tokens that it has written since fit into the last block.
    assert decode.used_blocks() == blocks(prompt)
    decode.call(abort, "r")


def test_an_abort_on_the_prefill_engine(qwen):
    prefill, _ = qwen
    (prompt,) = prompts(random.Random(7), [300])
    for count in (0, 1, 2):
        prefill.call(begin, "r", prompt, 5, dict(REMOTE_DECODE))
        prefill.call(steps, count)
        prefill.call(abort, "r")
        assert prefill.idle() == 0
    # Too late: it is D's to read.
    (params,) = prefill.prefill([prompt])
    prefill.call(abort, "0")
    assert prefill.used_blocks() == blocks(prompt)
    prefill.call(give_up, params)


@pytest.mark.more
def test_ranks_end_together(pair):
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "failure": "recompute"}
    prefill, decode = pair("qwen3", d=two)
    draw = random.Random(15)
    warm, prompt, after = prompts(draw, [40, 300, 70])
    alone = decode.generate(after)[0]
    assert decode.generate(warm, params=prefill.prefill([warm])[0])
    params, again, bad = prefill.prefill([prompt, after, after])
    with prefill.stopped():
        decode.call(begin, "r", prompt, 12, params)
        decode.call(steps, 20)
        assert decode.used_blocks() == blocks(prompt)
        decode.call(abort, "r")
        assert decode.idle() == 0
    assert decode.generate(after, params=again)[0] == alone
    assert decode.generate(after, params=bad | {"remote_block_ids": [[-1]]})[0] == alone
