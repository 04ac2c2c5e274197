"""Requests come in chunks, wait for blocks, and are preempted."""

import random
import time

import pytest
from environment import REMOTE_DECODE
from exact import prompts

from .common import more
from .inside import begin, count_preemptions, preemptions, pump


@pytest.mark.parametrize(
    "kind, ahead",
    [("qwen3", True), more("qwen3", False), ("nemotron_h", False), more("nemotron_h", True)],
)
def test_many_requests_on_few_blocks(pair, kind, ahead):
    """They come in chunks, wait for blocks that leases keep, and are preempted on both sides."""
    few = {"blocks": 13, "max_model_len": 256, "scheduler_reserve_full_isl": False}
    chunks = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 24}
    prefill, decode = pair(kind, few | chunks | {"async_scheduling": ahead})
    draw = random.Random(3)
    many = prompts(draw, [1, 2, 31, 32, 33, 64] + [draw.randrange(50, 180) for _ in range(14)])
    alone = [decode.generate(prompt, 40)[0] for prompt in many]
    for engine in (prefill, decode):
        engine.call(count_preemptions)
    assert hand_over(prefill, decode, many, 40) == alone
    # How often depends on when blocks come back from the other engine, another process.
    assert prefill.call(preemptions) > 0 and decode.call(preemptions) > 0


def hand_over(prefill, decode, prompts, tokens=12):
    """All requests at once, each from P to D when P has finished it: the answers in their order."""
    for at, prompt in enumerate(prompts):
        prefill.call(begin, str(at), prompt, 1, dict(REMOTE_DECODE))
    answers, deadline = {}, time.monotonic() + 240
    while len(answers) < len(prompts):
        assert time.monotonic() < deadline, f"only {sorted(answers)} have an answer"
        for name, (_, params, reason) in prefill.call(pump, 0.05).items():
            assert reason == "length"
            decode.call(begin, name, prompts[int(name)], tokens, params)
        for name, (made, _, reason) in decode.call(pump, 0.05).items():
            assert reason == "length"
            answers[name] = made
    return [answers[str(at)] for at in range(len(prompts))]
