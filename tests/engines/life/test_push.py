"""A request that goes to both engines at once: D reads what P has computed while P goes on."""

import random

import pytest
from environment import REMOTE_DECODE
from exact import prompts, unbound

from .common import AHEAD, PATIENT, eventually, more
from .inside import (
    begin,
    computed,
    count_computed,
    count_preemptions,
    forget,
    preemptions,
    pump,
    steps,
    take_at_once,
    waiting,
    where,
)
from .pushed import CHUNKS, FEW, STAGES, TWO, answers, content, followed, push, read, start
from .test_held import ATTENTION, RECURRENT, STATES, block_size


@pytest.mark.parametrize(
    "kind, p, d",
    [
        ("qwen3", {}, {"block_size": 64}),
        ("gemma3", {}, {}),
        ("nemotron_h", {}, {}),
        ("qwen3", STAGES, TWO),
        more("qwen3", TWO, {}),
        more("qwen3", STAGES, {}),
        more("qwen3", {"block_size": 96}, {}),
        more("qwen3", {"async_scheduling": True}, {"async_scheduling": True}),
        more("qwen3", {}, TWO),
        more("gemma3", {"block_size": 64}, TWO),
        more("nemotron_h", {"async_scheduling": True}, {"async_scheduling": True}),
        more("nemotron_h", STAGES, {}),
        more("falcon_h1", TWO, {}),
        more("falcon_h1", {}, STAGES),
    ],
)
def test_answers_are_those_of_one_engine(pair, kind, p, d):
    prefill, decode = pair(kind, None, CHUNKS | p, d)
    draw = random.Random(f"push {kind}")
    some = prompts(draw, [200, 1, 2, 31, 33, 64, 65, 130])
    alone = [prefill.generate(prompt)[0] for prompt in some]
    if kind == "gemma3":
        assert prefill.call(forget)
    # One after the other, and all at once.
    for prompt, expected in zip(some[:3], alone):
        assert push(prefill, decode, [prompt]) == [expected], len(prompt)
    assert push(prefill, decode, some) == alone
    # The control: only P's state leads to this answer.
    other = prompts(draw, [199])[0] + some[0][-1:]
    with unbound(prefill, decode):
        assert push(prefill, decode, some[:1], sent=[other]) == alone[:1]


