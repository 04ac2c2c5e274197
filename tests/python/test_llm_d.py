"""llm-d's sidecar, with its connector `nixlv2`, asks in the way that FerryConnector answers.

What it does to a request is written down here, by the code of llm-d's router of May 2026 (520af478): no sidecar runs.
vLLM's own classes read the requests and write the answer.
"""

import json

import stand_in  # noqa: F401  (first: it sets the environment up)

# isort: split
import pytest
from kvferry.vllm.scheduler.side import SchedulerSide
from sides import blocks, request, start_side
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.serve.engine.protocol import UsageInfo

#: What it sends to P, whatever the client has sent.
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
LIMITS = ("max_tokens", "max_completion_tokens")
KINDS = {
    "completions": (CompletionRequest, {"prompt": "Once upon a time", "max_tokens": 50}),
    "chat": (
        ChatCompletionRequest,
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_completion_tokens": 50,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
}


def passed_on(value):
    """As it comes out of a program that reads every number as a double and writes whole ones without a point."""
    if isinstance(value, dict):
        return {name: passed_on(it) for name, it in value.items()}
    if isinstance(value, list):
        return [passed_on(it) for it in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return int(float(value))
    return value


def first_leg(client):
    asked = {name: value for name, value in client.items() if name != "stream_options"}
    asked |= {"kv_transfer_params": ASKED, "stream": False} | dict.fromkeys(LIMITS, 1)
    return passed_on(asked)


def second_leg(client, answer):
    return passed_on(client | {"kv_transfer_params": json.loads(answer).get("kv_transfer_params")})


def read(kind, body):
    """What vLLM makes of a request: the limit, and the parameters that a connector sees."""
    made = KINDS[kind][0](**json.loads(json.dumps({"model": "tiny"} | body)))
    sampling = made.to_sampling_params(made.max_tokens or made.max_completion_tokens, {})
    return sampling.max_tokens, (sampling.extra_args or {}).get("kv_transfer_params")


def answered(params):
    return CompletionResponse(
        model="tiny", choices=[], usage=UsageInfo(), kv_transfer_params=params
    ).model_dump_json()


@pytest.fixture
def pair():
    made = []

    def start(**options):
        made.extend(start_side(SchedulerSide, role=role, **options) for role in ("kv_producer", "kv_consumer"))
        return made[-2:]

    yield start
    for side in made:
        side.close()


@pytest.mark.parametrize("push", ["never", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_it_hands_on_is_read(pair, kind, push):
    """It asks one after the other, also where P says that both can be asked at once."""
    prefill, decode = pair(push=push)
    _, client = KINDS[kind]
    limit, params = read(kind, first_leg(client))
    assert (limit, params) == (1, ASKED)
    asked = request(**params)
    prefill.on_new_request(asked)
    kept, promised = prefill.finished(asked, ([3, 5],))
    assert kept
    limit, params = read(kind, second_leg(client, answered(promised)))
    assert (limit, params) == (50, promised)
    wanted = request("request-2", **params)
    decode.on_new_request(wanted)
    assert decode.matched(wanted, 0) == (40, True)
    decode.allocated(wanted, blocks([7, 8]), 40)
    (load,) = decode.orders([]).loads
    assert load["ticket"] == promised["kvferry"]["ticket"]
    assert (load["tokens"], [list(table) for table in load["source_blocks"]]) == (40, [[3, 5]])
    prefill.agent.revoke("request-1")


def test_a_p_that_hands_nothing_over_leaves_the_prompt_to_d(pair):
    _, decode = pair()
    _, client = KINDS["completions"]
    limit, params = read("completions", second_leg(client, answered(None)))
    assert (limit, params) == (50, None)
    wanted = request()
    wanted.kv_transfer_params = params
    decode.on_new_request(wanted)
    assert decode.matched(wanted, 0) == (0, False)


def test_a_number_that_a_double_cannot_hold_would_be_noticed():
    assert passed_on({"it": [2**53 + 1, True, None, "x"]}) == {"it": [2**53, True, None, "x"]}
