"""A request's life in real vLLM schedulers: what each side holds already, chunks, queues,
preemption, aborts and failures. The tokens are those of one engine alone, and nothing is left.
"""

import contextlib
import ctypes
import dataclasses
import random
import time
from types import SimpleNamespace

import pytest
from exact import prompts
from http_pair import free_neighbours
from serving import REMOTE_DECODE, Server, sampled
from tiny import save_model

#: What the tests of a kind share their engines with.
USUAL = {
    "qwen3": {"block_size": 32, "async_scheduling": False},
    "gemma3": {"block_size": 32, "prefix": True},
    "nemotron_h": {},
    "falcon_h1": {},
}


def more(*case):
    return pytest.param(*case, marks=pytest.mark.more)


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
        both = USUAL[kind] | (both or {})
        prefill = engines(kind, "kv_producer", **both | (p or {}))
        decode = engines(kind, "kv_consumer", **both | (d or {}))
        used.extend((prefill, decode))
        return prefill, decode

    yield start
    for server in used:
        if server.alive():
            assert server.idle() == 0, "blocks in use"
            left = server.call(whats_left)
            assert not any(left.values()), left


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


def pump(engine, seconds=60):
    """Steps until a request has finished: name to tokens, parameters and how it finished."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    deadline, done = time.monotonic() + seconds, []
    while not done and scheduler.has_requests() and time.monotonic() < deadline:
        done = [made for made in engine.llm_engine.step() if made.finished]
        time.sleep(0.001)
    return {
        made.request_id: (
            list(made.outputs[0].token_ids),
            made.kv_transfer_params,
            made.outputs[0].finish_reason,
        )
        for made in done
    }


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
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        # The ranks are processes of their own.
        return 0
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
        ("qwen3", {}, {"block_size": 64}, 2048, 0),
        more("qwen3", {"block_size": 96}, {}, 2048, 0),
        ("gemma3", {}, {}, 1024, 1024 * 47),
        more("gemma3", {"block_size": 64}, {}, 1024, 1024 * 47),
    ],
)
def test_a_prefix_that_is_held_is_not_moved(pair, kind, p, d, token, window):
    prefill, decode = pair(kind, {"prefix": True}, p, d)
    draw = random.Random(f"{kind} {p} {d}")
    size = d.get("block_size", 32)
    (prompt,) = prompts(draw, [200])
    # With windows, the last token is D's to compute.
    there = 199 if window else 200
    over = too_much(there, size, p.get("block_size", 32))
    ((alone, _),) = prefill.generate_all([prompt])
    for held in (0, 20, 70, 130, 199):
        if held:
            decode.generate(prompt[:held] + prompts(draw, [3])[0], 1)
        hit = held // size * size
        before = decode.call(counter, "kvferry_read_bytes_total")
        # P held nothing at first, and all of the prompt later.
        (params,) = prefill.prefill([prompt])
        assert decode.generate(prompt, params=params)[0] == alone, held
        moved = decode.call(counter, "kvferry_read_bytes_total") - before
        live = min(window, 1024 * (there - hit))
        assert moved - token * (there - hit) - live in (0, 1024 * over, 2048 * over), held
        # The next one must not find what this one has cached.
        assert decode.call(forget)
    # All of it.
    decode.generate(prompt, 1)
    (params,) = prefill.prefill([prompt])
    before = decode.call(counter, "kvferry_read_bytes_total")
    assert decode.generate(prompt, params=params)[0] == alone
    hit = 199 // size * size
    moved = decode.call(counter, "kvferry_read_bytes_total") - before
    live = min(window, 1024 * (there - hit))
    assert moved - token * (there - hit) - live in (0, 1024 * over, 2048 * over)
    # The control: what D does not hold comes from P.
    assert decode.call(forget)
    decode.generate(prompt[:70], 1)
    other = prompt[:64] + prompts(draw, [135])[0] + prompt[-1:]
    (params,) = prefill.prefill([prompt])
    assert decode.generate(other, params=params)[0] == alone
    assert decode.call(forget)


def too_much(tokens, *blocks):
    """Tokens that may be read beyond the last one: up to the end of a block, of either group."""
    return min(-tokens % block for block in blocks)


def forget(engine):
    return engine.llm_engine.reset_prefix_cache()


STATES = {"prefix": True, "prepare": [let_states_be_cached]}
#: Bytes of a token in the attention layers of the tiny Nemotron-H, and of its states.
ATTENTION = 2 * 2 * 64 * 4


@pytest.mark.parametrize("p, d", [({}, {}), more({"block_size": 192}, {})])
def test_states_of_a_prefix(pair, p, d):
    """In vLLM's "align" mode a state's table has a column for every block of tokens."""
    prefill, decode = pair("nemotron_h", STATES, p, d)
    draw = random.Random(2)
    size = decode.call(block_size)
    assert prefill.call(block_size) == p.get("block_size", size)
    larger = prefill.call(block_size)
    # What a state takes is known from a request that fills the blocks of both sides.
    whole = None
    for length in (larger + 1, 1, 2, size - 1, size, size + 1, size + 2, 3 * size, 3 * size + 1):
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
                over = too_much(length - 1, size, larger)
                assert states - whole in (0, ATTENTION * over) and whole > 0, length
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
        over = too_much(len(fork) - 1, size, larger)
        assert moved - whole - ATTENTION * (len(fork) - 1 - hit) in (0, ATTENTION * over)
    # The control.
    (params,) = prefill.prefill([fork])
    other = prompts(draw, [len(fork) - 1])[0] + fork[-1:]
    assert decode.generate(other, params=params)[0] == alone


def block_size(engine):
    return engine.llm_engine.vllm_config.cache_config.block_size


def test_the_slot_that_runs():
    """Where vLLM's own manager keeps a state with scratch for speculative tokens behind it and a
    checkpoint before it: the column of the last token, as vLLM's workers count."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    size, scratch = 32, 2
    config = cache_config(size, scratch)
    for tokens in (1, 31, 32, 33, 64, 65, 95, 97, 200):
        for chunk in (200, 64, 32):
            manager = KVCacheManager(
                config, 512, max_in_flight_tokens=512, scheduler_block_size=size,
                hash_block_size=size, enable_caching=True,
            )
            side = schedulers_view(config)
            request = new_request(tokens)
            # P, in chunks.
            while request.num_computed_tokens < tokens:
                new = min(chunk, tokens - request.num_computed_tokens)
                assert manager.allocate_slots(request, new) is not None
                request.num_computed_tokens += new
            ids = manager.get_block_ids_for_computed_tokens(request.request_id, tokens)
            (slot,) = side._table(1, ids[1], tokens)
            assert slot == ids[1][(tokens - 1) // size] > 0
            assert ids[1].index(slot) == len(ids[1]) - 1 - scratch
            # D, for all of them.
            loaded = new_request(tokens, "d")
            assert manager.allocate_slots(
                loaded, 0, num_external_computed_tokens=tokens, delay_cache_blocks=True
            )
            blocks = manager.get_blocks("d")
            ids = blocks.get_block_ids()
            (slot,) = side._table(1, ids[1], tokens)
            assert slot == ids[1][(tokens - 1) // size] > 0
            assert not any(ids[1][: (tokens - 1) // size])
            assert [side._cached(group, blocks.blocks[group], 0) for group in range(2)] == [0, 0]


def cache_config(size, scratch):
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
    )

    attention = FullAttentionSpec(
        block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    state = MambaSpec(
        block_size=size,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align",
        num_speculative_blocks=scratch,
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=1,
    )
    groups = [KVCacheGroupSpec(["0"], attention), KVCacheGroupSpec(["1"], state)]
    return KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=groups)


def schedulers_view(config):
    from kvferry.vllm.scheduler import SchedulerSide

    side = SchedulerSide.__new__(SchedulerSide)
    side.groups = [group.kv_cache_spec for group in config.kv_cache_groups]
    side.recurrent = [False, True]
    return side


def new_request(tokens, name="p"):
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(32, sha256)
    return Request(name, [len(name)] * tokens, sampled(1), None, block_hasher=hasher)


# Chunks, queues and preemption.


def hand_over(prefill, decode, prompts, tokens=12):
    """All requests at once, each from P to D when P has finished it: the answers in their order."""
    for at, prompt in enumerate(prompts):
        prefill.call(begin, str(at), prompt, 1, dict(REMOTE_DECODE))
    answers, deadline = {}, time.monotonic() + 60
    while len(answers) < len(prompts):
        assert time.monotonic() < deadline, f"only {sorted(answers)} have an answer"
        for name, (_, params, reason) in prefill.call(pump, 0.05).items():
            assert reason == "length"
            decode.call(begin, name, prompts[int(name)], tokens, params)
        for name, (made, _, reason) in decode.call(pump, 0.05).items():
            assert reason == "length"
            answers[name] = made
    return [answers[str(at)] for at in range(len(prompts))]


@pytest.mark.parametrize(
    "kind, ahead",
    [("qwen3", True), more("qwen3", False), ("nemotron_h", False), more("nemotron_h", True)],
)
def test_many_requests_on_few_blocks(pair, kind, ahead):
    """They come in chunks, wait for blocks that leases keep, and are preempted on both sides."""
    few = {"blocks": 13, "max_model_len": 256, "scheduler_reserve_full_isl": False}
    chunks = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 24}
    prefill, decode = pair(kind, few | chunks | {"async_scheduling": ahead})
    draw = random.Random(3)
    many = prompts(draw, [1, 2, 31, 32, 33, 64] + [draw.randrange(50, 180) for _ in range(14)])
    alone = [decode.generate(prompt, 40)[0] for prompt in many]
    for engine in (prefill, decode):
        engine.call(count_preemptions)
    assert hand_over(prefill, decode, many, 40) == alone
    assert prefill.call(preemptions) > 0 and decode.call(preemptions) > 0


# Ends before the end.


@pytest.fixture(params=[False, True], ids=["", "async"])
def qwen(request, pair):
    return pair("qwen3", {"async_scheduling": request.param})


def eventually(what, *args):
    deadline = time.monotonic() + 20
    while not what(*args):
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.02)


def test_an_abort_before_it_is_scheduled(qwen):
    prefill, decode = qwen
    (prompt,) = prompts(random.Random(4), [100])
    (params,) = prefill.prefill([prompt])
    assert prefill.used_blocks() == 4
    decode.call(begin, "r", prompt, 12, params)
    decode.call(abort, "r")
    # P learns of it at once, not when the lease ends.
    began = time.monotonic()
    assert prefill.idle() == 0
    assert time.monotonic() - began < 10


def test_an_abort_while_it_loads(qwen):
    prefill, decode = qwen
    draw = random.Random(5)
    warm, prompt, after = prompts(draw, [40, 300, 70])
    alone = decode.generate(after)[0]
    assert decode.generate(warm, params=prefill.prefill([warm])[0])
    for wait in (0, 1, 5, 50):
        params, again = prefill.prefill([prompt, after])
        with prefill.stopped():
            decode.call(begin, "r", prompt, 12, params)
            decode.call(steps, wait)
            if wait == 50:
                assert decode.call(counter, "kvferry_loads_in_flight") == 1
                assert decode.used_blocks() > 0
            decode.call(abort, "r")
            # Its blocks come back without a word from P.
            assert decode.idle() == 0
            assert decode.call(counter, "kvferry_loads_in_flight") == 0
        # Whatever still arrives finds its blocks unused, or goes nowhere.
        assert decode.generate(after, params=again)[0] == alone
        assert decode.idle() == 0


def test_an_abort_after_it_was_loaded(qwen):
    prefill, decode = qwen
    (prompt,) = prompts(random.Random(6), [100])
    (params,) = prefill.prefill([prompt])
    decode.call(begin, "r", prompt, 400, params)
    eventually(lambda: decode.call(steps, 3) or not decode.call(whats_left)["wanted"])
    decode.call(steps, 3)
    assert decode.used_blocks() > 0
    decode.call(abort, "r")


def test_an_abort_on_the_prefill_engine(qwen):
    prefill, _ = qwen
    (prompt,) = prompts(random.Random(7), [300])
    for count in (0, 1, 2):
        prefill.call(begin, "r", prompt, 5, dict(REMOTE_DECODE))
        prefill.call(steps, count)
        prefill.call(abort, "r")
        assert prefill.idle() == 0
    # Too late: it is D's to read.
    (params,) = prefill.prefill([prompt])
    prefill.call(abort, "0")
    assert prefill.used_blocks() > 0
    prefill.call(give_up, params)


def give_up(engine, params):
    side(engine).agent.abandon(params["kvferry"]["ticket"])


@pytest.mark.more
def test_ranks_end_together(pair):
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "failure": "recompute"}
    prefill, decode = pair("qwen3", d=two)
    draw = random.Random(15)
    warm, prompt, after = prompts(draw, [40, 300, 70])
    alone = decode.generate(after)[0]
    assert decode.generate(warm, params=prefill.prefill([warm])[0])
    params, again, bad = prefill.prefill([prompt, after, after])
    with prefill.stopped():
        decode.call(begin, "r", prompt, 12, params)
        decode.call(steps, 20)
        assert decode.used_blocks() > 0
        decode.call(abort, "r")
        assert decode.idle() == 0
    assert decode.generate(after, params=again)[0] == alone
    assert decode.generate(after, params=bad | {"remote_block_ids": [[-1]]})[0] == alone


