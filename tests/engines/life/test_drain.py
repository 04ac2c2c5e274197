"""A P that drains: D reads what was promised before, and computes the rest itself; no request fails."""

import random

import pytest
from environment import REMOTE_DECODE
from exact import prompts

from .common import PATIENT
from .inside import begin, counter, pump, side, where
from .pushed import answers, push, start

CHUNKS = {
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "async_scheduling": False,
    "extra": PATIENT | {"push": "always"},
}


def drain(engine, on):
    agent = side(engine).agent
    return agent.drain() if on else agent.resume()


def left(engine):
    return side(engine).agent.left()


def read(decode):
    return decode.call(counter, "kvferry_read_bytes_total")


@pytest.fixture
def drained(pair):
    """Three prompts, what one engine answers to them, and a P that drains once it has the first."""
    prefill, decode = pair("qwen3", None, CHUNKS)
    some = prompts(random.Random("drain"), [200, 130, 90])
    yield prefill, decode, some, [prefill.generate(prompt)[0] for prompt in some]
    prefill.call(drain, False)


def test_requests_that_were_sent_to_both(drained):
    prefill, decode, (promised, early, late), alone = drained
    names = start(prefill, decode, [promised])
    # Of the second one D hears first: P will have nothing for it.
    assert prefill.call(drain, True)
    decode.call(begin, "early", early, 12, prefill.call(where))
    before = read(decode)
    assert [made for made, _ in answers(prefill, decode, [*names, "early"])] == alone[:2]
    after = read(decode)
    assert after > before
    assert push(prefill, decode, [late]) == [alone[2]]
    assert read(decode) == after
    assert prefill.call(left) == (0, 0)
    prefill.call(drain, False)
    assert push(prefill, decode, [late]) == [alone[2]]
    assert read(decode) > after


def test_a_request_that_was_sent_to_one_after_the_other(drained):
    prefill, decode, (promised, late, _), alone = drained
    offered = handed(prefill, "promised", promised)
    assert prefill.call(drain, True)
    assert handed(prefill, "late", late) is None
    assert prefill.call(left) == (1, 0)
    decode.call(begin, "promised", promised, 12, offered)
    assert decode.call(pump)["promised"][0] == alone[0]
    assert prefill.call(left) == (0, 0)


def handed(prefill, name, prompt):
    """What P tells the router about a prompt that it has computed."""
    prefill.call(begin, name, prompt, 1, dict(REMOTE_DECODE))
    return prefill.call(pump)[name][1]
