"""Engines that get other weights, have their cache reset, or sleep and wake, as training loops do it: what was
computed before is never read after it, and what comes after it is right.

On a CPU vLLM reloads weights, resets caches and pauses as on a GPU, but a sleeping engine keeps its memory.
"""

import random

import pytest
import safetensors.torch
import torch
from environment import REMOTE_DECODE
from exact import hand_over, nothing_left, prompts
from life.inside import leases, whats_left
from tiny import save_model

MORE = pytest.mark.more
#: What vLLM needs to look blocks up by their prefix: what is kept of old ones must be found nowhere.
PREFIX = {"prefix": True}
PAIRS = {
    (kind, policy): {who: {**options, "failure": policy} for who in ("prefill", "decode")}
    for kind, options in {"qwen3": {"block_size": 32, **PREFIX}, "nemotron_h": {}}.items()
    for policy in ("fail", "recompute")
}


@pytest.fixture(scope="module")
def pair(fleet):
    """Engines that tests share as long as they ask for the same."""

    def start(kind, policy):
        engines = PAIRS[kind, policy]
        return fleet(kind, engines, "prefill"), fleet(kind, engines, "decode")

    return start


@pytest.fixture(scope="session")
def trained(folder):
    """The weights of a model after some training."""

    def train(kind):
        path = folder / f"{kind}-trained"
        if not path.exists():
            save_model(kind, path)
            file = path / "model.safetensors"
            weights = safetensors.torch.load_file(file)
            noise = torch.Generator().manual_seed(11)
            for name, weight in weights.items():
                if weight.dim() == 2 and "embed" not in name:
                    weight += 0.05 * torch.randn(weight.shape, generator=noise)
            safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
        return str(path)

    return train


def test_a_reset_that_does_not_mention_the_connector_takes_nothing_back(pair):
    """vLLM says that it has not reset anything: blocks are in use."""
    prefill, decode = pair("qwen3", "recompute")
    (prompt,) = prompts(random.Random(22), [100])
    _, params = prefill.generate(prompt, 1, dict(REMOTE_DECODE))
    assert prefill.call(reset_once, False) is False
    assert len(prefill.call(leases)) == 1
    moved, _ = decode.generate(prompt, params=params)
    decode.call(reset)
    assert moved == decode.generate(prompt)[0]
    assert prefill.idle() == 0 and prefill.call(reset_once, False) is True
    nothing_left(prefill, decode)


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("qwen3", "recompute"),
        pytest.param("nemotron_h", "fail", marks=MORE),
        pytest.param("qwen3", "fail", marks=MORE),
    ],
)
def test_what_old_weights_computed_is_not_read_after_a_reset(pair, trained, kind, policy):
    prefill, decode = pair(kind, policy)
    prompt, after = prompts(random.Random(21), [100, 70])
    before = hand_over(prefill, decode, prompt)
    # One whose blocks are promised when the weights change.
    _, params = prefill.generate(prompt, 1, dict(REMOTE_DECODE))
    for engine in (prefill, decode):
        engine.call(reload, trained(kind))
    # vLLM has not reset its own cache yet, and says so: the blocks come back with its next step. But the
    # promise has ended.
    assert prefill.call(reset_once, True) is False
    assert not prefill.call(leases)
    for engine in (prefill, decode):
        engine.call(reset)
    alone, _ = decode.generate(prompt)
    assert alone != before, "training changes nothing"
    decode.call(reset)
    made, _ = decode.generate(prompt, params=params)
    assert made == (alone if policy == "recompute" else [])
    # With the new weights on both sides all is as before.
    check_anew(prefill, decode, [after, prompt])
    for engine in (prefill, decode):
        assert not any(engine.call(whats_left).values())


@MORE
def test_an_engine_that_sleeps_and_wakes(pair):
    prefill, decode = pair("qwen3", "fail")
    (prompt,) = prompts(random.Random(23), [100])
    _, params = prefill.generate(prompt, 1, dict(REMOTE_DECODE))
    # With blocks that are promised vLLM does not sleep in one process; a server waits for their end.
    with pytest.raises(AssertionError, match="Failed to reset KV cache"):
        prefill.call(sleep)
    prefill.call(wake)
    prefill.call(reset)
    prefill.call(sleep)
    # Its address answers all the same: the blocks are gone.
    assert decode.generate(prompt, params=params)[0] == []
    prefill.call(wake)
    check_anew(prefill, decode, [prompt])
    decode.call(sleep)
    decode.call(wake)
    check_anew(prefill, decode, [prompt])


def check_anew(prefill, decode, asked):
    """D's own answer is not made of what it was handed over."""
    for prompt in asked:
        moved = hand_over(prefill, decode, prompt)
        decode.call(reset)
        assert moved == decode.generate(prompt)[0]
    nothing_left(prefill, decode)


# In the engine's process.


def reload(engine, path):
    engine.collective_rpc("reload_weights", kwargs={"weights_path": path})


def reset_once(engine, connector):
    return engine.reset_prefix_cache(reset_connector=connector)


def reset(engine):
    """As a training loop does it: again, until vLLM says that it is done."""
    import serving

    for _ in range(3):
        if engine.reset_prefix_cache(reset_connector=True):
            return
        serving.idle(engine)
    raise AssertionError("the cache cannot be reset")


def sleep(engine):
    engine.sleep(level=1)


def wake(engine):
    engine.wake_up()