# Failures.

POLICIES = pytest.mark.parametrize("policy", [more("fail"), "recompute"])
SHORT = {"lease": 1.0}


def expect(decode, policy, prompt, params, alone):
    """An answer, or an error for that request alone."""
    other = prompt[:50]
    well, _ = decode.generate(other)
    decode.call(begin, "bad", prompt, 12, params)
    decode.call(begin, "good", other, 12)
    done = {}
    while len(done) < 2:
        new = decode.call(pump)
        assert new, f"only {done}"
        done |= new
    assert done["good"][0] == well
    if policy == "fail":
        assert done["bad"][2] == "error"
    else:
        assert done["bad"][0] == alone
    assert decode.idle() == 0


@pytest.mark.parametrize(
    "kind, policy",
    [
        ("qwen3", "fail"),
        more("qwen3", "recompute"),
        more("nemotron_h", "fail"),
        ("nemotron_h", "recompute"),
    ],
)
def test_what_cannot_be_loaded(engines, pair, kind, policy, tmp_path):
    options = {"failure": policy, "extra": {"handshake": 1.0}}
    prefill, decode = pair(kind, p={"extra": SHORT}, d=options)
    draw = random.Random(8)
    (prompt,) = prompts(draw, [70])
    alone = decode.generate(prompt)[0]

    def fails(params):
        expect(decode, policy, prompt, params, alone)

    # It works.
    assert decode.generate(prompt, params=prefill.prefill([prompt])[0])[0] == alone
    # The lease has ended: nobody came, and nobody is asked to.
    (params,) = prefill.prefill([prompt])
    assert prefill.idle() == 0
    fails(params)
    # It ends while the request waits.
    (params,) = prefill.prefill([prompt])
    decode.call(begin, "r", prompt, 12, params)
    prefill.call(give_up, params)
    eventually(lambda: decode.call(side_lost))
    before = decode.call(counter, "kvferry_loads_total")
    (end,) = decode.call(pump).values()
    assert end[2] == "error" if policy == "fail" else end[0] == alone
    assert decode.call(counter, "kvferry_loads_total") == before
    # Tables that make no sense.
    for change in (
        {"remote_block_ids": []},
        {"remote_block_ids": [[]] * len(params["remote_block_ids"])},
        {"remote_block_ids": [[10**6]] * 9},
        {"remote_block_ids": [[-1]] * len(params["remote_block_ids"])},
        {"remote_block_ids": [[2**63]] * len(params["remote_block_ids"])},
        {"remote_block_ids": [["1", None]]},
        {"remote_block_ids": [{"a": 1}, 5]},
        {"first": [2**63] * len(params["remote_block_ids"])},
        {"first": [-1] * len(params["remote_block_ids"])},
        {"first": ["x"]},
        {"first": []},
    ):
        (params,) = prefill.prefill([prompt])
        params["kvferry"] |= {k: v for k, v in change.items() if k == "first"}
        fails(params | {k: v for k, v in change.items() if k != "first"})
        assert prefill.idle() == 0
    # A ticket of another engine's lease, and one of none.
    for change in ({"nonce": "0"}, {"request": "no such"}, {"incarnation": "1"}):
        (params,) = prefill.prefill([prompt])
        ticket = dict(params["kvferry"]["ticket"])
        params["kvferry"]["ticket"] |= change
        fails(params)
        params["kvferry"]["ticket"] = ticket
        prefill.call(give_up, params)
    # Another model.
    stranger = {"qwen3": "gemma3", "nemotron_h": "falcon_h1"}[kind]
    other = engines(stranger, "kv_producer", **USUAL[stranger])
    fails(other.prefill([prompt])[0])
    assert other.idle() == 0


