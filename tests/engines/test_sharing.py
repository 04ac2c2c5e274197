"""Models whose last layers read what earlier ones keep (Gemma 3n): one engine may skip these layers in a prefill
(`kv_sharing_fast_prefill`), and one may run them through vLLM's back end for transformers, where no layer shares."""

import pytest
from exact import check, check_refused

WAYS = {
    "shared": {"block_size": 32},
    "shared and skipped": {"block_size": 32, "kv_sharing_fast_prefill": True},
    "not shared": {"block_size": 32, "model_impl": "transformers"},
    "told to share more": {"block_size": 32, "hf_overrides": {"num_kv_shared_layers": 4}},
}


@pytest.mark.parametrize(
    ("p", "d"),
    [
        pytest.param("shared", "shared and skipped", marks=pytest.mark.more),
        pytest.param("shared and skipped", "shared", marks=pytest.mark.more),
        pytest.param("not shared", "shared", marks=pytest.mark.more),
        ("shared", "not shared"),
    ],
)
def test_the_answer_is_that_of_one_engine(fleet, p, d):
    check(fleet("gemma3n", WAYS, p), fleet("gemma3n", WAYS, d), seed=f"{p} to {d}")


@pytest.mark.more
@pytest.mark.parametrize(
    ("p", "d", "words"),
    [
        ("shared", "told to share more", ["'2' on the source", "'4' on the destination"]),
        ("told to share more", "shared", ["'4' on the source", "'2' on the destination"]),
    ],
)
def test_another_number_of_layers_that_share_is_refused_with_both(fleet, p, d, words):
    words = ["'num_kv_shared_layers' differs", *words]
    check_refused(fleet("gemma3n", WAYS, p), fleet("gemma3n", WAYS, d), words)
