"""SGLang's own router, unchanged, in front of SGLang servers, of vLLM servers, and of one of each on both sides."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import engines
import mixed  # noqa: F401
import pytest
from http_pair import save_tokenizer
from serving_both import Fleet

MORE = pytest.mark.more
LETTERS = "abcdefghij klmnop"


@pytest.fixture(scope="module")
def model(folder):
    path = engines.model("qwen3", folder)
    save_tokenizer(path)
    return path


@pytest.fixture
def fleet(model, tmp_path):
    fleet = Fleet(model, tmp_path)
    yield fleet
    fleet.close()


def texts(seed, lengths):
    draw = random.Random(seed)
    return ["".join(draw.choice(LETTERS) for _ in range(length)) for length in lengths]


@MORE
def test_two_servers_of_sglang(fleet):
    fleet.sglang("p", "prefill")
    fleet.sglang("d", "decode")
    fleet.router(["p"], ["d"])
    for prompt in texts(1, (5, 70)):
        answer = fleet.complete("router", prompt)
        assert isinstance(answer, str), (answer, fleet.logs())
        assert fleet.stream("router", prompt) == answer
        # And as SGLang's own users ask.
        body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
        status, generated = fleet.ask("router", "/generate", body)
        assert status == 200 and json.loads(generated)["text"].replace("\ufffd", "") == answer
    # Each has counted, by the names that vLLM's servers have behind another prefix.
    assert counted(fleet, "p", "leases_confirmed_total") == 7
    assert counted(fleet, "d", "loads_total", 'outcome="done"') == 7


def counted(fleet, name, what, label=""):
    _, text = fleet.ask(name, "/metrics", None)
    lines = [line for line in text.splitlines() if line.startswith(f"sglang:kvferry_{what}{{") and label in line]
    assert lines, text[-3000:]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@MORE
def test_one_of_each_on_both_sides_under_load(fleet):
    fleet.vllm("pv", "kv_producer")
    fleet.vllm("dv", "kv_consumer")
    fleet.sglang("ps", "prefill")
    fleet.sglang("ds", "decode")
    fleet.router(["pv", "ps"], ["dv", "ds"])
    prompts = texts(2, [random.Random(3).randrange(2, 200) for _ in range(24)] * 2)
    expected = [fleet.complete("dv", prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: fleet.complete("router", prompt), prompts))
    assert answers == expected, fleet.logs()
    # Each has had its share.
    for name in ("ps", "ds"):
        assert fleet.log(name).read_text().count("shook hands"), fleet.logs()