def side_lost(engine):
    side(engine)._hear_of_lost()
    return any(wanted.lost for wanted in side(engine).wanted.values())


@POLICIES
def test_an_engine_that_is_gone(engines, pair, folder, policy, tmp_path):
    # A seed of its own, for an engine of its own to kill.
    options = {"failure": policy, "extra": {"handshake": 1.0, "deadline": 5.0}}
    prefill, decode = pair("qwen3", p={"extra": SHORT, "seed": len(policy)}, d=options)
    draw = random.Random(9)
    (prompt,) = prompts(draw, [200])
    alone = decode.generate(prompt)[0]
    known, killed, unknown = prefill.prefill([prompt] * 3)
    assert decode.generate(prompt, params=known)[0] == alone
    # While it is read.
    with prefill.stopped():
        decode.call(begin, "r", prompt, 12, killed)
        decode.call(steps, 5)
        prefill.kill()
    (end,) = decode.call(pump).values()
    assert end[2] == "error" if policy == "fail" else end[0] == alone
    # Before it is asked.
    expect(decode, policy, prompt, unknown, alone)
    # Whoever does not hold the key is told nothing.
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef")
    locked = Server(folder / "qwen3", "kv_producer", extra={"key_file": str(key)}, **USUAL["qwen3"])
    with contextlib.closing(locked):
        expect(decode, policy, prompt, locked.prefill([prompt])[0], alone)


