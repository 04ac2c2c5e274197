"""The layers of a step that P is still computing: D reads those that are written."""

import random
import threading
import time

import pytest
from exact import prompts

from .common import eventually, more
from .inside import blank, counter, filled, forget, pump, restarts, side, steps, take_at_once, waiting
from .pushed import CHUNKS, STAGES, TWO, answers, preempt, push, start

#: All of a prompt at once.
ONE_STEP = CHUNKS | {"max_num_batched_tokens": 512}


@pytest.mark.parametrize(
    "kind, length, p, at",
    [
        ("qwen3", 60, CHUNKS, 0),
        ("qwen3", 200, CHUNKS, 2),
        # Windows and states come at the end, whatever is said of their layers.
        ("nemotron_h", 480, ONE_STEP, 0),
        more("falcon_h1", 480, ONE_STEP, 1),
        more("gemma3", 200, ONE_STEP, 1),
        more("qwen3", 60, CHUNKS | {"async_scheduling": True}, 1),
    ],
)
def test_layers_are_read_while_p_computes_the_others(pair, held, kind, length, p, at):
    prefill, decode = pair(kind, None, p)
    (prompt,) = prompts(random.Random(f"layers {kind} {length}"), [length])
    alone = prefill.generate(prompt)[0]
    layers = prefill.call(layers_of_a_step, prompt)
    prefill.call(forget)
    name, before = begin_to_follow(prefill, decode, prompt)
    ahead = read_ahead(decode)
    with held(prefill, layers[at]):
        eventually(lambda: layers[at] in changed(decode, before))
        # P has not come to this one.
        assert layers[-1] not in changed(decode, before)
    ((made, _),) = answers(prefill, decode, [name])
    assert made == alone
    assert read_ahead(decode) > ahead
    decode.call(take_at_once, False)


def test_what_p_holds_is_read_before_its_first_step_computes_anything(pair, held):
    """P's own prefix hit, which is known when vLLM has scheduled that step."""
    prefill, decode = pair("qwen3", {"prefix": True}, CHUNKS, {})
    (prompt,) = prompts(random.Random("held by P"), [250])
    alone = decode.generate(prompt)[0]
    assert decode.call(forget) and prefill.call(forget)
    # Four blocks, and two tokens that are in none that is full.
    prefill.generate(prompt[:130], 1)
    name, _ = begin_to_follow(prefill, decode, prompt)
    decode.call(blank)
    with held(prefill, None):
        eventually(lambda: decode.call(filled) == 4)
    ((made, _),) = answers(prefill, decode, [name])
    assert made == alone
    decode.call(take_at_once, False)
    for engine in (prefill, decode):
        assert engine.idle() == 0
        assert engine.call(forget)


def test_what_was_read_of_a_request_that_starts_over_counts_for_nothing(pair, held):
    prefill, decode = pair("qwen3", None, CHUNKS)
    prompt, other = prompts(random.Random("layers again"), [200, 300])
    alone = prefill.generate(prompt)[0]
    layers = prefill.call(layers_of_a_step, prompt)
    name, before = begin_to_follow(prefill, decode, prompt)
    with held(prefill, layers[0]):
        eventually(lambda: layers[0] in changed(decode, before))
    # Its blocks go to somebody else before it gets others.
    prefill.call(preempt, other)
    ((made, _),) = answers(prefill, decode, [name])
    assert made == alone
    decode.call(take_at_once, False)
    prefill.call(pump)


def test_a_step_that_computes_again_what_was_read_is_another_epoch(pair, held):
    """As after a failed load: vLLM goes back within a request that it does not preempt."""
    prefill, decode = pair("qwen3", None, CHUNKS)
    (prompt,) = prompts(random.Random("layers back"), [200])
    alone = prefill.generate(prompt)[0]
    layers = prefill.call(layers_of_a_step, prompt)
    name, before = begin_to_follow(prefill, decode, prompt)
    with held(prefill, layers[0]):
        eventually(lambda: layers[0] in changed(decode, before))
    assert prefill.call(restarts) == [0]
    prefill.call(spoil_and_go_back)
    prefill.call(steps, 1)
    assert prefill.call(restarts) == [1]
    ((made, _),) = answers(prefill, decode, [name])
    assert made == alone
    decode.call(take_at_once, False)


