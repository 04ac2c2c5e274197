"""Models whose last layers read what earlier ones keep (Gemma 3n): one engine may skip these layers in a prefill
(`kv_sharing_fast_prefill`), and one may run them through vLLM's back end for transformers, where no layer shares."""

import pytest
from exact import check
from serving import Server
from tiny import save_model

WAYS = {
    "shared": {},
    "shared and skipped": {"kv_sharing_fast_prefill": True},
    "not shared": {"model_impl": "transformers"},
}


@pytest.fixture(scope="module")
def engines(folder):
    model = save_model("gemma3n", folder / "sharing")
    running = {}

    def start(way):
        if way not in running:
            running[way] = Server(model, "kv_both", block_size=32, **WAYS[way])
        return running[way]

    yield start
    for server in running.values():
        server.close()


@pytest.mark.parametrize(
    ("p", "d"),
    [
        pytest.param("shared", "shared and skipped", marks=pytest.mark.more),
        pytest.param("shared and skipped", "shared", marks=pytest.mark.more),
        pytest.param("not shared", "shared", marks=pytest.mark.more),
        ("shared", "not shared"),
    ],
)
def test_the_answer_is_that_of_one_engine(engines, p, d):
    check(engines(p), engines(d), seed=f"{p} to {d}")
