"""The real router sends each request to both servers at once, once the prefill server has told it to (`push`).

What holds for one server after the other (test_served.py) must hold then, too.
"""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import test_served
from http_pair import ANSWER, until
from test_served import SEPARATE, ask, assert_no_block_is_held, moved, prefill, served, text


@pytest.fixture(scope="module", params=["qwen3", pytest.param("nemotron_h", marks=pytest.mark.more)])
def pair(request, tmp_path_factory):
    transfer = {"kv_load_failure_policy": "recompute"}
    # The decode server as a user starts it: each of its processes is spawned, and imports vLLM for itself.
    alone = ("decode",)
    with served(tmp_path_factory, request.param, SEPARATE, transfer, {"push": "always"}, alone=alone) as pair:
        assert prefill(pair, "what it tells the router")["transfer_mode"] == "push"
        # The router hears of it with its first answer.
        ask(pair, "router", "which may go to one after the other")
        yield pair


def test_a_request_goes_to_both_at_once(pair):
    """The decode server has it, and waits, while the prefill server does nothing at all."""
    prompt = text(random.Random(11), 400)
    alone = ask(pair, "decode", prompt)
    before = moved(pair)
    process = pair.processes["prefill"].pid
    os.killpg(process, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, pair, "router", prompt)
            until("D has it", ANSWER, lambda: pair.metric("decode", "num_requests_waiting") == 1)
            assert not answer.done()
            os.killpg(process, signal.SIGCONT)
            assert answer.result() == alone
    finally:
        os.killpg(process, signal.SIGCONT)
    assert moved(pair) - before >= len(prompt) - 1
    assert_no_block_is_held(pair)


def test_answers_are_those_of_one_server(pair):
    test_served.test_answers_are_those_of_one_server(pair)


def test_several_answers_to_one_prompt(pair):
    test_served.test_several_answers_to_one_prompt(pair)


def test_many_requests_at_once(pair):
    test_served.test_many_requests_at_once(pair)


def test_aborts_cost_nobody_else_anything(pair):
    test_served.test_aborts_cost_nobody_else_anything(pair)


# The last: it ends the prefill server.
def test_a_prefill_server_that_is_killed_while_requests_are_under_way(pair):
    """Whoever was answered was answered rightly; the decode server goes on, and holds no block."""
    draw = random.Random(12)
    prompts = [text(draw, 1500) for _ in range(8)]
    alone = [ask(pair, "decode", prompt) for prompt in prompts]

    def answer(prompt):
        try:
            return ask(pair, "router", prompt)
        except test_served.openai.APIError:
            return None

    before = moved(pair)
    process = pair.processes["prefill"].pid
    # It stands still until D has some of them, so that they cannot all be over before anybody looks.
    os.killpg(process, signal.SIGSTOP)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(answer, prompt) for prompt in prompts]
        try:
            until("D has some", ANSWER, lambda: pair.metric("decode", "num_requests_waiting") > 0)
        finally:
            os.killpg(process, signal.SIGCONT)
        until("some have arrived", ANSWER, lambda: moved(pair) > before)
        pair.kill("prefill")
        answers = [one.result() for one in answers]
    assert all(one in (None, right) for one, right in zip(answers, alone, strict=True))
    until("D is well", ANSWER, lambda: pair.healthy("decode"))
    assert ask(pair, "decode", prompts[0]) == alone[0]
    assert_no_block_is_held(pair, "decode")
