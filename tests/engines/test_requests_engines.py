"""Requests that need an engine of their own kind: adapters, embeddings instead of tokens, priorities, prompts
that are cut or too long, and models that pool."""

import json
import random

import pytest
import safetensors.torch
import torch
from exact import nothing_left, prompts, unbound
from heard import listen, said
from http_pair import save_tokenizer
from life.common import eventually
from life.inside import count_preemptions, counter, leases, preemptions, side, whats_left
from requests_inside import ask, cut, pooled, prefilled
from serving import Server
from tiny import save_model

LENGTH = 90
BOTH = {
    "skip_tokenizer_init": False,
    "block_size": 32,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "enable_prompt_embeds": True,
    "scheduling_policy": "priority",
}


@pytest.fixture(scope="module")
def model(folder):
    path = folder / "qwen3-adapted"
    save_tokenizer(save_model("qwen3", path))
    return path


@pytest.fixture(scope="module")
def engines(model):
    # A lease lasts until a busy machine is at D; one that nobody comes for ends before `idle` gives up.
    p = Server(model, "kv_producer", **BOTH, extra={"lease_seconds": 30.0})
    # Room for few requests at a time.
    d = Server(model, "kv_consumer", **BOTH, blocks=20, max_model_len=384)
    d.call(listen)
    yield p, d
    p.close()
    d.close()


@pytest.fixture
def pair(engines):
    yield engines
    nothing_left(*engines)
    for server in engines:
        left = server.call(whats_left)
        assert not any(left.values()), left


def hand_over(prefill, decode, question, sent=None):
    """The answers of D, and whether it has read P's blocks."""
    (made,) = prefill.call(ask, [prefilled(question)])
    before = decode.call(counter, "kvferry_read_bytes_total")
    (answer,) = decode.call(ask, [(sent or question) | {"params": made["params"]}])
    return answer["answers"], decode.call(counter, "kvferry_read_bytes_total") > before


def alone(server, question):
    return server.call(ask, [question])[0]["answers"]


