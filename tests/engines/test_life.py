"""A request's life in real vLLM schedulers: what each side holds already, chunks, queues, preemption,
aborts and failures. The tokens are those of one engine alone, and nothing is left behind.
"""

import contextlib
import ctypes
import dataclasses
import random
import time

import pytest
from serving import PATIENCE, REMOTE_DECODE, Server, idle, sampled
from tiny import save_model

QWEN = {"block_size": 32}


def let_states_be_cached():
    """vLLM keeps the states of a prefix with kernels that a CPU does not have. Without checkpoints
    inside a step, and with a plain copy, it does so here as well."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.v1.worker import mamba_utils

    given = MambaMixer2.get_kv_cache_spec

    def spec(self, config):
        no = dict(num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)
        return dataclasses.replace(given(self, config), **no)

    def copy(sources, destinations, sizes):
        for source, destination, size in zip(sources, destinations, sizes):
            ctypes.memmove(int(destination), int(source), int(size))

    MambaMixer2.get_kv_cache_spec = spec
    mamba_utils.batch_memcpy = copy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def engines(folder):
    """Engines live as long as the module: who asks for the same one gets it again."""
    running = {}

    def start(kind, role, **options):
        key = (kind, role, repr(sorted(options.items())))
        if key not in running:
            path = folder / kind
            if not path.exists():
                save_model(kind, path)
            running[key] = Server(path, role, **options)
        return running[key]

    yield start
    for server in running.values():
        server.close()


@pytest.fixture
def pair(engines):
    """Two engines, and the promise that nothing is left behind on either."""
    used = []

    def start(kind, both=None, p=None, d=None):
        prefill = engines(kind, "kv_producer", **(both or {}) | (p or {}))
        decode = engines(kind, "kv_consumer", **(both or {}) | (d or {}))
        used.extend((prefill, decode))
        return prefill, decode

    yield start
    for server in used:
        if server.alive():
            assert server.idle() == 0, "blocks in use"
            left = server.call(whats_left)
            assert not any(left.values()), left


def prompts(draw, lengths):
    return [[draw.randrange(1, 500) for _ in range(length)] for length in lengths]


# In the engine's process.


def begin(engine, name, prompt, tokens=12, params=None, **options):
    engine.llm_engine.add_request(
        name, {"prompt_token_ids": prompt}, sampled(tokens, params, **options)
    )


def abort(engine, name):
    engine.llm_engine.abort_request([name])


def steps(engine, count):
    for _ in range(count):
        engine.llm_engine.step()
        time.sleep(0.001)


def pump(engine, seconds=PATIENCE):
    """Steps until a request has finished: name to tokens, parameters and how it finished."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and engine.llm_engine.has_unfinished_requests():
        done = [made for made in engine.llm_engine.step() if made.finished]
        if done:
            return {
                made.request_id: (
                    list(made.outputs[0].token_ids),
                    made.kv_transfer_params,
                    made.outputs[0].finish_reason,
                )
                for made in done
            }
        time.sleep(0.001)
    idle(engine, 0.01)
    return {}


def side(engine):
    return engine.llm_engine.engine_core.engine_core.scheduler.connector.scheduler


def whats_left(engine):
    scheduler = side(engine)
    status = scheduler.agent.status()
    return {
        "prefilling": scheduler.prefilling,
        "kept": scheduler.kept,
        "wanted": list(scheduler.wanted),
        "leases": status["leases"],
        "holds": status["holds"],
        "loads": counter(engine, "kvferry_loads_in_flight"),
        "quarantined": counter(engine, "kvferry_loads_quarantined"),
    }


