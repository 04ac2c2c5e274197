"""Whoever asks, and however: log-probabilities, several answers, windows, data-parallel engines."""

import copy
import random

import pytest
from environment import REMOTE_DECODE
from exact import prompts
from http_pair import free_neighbours
from serving import sampled

from .inside import side


@pytest.mark.parametrize("kind", ["qwen3", "nemotron_h"])
def test_log_probabilities_of_the_prompt(pair, kind):
    prefill, decode = pair(kind)
    (prompt,) = prompts(random.Random(11), [70])
    expected = decode.call(logprobs, prompt, 5, None)
    assert len(expected[1]) == 70
    made = prefill.call(logprobs, prompt, 1, dict(REMOTE_DECODE))
    assert made[1] == expected[1]
    # D wants them too: it computes the prompt, and P need not keep it.
    assert decode.call(logprobs, prompt, 5, made[2]) == (*expected[:2], None)
    assert prefill.idle() == 0
    # D does not: a state that has seen all of the prompt is of no use to it.
    made = prefill.call(logprobs, prompt, 1, dict(REMOTE_DECODE))
    assert decode.generate(prompt, 5, made[2])[0] == expected[0]


def logprobs(engine, prompt, tokens, params):
    sampling = sampled(tokens, params, prompt_logprobs=1)
    (made,) = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    rounded = [
        one and {token: round(value.logprob, 3) for token, value in one.items()}
        for one in made.prompt_logprobs
    ]
    return list(made.outputs[0].token_ids), rounded, made.kv_transfer_params


def test_several_answers_to_one_prompt(pair):
    prefill, decode = pair("nemotron_h")
    (prompt,) = prompts(random.Random(12), [70])
    alone = decode.generate(prompt)[0]
    (params,) = prefill.prefill([prompt])
    assert decode.call(answers, prompt, params) == [alone] * 3
    # And once more, when the blocks are gone: D computes the prompt.
    assert decode.generate(prompt, params=params)[0] == alone
    # The same list, more than once.
    (first, second) = prefill.call(twice, prompt)
    assert first["kvferry"]["tokens"] == second["kvferry"]["tokens"] == 69
    for params in (first, second):
        assert decode.generate(prompt, params=params)[0] == alone


def answers(engine, prompt, params):
    sampling = sampled(12, params, n=3, temperature=1.0, top_k=1)
    (made,) = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    return [list(one.token_ids) for one in made.outputs]


def twice(engine, prompt):
    sampling = sampled(1, dict(REMOTE_DECODE))
    both = [{"prompt_token_ids": prompt}] * 2
    return [made.kv_transfer_params for made in engine.generate(both, sampling, use_tqdm=False)]


def test_windows_hand_over_what_is_alive(pair):
    prefill, decode = pair("gemma3")
    (prompt,) = prompts(random.Random(13), [200])
    alone = decode.generate(prompt)[0]
    (params,) = prefill.prefill([prompt])
    tables = dict(zip(params["kvferry"]["first"], params["remote_block_ids"]))
    # Tokens 153 to 199 are in the window of token 200.
    assert {first: len(blocks) for first, blocks in tables.items()} == {0: 7, 4: 3}
    assert all(block > 0 for blocks in tables.values() for block in blocks)
    assert decode.generate(prompt, params=params)[0] == alone


def test_data_parallel_engines_count_on_from_the_port(pair):
    prefill, _ = pair("qwen3")
    port = free_neighbours()
    addresses = prefill.call(data_parallel, port)
    assert addresses == [f"example.org:{port}", f"example.org:{port + 1}"]


def data_parallel(engine, port):
    from kvferry.vllm.options import Options
    from kvferry.vllm.scheduler.side import SchedulerSide

    config = engine.llm_engine.vllm_config
    cache = side(engine).prefill.groups.cache
    made = []
    for index in range(2):
        rank = copy.copy(config)
        rank.parallel_config = copy.copy(config.parallel_config)
        rank.parallel_config.data_parallel_index = index
        options = Options.read({"port": port, "advertise": "example.org"})
        made.append(SchedulerSide(rank, cache, options))
    addresses = [one.agent.address for one in made]
    for one in made:
        one.agent.close()
    return addresses
