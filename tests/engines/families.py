"""What tests of pairs in every family of models share: options of engines, and a case for each pair."""

import patches
import pytest

MORE = pytest.mark.more
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
CHANNELS_FIRST = patches.environment(VLLM_SSM_CONV_STATE_LAYOUT="DS")
#: Without it, vLLM's own answers for these models are wrong on a CPU.
NATIVE = {"compilation_config": {"custom_ops": ["none"]}}
LATENT = {**NATIVE, "attention_backend": "CPU_MLA", "prepare": [patches.latent_blocks]}


def cases(families):
    """By family there are a model, its engines by name, and the pairs of them: P's name and D's, with marks or
    without."""
    for family, (_, _, pairs) in families.items():
        for pair in pairs:
            p, d = getattr(pair, "values", pair)
            marks = getattr(pair, "marks", ())
            yield pytest.param(family, p, d, id=f"{family}: {p} to {d}", marks=marks)