def test_parameters_that_are_no_parameters(pair):
    prefill, decode = pair("nemotron_h")
    (prompt,) = prompts(random.Random(10), [70])
    alone = decode.generate(prompt)[0]
    (good,) = prefill.prefill([prompt])
    ours = good["kvferry"]
    want = {"do_remote_prefill": True}
    for params in (
        want,
        want | {"kvferry": None},
        want | {"kvferry": {}},
        want | {"kvferry": ours},
        good | {"kvferry": ours | {"ticket": {}}},
        good | {"kvferry": ours | {"ticket": ours["ticket"] | {"address": 5}}},
        good | {"kvferry": ours | {"ticket": ours["ticket"] | {"term_ms": -1}}},
        good | {"kvferry": ours | {"ticket": ours["ticket"] | {"nonce": "none"}}},
        good | {"kvferry": ours | {"ticket": {"address": [["a"]] * 50}}},
        good | {"kvferry": ours | {"tokens": "70"}},
        good | {"kvferry": ours | {"tokens": None}},
        good | {"kvferry": ours | {"first": 0}},
        good | {"remote_block_ids": None},
    ):
        # This engine computes the prompt.
        assert decode.generate(prompt, params=params)[0] == alone, params
        assert decode.used_blocks() == 0
    # States of another position are of no use, and P need not keep them.
    for tokens in (70, 2**63, -5, 0):
        (params,) = prefill.prefill([prompt])
        params["kvferry"]["tokens"] = tokens
        assert decode.generate(prompt, params=params)[0] == alone, tokens
        eventually(lambda: len(prefill.call(leases)) == 1)
    assert decode.generate(prompt, params=good)[0] == alone


