"""Pools that SGLang's own classes make, described and planned: every number of D's pool is compared with what P's pool holds at
the same place of the same state, and nothing else in D's pool has changed. For pools that no engine makes here, too."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kvferry import compile
from kvferry._refusal import Unsupported
from kvferry.sglang import describe, settings
from kvferry.sglang.manager import Manager
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

LAYERS, HEADS, DIM = 3, 4, 8
COMMON = {"dtype": torch.float32, "device": "cpu", "enable_memory_saver": False}
NUMBERS = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
WINDOW = 24


def model(family="qwen3", **more):
    """As much of SGLang's configuration of a model as a description takes."""
    text = SimpleNamespace(model_type=family, rope_parameters={"rope_theta": 1.0}, **more)
    return SimpleNamespace(
        hf_text_config=text, hf_config=text, model_path="a model", dtype=torch.float32, get_total_num_kv_heads=lambda: HEADS
    )


def mha(size, page, ranks):
    return MHATokenToKVPool(size, page, head_num=max(1, HEADS // ranks), head_dim=DIM, layer_num=LAYERS, **COMMON)


def mla(size, page, ranks):
    return MLATokenToKVPool(size, page, kv_lora_rank=16, qk_rope_head_dim=8, layer_num=LAYERS, **COMMON)


def swa(size, page, ranks):
    return SWAKVPool(
        size, size, page, head_num=max(1, HEADS // ranks), head_dim=DIM, swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1], **COMMON,
    )


def hybrid(family, ranks):
    """The pool of states, and what SGLang says of its shape."""
    if family == "kimi_linear":
        shape = KimiLinearStateShape.create(tp_world_size=ranks, num_heads=4, head_dim=8)
        params = KimiLinearCacheParams(shape=shape, layers=[0, 2], dtype=NUMBERS)
    else:
        groups = {"falcon_h1": 1, "nemotron_h": 2, "qwen3_5": 2}[family]
        delta = {"conv_shard_groups": [16, 16, 32]} if family == "qwen3_5" else {}
        shape = Mamba2StateShape.create(
            tp_world_size=ranks, intermediate_size=32, n_groups=groups, num_heads=4, head_dim=8, state_size=8, conv_kernel=4, **delta
        )
        params = Mamba2CacheParams(shape=shape, layers=[0, 2], dtype=NUMBERS)
    return MambaPool(size=5, spec_state_size=0, cache_params=params, mamba_layer_ids=[0, 2], device="cpu"), shape, groups_of(family)


def groups_of(family):
    return {"falcon_h1": {"mamba_n_groups": 1}, "nemotron_h": {"n_groups": 2}}.get(family, {})


def described(made, rank, ranks, family="qwen3", components=(), shape=None, **config):
    one = describe.Rank(model(family, **config), components, WINDOW - 1, rank, ranks)
    if shape is not None:
        one._shape = lambda: shape
    return one.describe(f"engine-{id(made)}", made)


def fill(found, tables, tokens, first, poison=None):
    """Writes into each number of a request what it stands for; or poison everywhere. By the manifest's own words, element by
    element, which is not how a plan is made."""
    seen = {}
    facts = found.manifest.to_dict()
    for group, table, start in zip(facts["groups"], tables, first, strict=True):
        for piece in group["pieces"]:
            kind, view = facts["kinds"][piece["kind"]], piece["view"]
            base = facts["regions"][view["region"]]["base"] + view["offset"]
            page, width = group["tokens_per_block"], kind["format"]["bytes"]
            places = range(start * page, tokens) if page else [0]
            if group["window"]["tokens"]:
                places = range(max(start * page, tokens - WINDOW + 1), tokens)
            for place in places:
                block = table[place // page - start] if page else table[0]
                at = base + int(block) * view["block"] + (place % page) * view["entry"] if page else base + int(block) * view["block"]
                lengths = [end - begin for begin, end in piece["bounds"]]
                for index in np.ndindex(*lengths):
                    address = at + sum(i * stride for i, stride in zip(index, view["axes"]))
                    logical = (piece["state"], place, *(i + begin for i, (begin, _) in zip(index, piece["bounds"])))
                    if poison is None:
                        data = (hash(logical) & 0xFFFFFFFF).to_bytes(4, "little") * (width // 4)
                        ctypes.memmove(address, data, width)
                    seen[logical] = (ctypes.string_at(address, width), address)
    return seen


PAIRS = [(1, 1, 1, 4), (16, 4, 1, 1), (4, 1, 2, 1), (1, 16, 1, 2)]
CASES = {
    "MHA": (mha, {}),
    "MLA": (mla, {}),
    "SWA": (swa, {"components": ("swa",)}),
    "Mamba2": ("nemotron_h", {}),
    "Mamba2, one group": ("falcon_h1", {}),
    "GDN": ("qwen3_5", {}),
    "KDA": ("kimi_linear", {}),
}


def engine(case, page, ranks):
    """The ranks of an engine, described, and what must stay alive."""
    make, more = CASES[case]
    found, alive = [], []
    for rank in range(ranks):
        if callable(make):
            made = make(128, page, ranks)
            found.append(described(made, rank, ranks, **more))
        else:
            states, shape, config = hybrid(make, ranks)
            made = HybridLinearKVPool(
                size=128, page_size=page, head_num=max(1, HEADS // ranks), head_dim=DIM, full_attention_layer_ids=[1],
                mamba_pool=states, dtype=torch.float32, device="cpu",
            )
            found.append(described(made, rank, ranks, make, ("mamba",), shape, **config))
        alive.append(made)
    return found, alive


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("source_page", "page", "source_ranks", "ranks"), PAIRS)
def test_every_number_lands_in_its_place(case, source_page, page, source_ranks, ranks):
    sources, alive = engine(case, source_page, source_ranks)
    destinations, others = engine(case, page, ranks)
    tokens, draw = 61, np.random.default_rng(5)

    def tables(found, size):
        pages = -(-tokens // size)
        by_source = {}
        for table, group in zip(found.tables, found.manifest.to_dict()["groups"], strict=True):
            count = 1 if table.page is None else pages
            if table.window:
                # As SGLang has it: so many tokens before the end, and the pages that they lie in.
                count -= (tokens - (WINDOW - 1)) // size
            by_source[table.source] = draw.permutation(group["blocks"] - 1)[:count] + 1
        manager = Manager.__new__(Manager)
        manager.tables = found.tables
        made, first = manager.tables_of(by_source.get("pages"), [by_source.get("component")], tokens)
        return made, first, manager.held(first)

    theirs, their_first, _ = tables(sources[0], source_page)
    ours, our_first, held = tables(destinations[0], page)
    expected = {}
    for source in sources:
        expected |= {name: data for name, (data, _) in fill(source, theirs, tokens, their_first).items()}
    wanted = 0
    for destination in destinations:
        before = [bytes(torch.empty(0, dtype=torch.uint8).set_(it.untyped_storage()).fill_(0xAA)) for it in destination.memory]
        plan = compile(destination.manifest, [source.manifest for source in sources])
        copies = plan.copies(
            tokens=tokens, source_blocks=theirs, destination_blocks=ours, source_first=their_first, destination_first=our_first,
            cached=held,
        )
        moved = 0
        for source, destination_at, length in np.concatenate(copies).tolist():
            ctypes.memmove(destination_at, source, length)
            moved += length
        found = fill(destination, ours, tokens, our_first, poison=True)
        assert found
        for name, (data, _) in found.items():
            assert data == expected[name], name
        wanted += len(found)
        # Nothing else has changed: as many bytes as were written are not what they were, at most.
        assert moved == sum(len(data) for data, _ in found.values())
        after = [bytes(torch.empty(0, dtype=torch.uint8).set_(it.untyped_storage())) for it in destination.memory]
        touched = {address + i for data, address in found.values() for i in range(len(data))}
        for tensor, was, now in zip(destination.memory, before, after, strict=True):
            changed = np.flatnonzero(np.frombuffer(was, np.uint8) != np.frombuffer(now, np.uint8)) + tensor.untyped_storage().data_ptr()
            assert set(changed.tolist()) <= touched
    assert wanted >= len({name for name in expected})
    del alive, others


def test_pools_and_settings_are_refused_by_name(monkeypatch):
    made = mha(32, 1, 1)
    for name, words in [
        ("MHATokenToKVPoolFP4", "MHATokenToKVPoolFP4: keys and values of 4 bits"),
        ("PoolOfTomorrow", "pools of the kind PoolOfTomorrow have not been seen before"),
    ]:
        pool = type(name, (MHATokenToKVPool,), {})
        made.__class__ = pool
        with pytest.raises(Unsupported, match=words):
            described(made, 0, 1)
    made.__class__ = MHATokenToKVPool
    for name, value, words in [
        ("kv_cache_layout", "hnd", "layout 'hnd'"),
        ("store_dtype", torch.uint8, "quantised cache"),
        ("post_capture_active", True, "post_capture_active"),
    ]:
        with monkeypatch.context() as patch, pytest.raises(Unsupported, match=words):
            patch.setattr(made, name, value)
            described(made, 0, 1)
    with pytest.raises(Unsupported, match="states that are not described beside the cache: dsa"):
        described(made, 0, 1, components=("dsa",))
    with pytest.raises(Unsupported, match="recurrent layers of 'zaya'"):
        states, shape, _ = hybrid("nemotron_h", 1)
        pool = HybridLinearKVPool(
            size=32, page_size=1, head_num=HEADS, head_dim=DIM, full_attention_layer_ids=[1], mamba_pool=states,
            dtype=torch.float32, device="cpu",
        )
        described(pool, 0, 1, "zaya", ("mamba",), shape)


def test_settings_are_refused_by_name():
    given = SimpleNamespace(
        **dict.fromkeys(settings.REFUSED), dp_size=1, disaggregation_decode_host_receive_threshold=1.0,
        disaggregation_decode_allocation_policy="early",
    )
    parallel = SimpleNamespace(**dict.fromkeys(settings.DIVIDED, 1))
    settings.refuse_settings(given, parallel)
    for name in settings.REFUSED:
        with pytest.raises(Unsupported, match=f"--{name.replace('_', '-')} "):
            settings.refuse_settings(SimpleNamespace(**vars(given) | {name: "yes"}), parallel)
    for name in settings.DIVIDED:
        with pytest.raises(Unsupported, match=name):
            settings.refuse_settings(given, SimpleNamespace(**vars(parallel) | {name: 2}))
    with pytest.raises(Unsupported, match="--dp-size 2"):
        settings.refuse_settings(SimpleNamespace(**vars(given) | {"dp_size": 2}), parallel)
