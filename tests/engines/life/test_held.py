"""What either side holds already is not moved again."""

import ctypes
import dataclasses
import random
from types import SimpleNamespace

import pytest
from exact import prompts, unbound
from serving import sampled

from .common import PATIENT, more
from .inside import counter, forget


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
    prefill, decode = pair(kind, {"prefix": True, **EXACT}, p, d)
    draw = random.Random(f"{kind} {p} {d}")
    size = d.get("block_size", 32)
    (prompt,) = prompts(draw, [200])
    # With windows, the last token is D's to compute.
    there = 199 if window else 200
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
        assert moved == token * (there - hit) + live, held
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
    assert moved == token * (there - hit) + live
    # The control: what D does not hold comes from P.
    assert decode.call(forget)
    decode.generate(prompt[:70], 1)
    other = prompt[:64] + prompts(draw, [135])[0] + prompt[-1:]
    with unbound(prefill, decode):
        (params,) = prefill.prefill([prompt])
        assert decode.generate(other, params=params)[0] == alone
    assert decode.call(forget)


def test_a_window_that_was_not_moved_whole_is_nobody_s_prefix(pair):
    """vLLM caches whole blocks of what was loaded, but the first block of a window comes in part."""
    prefill, decode = pair("gemma3")
    draw = random.Random(0)
    for length in (70, 100, 197):
        (prompt,) = prompts(draw, [length])
        ((alone, _),) = prefill.generate_all([prompt])
        (params,) = prefill.prefill([prompt])
        assert decode.generate(prompt, params=params)[0] == alone
        # Now with what the first one has left, and with what this one has.
        for _ in range(2):
            assert decode.generate(prompt)[0] == alone, length
        assert decode.call(forget)


#: Which way is the cheapest is measured, and some read more than is needed: here bytes are counted.
EXACT = {"extra": PATIENT | {"advanced": {"read_method": "direct"}}}
STATES = {"prefix": True, "prepare": [let_states_be_cached], **EXACT}
#: Bytes of a token in the two attention layers of the tiny Nemotron-H, and of a sequence in its three
#: recurrent ones: 8 heads of 16 x 16, and 3 columns of all heads and 2 groups of 2 x 16.
ATTENTION = 2 * 2 * 64 * 4
RECURRENT = 3 * (8 * 16 * 16 + 3 * (8 * 16 + 2 * 2 * 16)) * 4


@pytest.mark.parametrize("p, d", [({}, {}), more({"block_size": 192}, {})])
def test_states_of_a_prefix(pair, p, d):
    """In vLLM's "align" mode a state's table has a column for every block of tokens."""
    prefill, decode = pair("nemotron_h", STATES, p, d)
    draw = random.Random(2)
    size = decode.call(block_size)
    assert prefill.call(block_size) == p.get("block_size", size)
    larger = prefill.call(block_size)
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
                assert moved == RECURRENT + ATTENTION * (length - 1), length
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
        assert moved == RECURRENT + ATTENTION * (len(fork) - 1 - hit)
    # The control.
    other = prompts(draw, [len(fork) - 1])[0] + fork[-1:]
    with unbound(prefill, decode):
        (params,) = prefill.prefill([fork])
        assert decode.generate(other, params=params)[0] == alone


def block_size(engine):
    return engine.llm_engine.vllm_config.cache_config.block_size


def test_the_slot_that_runs():
    """Where vLLM's own manager keeps a state with scratch for speculative tokens behind it and a
    checkpoint before it: the column of the last token, as vLLM's workers count."""
    from kvferry.vllm.groups import Groups
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    size, scratch = 32, 2
    config = cache_config(size, scratch)
    for tokens in (1, 31, 32, 33, 64, 65, 95, 97, 200):
        for chunk in (200, 64, 32):
            manager = KVCacheManager(
                config, 512, max_in_flight_tokens=512, scheduler_block_size=size,
                hash_block_size=size, enable_caching=True,
            )
            groups = Groups(SimpleNamespace(num_prefill_lookahead_tokens=0), config)
            assert (groups.recurrent, groups.held_back) == ([False, True], 1)
            request = new_request(tokens)
            # P, in chunks.
            while request.num_computed_tokens < tokens:
                new = min(chunk, tokens - request.num_computed_tokens)
                assert manager.allocate_slots(request, new) is not None
                request.num_computed_tokens += new
            ids = manager.get_block_ids_for_computed_tokens(request.request_id, tokens)
            (slot,) = groups.table(1, ids[1], tokens)
            assert slot == ids[1][(tokens - 1) // size] > 0
            assert ids[1].index(slot) == len(ids[1]) - 1 - scratch
            # D, for all of them.
            loaded = new_request(tokens, "d")
            assert manager.allocate_slots(
                loaded, 0, num_external_computed_tokens=tokens, delay_cache_blocks=True
            )
            blocks = manager.get_blocks("d")
            ids = blocks.get_block_ids()
            (slot,) = groups.table(1, ids[1], tokens)
            assert slot == ids[1][(tokens - 1) // size] > 0
            assert not any(ids[1][: (tokens - 1) // size])
            assert groups.cached(blocks.blocks, 0) == [0, 0]


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


def new_request(tokens, name="p"):
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(32, sha256)
    return Request(name, [len(name)] * tokens, sampled(1), None, block_hasher=hasher)