def counter(engine, name):
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    lines = get_kv_transfer_group().worker.agent.metrics().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def count_preemptions(engine):
    """From now on; they are in the scheduler's `preemptions`."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    given, scheduler.preemptions = scheduler._preempt_request, 0

    def preempt(*args, **options):
        scheduler.preemptions += 1
        given(*args, **options)

    scheduler._preempt_request = preempt


def preemptions(engine):
    return engine.llm_engine.engine_core.engine_core.scheduler.preemptions


# What is held already.


@pytest.mark.parametrize(
    "kind, p, d, token, window",
    [
        ("qwen3", {"block_size": 32}, {"block_size": 64}, 2048, 0),
        ("qwen3", {"block_size": 96}, {"block_size": 32}, 2048, 0),
        ("gemma3", {"block_size": 32}, {"block_size": 32}, 1024, 1024 * 47),
        ("gemma3", {"block_size": 64}, {"block_size": 32}, 1024, 1024 * 47),
    ],
)
def test_a_prefix_that_is_held_is_not_moved(pair, kind, p, d, token, window):
    prefill, decode = pair(kind, {"prefix": True}, p, d)
    draw = random.Random(f"{kind} {p} {d}")
    (prompt,) = prompts(draw, [200])
    (alone,) = [tokens for tokens, _ in prefill.generate_all([prompt])]
    for held in (0, 20, 70, 130, 199):
        if held:
            decode.generate(prompt[:held] + prompts(draw, [3])[0], 1)
        hit = held // d["block_size"] * d["block_size"]
        before = decode.call(counter, "kvferry_read_bytes_total")
        # P held nothing at first, and all of the prompt later.
        (params,) = prefill.prefill([prompt])
        assert decode.generate(prompt, params=params)[0] == alone, held
        moved = decode.call(counter, "kvferry_read_bytes_total") - before
        live = min(window, 1024 * (200 - hit))
        assert moved == token * (200 - hit) + live, held
        # The next one must not find what this one has cached.
        assert decode.call(forget)
    # All of it.
    decode.generate(prompt, 1)
    (params,) = prefill.prefill([prompt])
    before = decode.call(counter, "kvferry_read_bytes_total")
    assert decode.generate(prompt, params=params)[0] == alone
    hit = 199 // d["block_size"] * d["block_size"]
    moved = decode.call(counter, "kvferry_read_bytes_total") - before
    assert moved == token * (200 - hit) + min(window, 1024 * (200 - hit))
    # The control: what D does not hold comes from P.
    assert decode.call(forget)
    decode.generate(prompt[:70], 1)
    other = prompt[:64] + prompts(draw, [135])[0] + prompt[-1:]
    (params,) = prefill.prefill([prompt])
    assert decode.generate(other, params=params)[0] == alone


def forget(engine):
    return engine.llm_engine.reset_prefix_cache()


STATES = {"prefix": True, "patch": let_states_be_cached}
#: Bytes of a token in the attention layers of the tiny Nemotron-H, and of its states.
ATTENTION = 2 * 2 * 64 * 4


def test_states_of_a_prefix(pair):
    """In vLLM's "align" mode a state's table has a column for every block of tokens."""
    prefill, decode = pair("nemotron_h", STATES)
    draw = random.Random(2)
    size = prefill.call(block_size)
    whole = None
    for length in (1, 2, size - 1, size, size + 1, size + 2, 3 * size, 3 * size + 1, 3 * size + 20):
        (prompt,) = prompts(draw, [length])
        ((alone, _),) = decode.generate_all([prompt])
        assert decode.call(forget)
        for _ in range(2):
            # Once computed, and once from P's cache.
            (params,) = prefill.prefill([prompt])
            before = decode.call(counter, "kvferry_read_bytes_total")
            assert decode.generate(prompt, params=params)[0] == alone, length
            moved = decode.call(counter, "kvferry_read_bytes_total") - before
            assert decode.call(forget)
            if length > 1:
                states = moved - ATTENTION * (length - 1)
                whole = whole or states
                assert states == whole > 0, length
    # D holds the attention of two blocks and no state there: it kept the states of the end alone.
    decode.generate(prompt, 1)
    for shared, hit in ((2 * size + 5, 2 * size), (size - 1, 0)):
        (tail,) = prompts(draw, [3 * size - shared])
        fork = prompt[:shared] + tail
        ((alone, _),) = prefill.generate_all([fork])
        (params,) = prefill.prefill([fork])
        before = decode.call(counter, "kvferry_read_bytes_total")
        assert decode.generate(fork, params=params)[0] == alone
        moved = decode.call(counter, "kvferry_read_bytes_total") - before
        assert moved == whole + ATTENTION * (len(fork) - 1 - hit)
    # The control.
    (params,) = prefill.prefill([fork])
    other = prompts(draw, [len(fork) - 1])[0] + fork[-1:]
    assert decode.generate(other, params=params)[0] == alone


def block_size(engine):
    return engine.llm_engine.vllm_config.cache_config.block_size
