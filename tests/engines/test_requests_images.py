"""Prompts with images: D uses what P has made of them, and does not look at them again."""

import random

import pytest
from exact import nothing_left, unbound
from heard import listen, said
from life.inside import counter, where, whats_left
from life.pushed import answers
from pictured import IMAGE, picture, save_pictured
from requests_inside import ask, prefilled
from serving import Server, sampled

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def engines(folder):
    path = save_pictured(folder / "pictured")
    options = {
        "skip_tokenizer_init": False,
        "block_size": 32,
        "limit_mm_per_prompt": {"image": 2, "video": 0},
        "extra": {"push": "always"},
    }
    pair = [Server(path, role, **options) for role in ("kv_producer", "kv_consumer")]
    for server in pair:
        server.call(count_looks)
        server.call(listen)
    yield pair
    for server in pair:
        server.close()


def count_looks(_engine):
    """From now on, how often the encoder runs."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    given, GPUModelRunner.looks = GPUModelRunner._execute_mm_encoder, 0

    def look(self, scheduled):
        GPUModelRunner.looks += bool(scheduled.scheduled_encoder_inputs)
        return given(self, scheduled)

    GPUModelRunner._execute_mm_encoder = look


def looks(_engine):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return GPUModelRunner.looks


def forget_images(engine):
    """What the encoder has made of earlier ones."""
    return engine.llm_engine.reset_encoder_cache()


@pytest.mark.parametrize("count", [1, 2])
def test_the_encoder_runs_once(engines, count):
    prefill, decode = engines
    words = "".join(random.Random("image").choices("abcdefghijklmnopqrstuvwxyz ", k=40))
    prompt = f"{words}{IMAGE * count}{words[:11]}"
    mine, others = ([picture(seed + at) for at in range(count)] for seed in (1, 11))
    question = {"prompt": prompt, "multi_modal_data": {"image": mine}}
    other = {"prompt": prompt, "multi_modal_data": {"image": others}}
    (alone,) = decode.call(ask, [question])
    (unlike,) = decode.call(ask, [other])
    assert alone["answers"] != unlike["answers"]
    decode.call(forget_images)
    (made,) = prefill.call(ask, [prefilled(question)])
    before = decode.call(looks), decode.call(counter, "kvferry_read_bytes_total")
    (answer,) = decode.call(ask, [question | {"params": made["params"]}])
    assert answer["answers"] == alone["answers"]
    after = decode.call(looks), decode.call(counter, "kvferry_read_bytes_total")
    assert after[0] == before[0] and after[1] > before[1]
    # The control: what P has seen is in its state.
    with unbound(prefill, decode):
        (made,) = prefill.call(ask, [prefilled(question)])
        (answer,) = decode.call(ask, [other | {"params": made["params"]}])
    assert answer["answers"] == alone["answers"]
    # But D does not take it for an answer about another image.
    (made,) = prefill.call(ask, [prefilled(question)])
    (answer,) = decode.call(ask, [other | {"params": made["params"]}])
    assert answer["answers"] == unlike["answers"]
    assert "its media differ" in decode.call(said, "cannot use the transfer parameters")
    nothing_left(prefill, decode)
    for server in engines:
        left = server.call(whats_left)
        assert not any(left.values()), left


def test_an_image_that_is_sent_to_both(engines):
    """D finds it at P by its name, which says what the image is."""
    prefill, decode = engines
    prompt = f"what is this? {IMAGE} and this?"
    question = {"prompt": prompt, "multi_modal_data": {"image": [picture(5)]}}
    (alone,) = decode.call(ask, [question])
    prefill.call(begin, "both", question, 1, {"do_remote_decode": True, "do_remote_prefill": False})
    decode.call(begin, "both", question, 12, prefill.call(where))
    ((made, _),) = answers(prefill, decode, ["both"])
    assert made == alone["answers"][0][0]
    nothing_left(prefill, decode)


def begin(engine, name, question, tokens, params):
    engine.llm_engine.add_request(
        name,
        {"prompt": question["prompt"], "multi_modal_data": question["multi_modal_data"]},
        sampled(tokens, params),
    )