@pytest.mark.parametrize("kind, length", [("qwen3", 300), ("nemotron_h", 480)])
def test_what_is_computed_is_read_while_p_goes_on(pair, kind, length):
    prefill, decode = pair(kind, None, CHUNKS)
    (prompt,) = prompts(random.Random(f"early {kind}"), [length])
    alone = prefill.generate(prompt)[0]
    decode.call(take_at_once, True)
    before = decode.call(content)
    (name,) = start(prefill, decode, [prompt])
    # All but two chunks, and then P rests.
    prefill.call(steps, length // 64)
    eventually(lambda: decode.call(steps, 1) or not decode.call(waiting))
    assert prefill.call(followed) == [(length // 64 - 1) * 64]
    # D computes nothing itself.
    eventually(lambda: decode.call(content) != before)
    ((made, _),) = answers(prefill, decode, [name])
    decode.call(take_at_once, False)
    assert made == alone


def test_prefixes_that_either_side_holds(pair):
    """What P holds can be read before it computes anything; what D holds is not moved."""
    prefill, decode = pair("qwen3", {"prefix": True}, CHUNKS, {})
    draw = random.Random(30)
    (prompt,) = prompts(draw, [250])
    alone = prefill.generate(prompt)[0]
    assert prefill.call(forget)
    for on_p, on_d in ((0, 0), (130, 0), (0, 130), (100, 200), (249, 40), (40, 249)):
        for engine, held in ((prefill, on_p), (decode, on_d)):
            if held:
                engine.generate(prompt[:held], 1)
        before = read(decode)
        assert push(prefill, decode, [prompt]) == [alone], (on_p, on_d)
        # 2,048 bytes a token, and little more.
        assert 0 < read(decode) - before < 2048 * (250 - on_d // 32 * 32) + 2048 * 32
        for engine in (prefill, decode):
            assert engine.idle() == 0
            assert engine.call(forget)


@pytest.mark.more
def test_prefixes_of_states_that_either_side_holds(pair):
    """A state comes whole, at the end, whatever else is held."""
    chunks = CHUNKS | {"max_num_batched_tokens": 256, "extra": CHUNKS["extra"] | STATES["extra"]}
    prefill, decode = pair("nemotron_h", STATES, chunks, {"extra": AHEAD["extra"] | STATES["extra"]})
    size = decode.call(block_size)
    (prompt,) = prompts(random.Random(45), [3 * size + 20])
    alone = prefill.generate(prompt)[0]
    prefill.call(count_computed)
    assert prefill.call(forget) and decode.call(forget)
    for on_p, on_d in ((0, 0), (2, 0), (0, 2), (1, 2), (2, 1), (3, 3)):
        for engine, held in ((prefill, on_p), (decode, on_d)):
            if held:
                engine.generate(prompt[: held * size + 5], 1)
        before, done = read(decode), prefill.call(computed)
        assert push(prefill, decode, [prompt]) == [alone], (on_p, on_d)
        assert prefill.call(computed) - done == len(prompt) - 1 - on_p * size, (on_p, on_d)
        assert read(decode) - before == RECURRENT + ATTENTION * (len(prompt) - 1 - on_d * size), (on_p, on_d)
        for engine in (prefill, decode):
            assert engine.idle() == 0
            assert engine.call(forget)


@pytest.mark.parametrize("kind", ["qwen3", more("nemotron_h")])
def test_more_requests_than_either_engine_holds(pair, kind):
    """P keeps what it has finished until D has blocks for it, and D takes none that P needs for that."""
    few = {"blocks": FEW[kind], "max_model_len": 256, "scheduler_reserve_full_isl": False}
    chunks = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 24}
    prefill, decode = pair(kind, few | chunks, {"extra": CHUNKS["extra"]})
    draw = random.Random(46)
    many = prompts(draw, [1, 32, 33] + [draw.randrange(50, 180) for _ in range(9)])
    alone = [decode.generate(prompt, 40)[0] for prompt in many]
    there = prefill.call(where)
    # As it would be; and D is as eager as it can be, for those that P comes to last.
    for at_once in (False, True):
        decode.call(take_at_once, at_once)
        prefill.call(count_preemptions)
        names = [f"many{at_once}-{at}" for at in range(len(many))]
        for name, prompt in zip(names, many):
            prefill.call(begin, name, prompt, 1, dict(REMOTE_DECODE))
        for name, prompt in sorted(zip(names, many), reverse=at_once, key=lambda one: names.index(one[0])):
            decode.call(begin, name, prompt, 40, dict(there))
        # D has all the blocks that it will take.
        decode.call(steps, 20)
        assert answers(prefill, decode, names) == [(tokens, "length") for tokens in alone]
        assert prefill.call(preemptions) > 0
    decode.call(take_at_once, False)


def test_requests_that_each_server_names_for_itself(pair):
    """As those to `/v1/responses`: the prompt is what they have in common."""
    prefill, decode = pair("qwen3", None, CHUNKS)
    draw = random.Random(39)
    some = prompts(draw, [150, 33, 70])
    alone = [prefill.generate(prompt)[0] for prompt in some]
    before = read(decode)
    names = start(prefill, decode, some, prefix="resp_d", on_p="resp_p")
    assert [made for made, _ in answers(prefill, decode, names)] == alone
    # 2,048 bytes a token: D has computed none of them.
    assert read(decode) - before >= 2048 * sum(len(prompt) - 1 for prompt in some)


def test_routers_that_ask_p_first_keep_working(pair):
    """With P's parameters as they were, and with what the stock router leaves of them."""
    prefill, decode = pair("qwen3", None, CHUNKS)
    (prompt,) = prompts(random.Random(36), [150])
    alone = decode.generate(prompt)[0]
    (params,) = prefill.prefill([prompt])
    assert params["transfer_mode"] == "push"
    assert decode.generate(prompt, params=params)[0] == alone
    prefill.call(begin, "first", prompt, 1, dict(REMOTE_DECODE))
    ((_, params, _),) = prefill.call(pump).values()
    del params["kvferry"], params["remote_block_ids"]
    decode.call(begin, "first", prompt, 12, params)
    assert answers(prefill, decode, ["first"])[0][0] == alone
    quiet, _ = pair("qwen3", None, CHUNKS | {"extra": PATIENT | {"push": "never"}})
    (params,) = quiet.prefill([prompt])
    assert "transfer_mode" not in params
    assert decode.generate(prompt, params=params)[0] == alone
