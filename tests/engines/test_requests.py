"""Requests of every kind that vLLM serves: handed over, the answer is that of one engine alone, and it is made
from P's state."""

import contextlib
import random

import pytest
from exact import nothing_left, unbound
from http_pair import save_tokenizer
from life.inside import counter, whats_left
from requests_inside import ask, prefilled
from serving import Server
from tiny import save_model

#: Text is asked for: these tokens are bytes.
TEXT = list(range(3, 259))
LETTERS = (3, 97)
LENGTH = 90


def more(*case):
    return pytest.param(*case, marks=pytest.mark.more)


#: What is asked beside the prompt.
KINDS = {
    "greedy": {},
    "sampled with a seed": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    "several answers with a seed": {"temperature": 1.0, "seed": 7, "n": 3},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "at least so many tokens": {
        "ignore_eos": False,
        "min_tokens": 8,
        "stop_token_ids": list(range(200, 512)),
    },
    "a stop token": {"ignore_eos": False, "stop_token_ids": list(range(400, 512))},
    "a stop string": {
        "detokenize": True,
        "allowed_token_ids": TEXT,
        "tokens": 40,
        "stop": list("abcdefghijklmnopqrstuvwxyz"),
    },
    "biased": {"logit_bias": {token: 4.0 for token in range(100, 200)}},
    "allowed tokens": {"allowed_token_ids": list(range(50, 90))},
    "bad words": {"detokenize": True, "bad_words": ["a", "b", "c"], "allowed_token_ids": TEXT},
    "a pattern": {"detokenize": True, "structured": {"regex": "[a-p]{4} [a-p]{5}"}},
    "a JSON schema": {
        "detokenize": True,
        "tokens": 40,
        "structured": {
            "json": {
                "type": "object",
                "properties": {"name": {"type": "string", "pattern": "^[a-z]{6}$"}},
                "required": ["name"],
                "additionalProperties": False,
            }
        },
    },
    "a choice": {"detokenize": True, "structured": {"choice": [f"{n:02}" for n in range(100)]}},
    "log-probabilities": {"logprobs": 5},
    "its own part of the cache": {"cache_salt": "somebody"},
}

OPTIONS = {"skip_tokenizer_init": False}


@pytest.fixture(scope="module")
def engines(folder):
    """A pair that is started once for each model."""
    running = {}

    def start(kind):
        if kind not in running:
            path = folder / f"{kind}-text"
            save_tokenizer(save_model(kind, path))
            # Asked one after the other, as most routers do.
            running[kind] = [
                Server(path, "kv_producer", **OPTIONS, extra={"push": "never"}),
                Server(path, "kv_consumer", **OPTIONS),
            ]
        return running[kind]

    yield start
    for pair in running.values():
        for server in pair:
            server.close()


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("kind", ["nemotron_h", more("qwen3")])
def test_the_answer_is_that_of_one_engine(engines, kind, what):
    prefill, decode = engines(kind)
    draw = random.Random(what)
    prompt = text(draw, LENGTH)
    question = {"prompt": prompt, **KINDS[what]}
    (alone,) = decode.call(ask, [question])
    assert hand_over(prefill, decode, question) == alone["answers"]
    # The control: D's prompt is another, and only P's state leads to this answer.
    other = {**question, "prompt": shuffled(draw, prompt)}
    (unlike,) = decode.call(ask, [other])
    assert unlike["answers"] != alone["answers"]
    assert hand_over(prefill, decode, question, sent=other) == alone["answers"]
    nothing_is_left(prefill, decode)


def text(draw, length):
    """Tokens that are letters: vLLM looks at the end of a prompt when it makes text of an answer."""
    return [draw.randrange(*LETTERS) for _ in range(length)]


def shuffled(draw, prompt):
    """Another prompt of the same tokens, for penalties, which ends in the same one."""
    return draw.sample(prompt[:-1], len(prompt) - 1) + prompt[-1:]


def hand_over(prefill, decode, question, sent=None):
    before = decode.call(counter, "kvferry_read_bytes_total")
    with unbound(prefill, decode) if sent is not None else contextlib.nullcontext():
        (made,) = prefill.call(ask, [prefilled(question)])
        assert made["params"], "P hands nothing over"
        (answer,) = decode.call(ask, [(sent or question) | {"params": made["params"]}])
    assert decode.call(counter, "kvferry_read_bytes_total") > before, "D has read nothing"
    return answer["answers"]


def nothing_is_left(*servers):
    nothing_left(*servers)
    for server in servers:
        left = server.call(whats_left)
        assert not any(left.values()), left