@pytest.mark.parametrize("p, d", [({}, {}), more(TWO, {}), more(STAGES, TWO)])
def test_where_vllm_says_nothing_of_layers(pair, p, d):
    """As where it replays a whole step from a CUDA graph: what is complete is read all the same."""
    prefill, decode = pair("qwen3", None, CHUNKS | p, d)
    some = prompts(random.Random("no layers"), [200, 60, 31])
    alone = [prefill.generate(prompt)[0] for prompt in some]
    prefill.call(silence, True)
    assert push(prefill, decode, some) == alone
    prefill.call(silence, False)
    assert push(prefill, decode, some) == alone


@pytest.fixture
def held(tmp_path):
    """P takes a step, and stays behind a layer of it, or before all of them, while the test looks at D."""

    class Held:
        def __init__(self, prefill, layer):
            self.prefill, self.go_on = prefill, tmp_path / f"{layer}"
            self.step = threading.Thread(target=prefill.call, args=(held_step, layer, str(self.go_on)))

        def __enter__(self):
            self.step.start()

        def __exit__(self, *_):
            self.go_on.touch()
            self.step.join()

    return Held


def held_step(engine, layer, go_on):
    import os

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group().worker
    prepare, wrote, until = worker.prepare, worker.wrote, time.monotonic() + 600

    def stay(here):
        while here and not os.path.exists(go_on) and time.monotonic() < until:
            time.sleep(0.005)

    def prepare_and_stay(orders):
        prepare(orders)
        stay(layer is None)

    def write_and_stay(name):
        wrote(name)
        stay(name == layer)

    worker.prepare, worker.wrote = prepare_and_stay, write_and_stay
    steps(engine, 1)
    del worker.prepare, worker.wrote


def layers_of_a_step(engine, prompt):
    """Those that vLLM speaks of, in their order."""
    from serving import sampled
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker, layers = get_kv_transfer_group().worker, []
    worker.wrote = layers.append
    engine.generate({"prompt_token_ids": prompt}, sampled(1), use_tqdm=False)
    del worker.wrote
    return list(dict.fromkeys(layers))


def begin_to_follow(prefill, decode, prompt):
    """A request that D has blocks for, before P has begun with it; and what is in D's caches then."""
    decode.call(take_at_once, True)
    (name,) = start(prefill, decode, [prompt])
    eventually(lambda: decode.call(steps, 1) or not decode.call(waiting))
    return name, decode.call(caches)


def changed(decode, before):
    return {layer for layer, content in decode.call(caches).items() if content != before[layer]}


def caches(engine):
    """By layer, what stands for all that is in its cache."""
    import hashlib

    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return {
        layer: hashlib.sha256(cache.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for layer, cache in get_kv_transfer_group().worker.kv_caches.items()
    }


def read_ahead(decode):
    return decode.call(counter, "kvferry_read_ahead_bytes_total")


def spoil_and_go_back(engine):
    """What the last step has read was wrong, and so is what it has written."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    (request,) = scheduler.running
    (table,) = side(engine).prefill.groups.grown(scheduler.kv_cache_manager, request.request_id, 64)
    for cache in get_kv_transfer_group().worker.kv_caches.values():
        cache[table] = 7.0
    request.num_computed_tokens = 0


def silence(engine, silent):
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        # The ranks are processes of their own.
        return
    worker = get_kv_transfer_group().worker
    vars(worker).pop("wrote", None)
    if silent:
        worker.wrote = lambda layer: None