def save_adapter(folder, seed):
    """An adapter that changes the keys and values of every layer."""
    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 64,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": str(folder),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(4):
        for name, width in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(8, 128, generator=generator) * 0.1
            weights[f"{place}.lora_B.weight"] = torch.randn(width, 8, generator=generator) * 0.1
    safetensors.torch.save_file(weights, folder / "adapter_model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def adapters(folder):
    one = save_adapter(folder / "adapter", 1)
    return {
        "none": None,
        "one": ("poet", 1, one),
        # The same files in another place, as on another machine.
        "the same elsewhere": ("poet", 2, save_adapter(folder / "elsewhere", 1)),
        "another of its name": ("poet", 3, save_adapter(folder / "another", 2)),
    }


@pytest.mark.parametrize(
    ("there", "here", "used"),
    [
        ("one", "one", True),
        ("one", "the same elsewhere", True),
        ("one", "none", False),
        ("none", "one", False),
        ("one", "another of its name", False),
    ],
)
def test_an_adapter(pair, adapters, there, here, used):
    prefill, decode = pair
    (prompt,) = prompts(random.Random(f"adapter {there} {here}"), [LENGTH])
    question = {"prompt": prompt, "lora": adapters[there]}
    sent = {"prompt": prompt, "lora": adapters[here]}
    expected = alone(decode, sent)
    assert (alone(decode, question) == expected) == used
    over = prefill.call(expired)
    assert hand_over(prefill, decode, question, sent) == (expected, used)
    if not used:
        assert "its adapter differ" in decode.call(said, "cannot use the transfer parameters")
        # D tells P that it does not want it, while it answers itself.
        eventually(lambda: prefill.call(leases) == [])
        assert prefill.call(expired) == over


def expired(engine):
    """How many leases have come to their end by themselves."""
    return side(engine).agent.counts()["leases_expired"]


def test_an_adapter_is_in_the_state(pair, adapters):
    """The control: without what P says of its prompt, D answers by P's adapter."""
    prefill, decode = pair
    (prompt,) = prompts(random.Random("adapter control"), [LENGTH])
    question = {"prompt": prompt, "lora": adapters["one"]}
    with unbound(prefill, decode):
        (made,) = prefill.call(ask, [prefilled(question)])
        sent = {"prompt": prompt, "params": made["params"]}
        assert alone(decode, sent) != alone(decode, {"prompt": prompt})


def test_embeddings_instead_of_tokens(pair):
    prefill, decode = pair
    generator = torch.Generator().manual_seed(3)
    embeds, others = (torch.randn(LENGTH, 128, generator=generator) * 0.05 for _ in range(2))
    others[-1] = embeds[-1]
    question, other = {"embeds": embeds.tolist()}, {"embeds": others.tolist()}
    expected = alone(decode, question)
    assert alone(decode, other) != expected
    assert hand_over(prefill, decode, question) == (expected, True)
    with unbound(prefill, decode):
        (made,) = prefill.call(ask, [prefilled(question)])
        assert alone(decode, other | {"params": made["params"]}) == expected
    # What P has of other embeddings is not used.
    assert hand_over(prefill, decode, question, other) == (alone(decode, other), False)


def test_the_urgent_one_goes_first(pair):
    """More than D has room for: it preempts requests that it has loaded, and computes their prompts again."""
    prefill, decode = pair
    some = prompts(random.Random("priorities"), [LENGTH] * 6)
    questions = [
        {"prompt": prompt, "tokens": 60, "priority": 6 - at} for at, prompt in enumerate(some)
    ]
    expected = [alone(decode, question) for question in questions]
    made = prefill.call(ask, [prefilled(question) for question in questions])
    decode.call(count_preemptions)
    sent = [question | {"params": it["params"]} for question, it in zip(questions, made)]
    assert [it["answers"] for it in decode.call(ask, sent)] == expected
    assert decode.call(preemptions) > 0


def test_a_prompt_that_is_cut(pair):
    prefill, decode = pair
    text = "".join(random.Random("cut").choices("abcdefghijklmnopqrstuvwxyz ", k=200))
    expected, _ = decode.call(cut, text, LENGTH, None)
    _, params = prefill.call(cut, text, LENGTH, True)
    before = decode.call(counter, "kvferry_read_bytes_total")
    assert decode.call(cut, text, LENGTH, params)[0] == expected
    assert decode.call(counter, "kvferry_read_bytes_total") > before
    # Each to its own limit: the beginnings differ, and so does every state.
    expected, _ = decode.call(cut, text, LENGTH + 20, None)
    _, params = prefill.call(cut, text, LENGTH, True)
    assert decode.call(cut, text, LENGTH + 20, params)[0] == expected
    assert "its tokens differ" in decode.call(said, "cannot use the transfer parameters")
    # The control: it would have been another answer.
    with unbound(prefill, decode):
        _, params = prefill.call(cut, text, LENGTH, True)
        assert decode.call(cut, text, LENGTH + 20, params)[0] != expected


@pytest.mark.more
def test_a_prompt_that_is_too_long_for_d(pair):
    """vLLM refuses it before the connector hears of it, and P gets its blocks back when the lease is over."""
    prefill, decode = pair
    (prompt,) = prompts(random.Random("long"), [400])
    (made,) = prefill.call(ask, [prefilled({"prompt": prompt})])
    with pytest.raises(AssertionError, match="384"):
        decode.call(ask, [{"prompt": prompt, "params": made["params"]}])
    assert decode.generate(prompt[:50])[0]


@pytest.mark.more
def test_a_model_that_pools(model):
    server = Server(model, "kv_both", runner="pooling", convert="embed", skip_tokenizer_init=False)
    try:
        some = prompts(random.Random("pool"), [LENGTH, 40])
        first = server.call(pooled, some)
        assert len(first) == 2 and first == server.call(pooled, some)
        assert server.idle() == 0
    finally:
        server.close()