def leases(engine):
    return side(engine).agent.status()["leases"]


# On a GPU, whose work goes on when the host has heard of its end.


def test_what_is_written_is_written_before_it_moves(monkeypatch):
    import torch
    from kvferry.vllm.messages import Orders
    from kvferry.vllm.worker import WorkerSide

    happened = []

    class Stream:
        def synchronize(self):
            happened.append("wait for the stream")

        def record_event(self):
            happened.append("mark")
            return SimpleNamespace(synchronize=lambda: happened.append("wait for the mark"))

    class Agent:
        def load(self, **load):
            happened.append("load")

        def endings(self, timeout):
            return []

    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    parallel = SimpleNamespace(data_parallel_size=1)
    config = SimpleNamespace(speculative_config=None, parallel_config=parallel)
    worker = WorkerSide(config, None, None)
    worker.storages = [SimpleNamespace(device=SimpleNamespace(type="cuda"))]
    worker.agent = Agent()

    def step(**orders):
        orders = Orders(**orders)
        worker.obey(orders)
        worker.written(orders)
        worker.results()
        done = happened[:]
        happened.clear()
        return done

    # What was written before a load begins is waited for, and nothing else.
    assert step() == ["mark", "mark"]
    assert step(loads=[{"request": "r"}]) == ["wait for the mark", "load", "mark", "mark"]
    assert step(hands_over=True) == ["mark", "mark"]
    # Where a draft model runs after the token that ends a prompt, that is waited for, too.
    config.speculative_config = object()
    assert step(hands_over=True) == ["wait for the stream", "mark", "mark"]
    assert step() == ["mark", "mark"]


def test_only_steps_of_prompts_that_are_handed_over_are_waited_for(pair):
    prefill, _ = pair("qwen3")
    (prompt,) = prompts(random.Random(14), [70])
    handed = prefill.call(steps_that_hand_over, prompt, dict(REMOTE_DECODE))
    assert handed == [True, False] and not any(prefill.call(steps_that_hand_over, prompt, None))


def steps_that_hand_over(engine, prompt, params):
    scheduler, handed = side(engine), []
    given = scheduler.orders

    def orders(scheduled):
        made = given(scheduled)
        handed.append(made.hands_over)
        return made

    scheduler.orders = orders
    (made,) = engine.generate({"prompt_token_ids": prompt}, sampled(1, params), use_tqdm=False)
    engine.llm_engine.step()
    scheduler.orders = given
    if made.kv_transfer_params:
        give_up(engine, made.kv_transfer_params)
    return handed


# Who else asks.


@pytest.mark.parametrize("kind", ["qwen3", "nemotron_h"])
def test_log_probabilities_of_the_prompt(pair, kind):
    prefill, decode = pair(kind)
    (prompt,) = prompts(random.Random(11), [70])
    expected = decode.call(logprobs, prompt, 5, None)
    assert len(expected[1]) == 70
    made = prefill.call(logprobs, prompt, 1, dict(REMOTE_DECODE))
    assert made[1] == expected[1]
    # D wants them too: it computes the prompt, and P need not keep it.
    assert decode.call(logprobs, prompt, 5, made[2]) == (*expected[:2], None)
    assert prefill.idle() == 0
    # D does not: a state that has seen all of the prompt is of no use to it.
    made = prefill.call(logprobs, prompt, 1, dict(REMOTE_DECODE))
    assert decode.generate(prompt, 5, made[2])[0] == expected[0]


def logprobs(engine, prompt, tokens, params):
    sampling = sampled(tokens, params, prompt_logprobs=1)
    (made,) = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    rounded = [
        one and {token: round(value.logprob, 3) for token, value in one.items()}
        for one in made.prompt_logprobs
    ]
    return list(made.outputs[0].token_ids), rounded, made.kv_transfer_params


def test_several_answers_to_one_prompt(pair):
    prefill, decode = pair("nemotron_h")
    (prompt,) = prompts(random.Random(12), [70])
    alone = decode.generate(prompt)[0]
    (params,) = prefill.prefill([prompt])
    assert decode.call(answers, prompt, params) == [alone] * 3
    # And once more, when the blocks are gone: D computes the prompt.
    assert decode.generate(prompt, params=params)[0] == alone
    # The same list, more than once.
    (first, second) = prefill.call(twice, prompt)
    assert first["kvferry"]["tokens"] == second["kvferry"]["tokens"] == 69
    for params in (first, second):
        assert decode.generate(prompt, params=params)[0] == alone


def answers(engine, prompt, params):
    sampling = sampled(12, params, n=3, temperature=1.0, top_k=1)
    (made,) = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    return [list(one.token_ids) for one in made.outputs]


def twice(engine, prompt):
    sampling = sampled(1, dict(REMOTE_DECODE))
    both = [{"prompt_token_ids": prompt}] * 2
    return [made.kv_transfer_params for made in engine.generate(both, sampling, use_tqdm=False)]


def test_windows_hand_over_what_is_alive(pair):
    prefill, decode = pair("gemma3")
    (prompt,) = prompts(random.Random(13), [200])
    alone = decode.generate(prompt)[0]
    (params,) = prefill.prefill([prompt])
    tables = dict(zip(params["kvferry"]["first"], params["remote_block_ids"]))
    # Tokens 153 to 199 are in the window of token 200.
    assert {first: len(blocks) for first, blocks in tables.items()} == {0: 7, 4: 3}
    assert all(block > 0 for blocks in tables.values() for block in blocks)
    assert decode.generate(prompt, params=params)[0] == alone


def test_data_parallel_engines_count_on_from_the_port(pair):
    prefill, _ = pair("qwen3")
    port = free_neighbours()
    addresses = prefill.call(data_parallel, port)
    assert addresses == [f"example.org:{port}", f"example.org:{port + 1}"]


def data_parallel(engine, port):
    import copy

    from kvferry.vllm.options import Options
    from kvferry.vllm.scheduler import SchedulerSide

    config = engine.llm_engine.vllm_config
    made = []
    for index in range(2):
        rank = copy.copy(config)
        rank.parallel_config = copy.copy(config.parallel_config)
        rank.parallel_config.data_parallel_index = index
        options = Options.read({"port": port, "advertise": "example.org"})
        made.append(SchedulerSide(rank, side(engine).cache, options))
    addresses = [one.agent.address for one in made]
    for one in made:
        one.agent.close()
    return addresses
