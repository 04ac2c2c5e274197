"""Rarer kinds of caches: every byte, on pools that vLLM itself lays out (see moving)."""

import random
from dataclasses import replace
from types import SimpleNamespace

import kvferry
import kvferry.vllm
import pools
import pytest
import torch
from kvferry.vllm import versions
from kvferry.vllm.describe import specs
from kvferry.vllm.groups import Groups
from kvferry.vllm.refusal import Unsupported
from kept import Attention, Indexer, Latent, Topology, kda, mamba2
from kept_more import (
    Apart,
    Hidden,
    Nvfp4,
    Nvfp4ByHead,
    Records,
    Ring,
    Rows,
    Scaled,
    Vectors,
    rocm_indexer,
    v4_compressor,
    v4_indexer,
    v4_latent,
    v4_window,
    v41_latent,
    windowed_answers,
    with_sinks,
)
from moving import transfer
from pools import Engine
from vllm.platforms import current_platform
from vllm.utils import deep_gemm
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.attention.ops import rocm_paged_mxfp4_indexer
from vllm.v1.kv_cache_interface import HiSparseHotSpec

T = Topology

#: The caches of a layer of DeepSeek-V4, by its compression, in the order in which vLLM meets them.
V4 = {
    1: {"attn.swa_cache": v4_window()},
    4: {
        "attn.swa_cache": v4_window(),
        "attn.indexer.k_cache": v4_indexer(),
        "attn.indexer.compressor.state_cache": v4_compressor(4, 128),
        "attn.compressor.state_cache": v4_compressor(4, 512),
        "attn": v4_latent(4),
    },
    128: {
        "attn.swa_cache": v4_window(),
        "attn.compressor.state_cache": v4_compressor(128, 512),
        "attn": v4_latent(128),
    },
}


def v4(name, side, ratios=(1, 4, 128, 4), kinds=V4):
    layers = {
        f"model.layers.{i}.{where}": kept
        for i, ratio in enumerate(ratios)
        for where, kept in kinds[ratio].items()
    }
    return Engine(name, list(layers.values()), side, list(layers))


def move(source, target, tokens):
    return transfer(source, target, tokens, random.Random(tokens))


class TestDeepSeekV4:
    """Compressed and sliding latents, compressed indexers, compressors, padding, several sizes in one
    group."""

    @pytest.mark.parametrize("tokens", [1, 3, 4, 130, 255, 256, 300, 515])
    def test_every_byte(self, tokens):
        p = v4("prefill", T(block=256, layout="BLHNC", blocks=200))
        d = v4("decode", T(block=256, layout="BLNHC", blocks=150))
        assert len(p.groups) > 1
        assert move(p, d, tokens) > 0

    def test_pages_of_several_sizes_share_a_group(self):
        engine = v4("prefill", T(block=256, layout="BLHNC", blocks=40))
        sizes = [
            {spec.page_size_bytes for spec in getattr(it.kv_cache_spec, "kv_cache_specs", {}).values()}
            for it in engine.groups
        ]
        assert any(len(it) > 1 for it in sizes)
        assert any(spec.page_size_padded for spec in engine.specs.values())

    def test_ranks_hold_the_same(self):
        p = v4("prefill", T(tp=2, block=256, layout="BLHNC", blocks=90))
        d = v4("decode", T(tp=4, block=256, layout="BLHNC", blocks=90))
        move(p, d, 301)

    def test_pipeline_stages(self):
        side = T(pp=2, block=256, layout="BLHNC", blocks=90)
        p = v4("prefill", side, (4, 128, 4, 128))
        move(p, v4("decode", T(block=256, layout="BLHNC", blocks=90), (4, 128, 4, 128)), 301)

    def test_blocks_of_other_sizes(self):
        p = v4("prefill", T(block=512, layout="BLHNC", blocks=90))
        move(p, v4("decode", T(block=256, layout="BLHNC", blocks=90)), 1030)

    def test_names_tell_the_caches_of_a_layer_apart(self):
        manifest = v4("prefill", T(block=256, layout="BLHNC")).ranks[0].manifest.to_dict()
        pieces = [piece for group in manifest["groups"] for piece in group["pieces"]]
        names = [piece["state"] for piece in pieces]
        assert len(names) == len(set(names))
        laws = {piece["state"]: manifest["kinds"][piece["kind"]]["law"] for piece in pieces}
        assert laws["layers.1/indexer"] == {"entries": 1, "tokens": 4, "open": 0}
        assert laws["model.layers.2.attn/latent"] == {"entries": 1, "tokens": 128, "open": 0}

    @pytest.mark.parametrize("cache", ["fp8_ds_mla", "nvfp4_ds_mla"])
    def test_the_next_version(self, cache):
        kinds = v41_kinds(cache)
        for tokens in (1, 7, 129, 300):
            p = v4("prefill", T(block=128, layout="BLHNC", blocks=60), (2, 1, 2), kinds)
            d = v4("decode", T(block=128, layout="BLHNC", blocks=60, spec=3), (2, 1, 2), kinds)
            move(p, d, tokens)
        # A ring has slots for the drafts of a step: others are other rings.
        d = v4("decode", T(block=128, layout="BLHNC", blocks=60, spec=12), (2, 1, 2), kinds)
        with pytest.raises(kvferry.Incompatible, match="slot=8.*slot=16") as caught:
            move(p, d, 30)
        assert caught.value.state == "layers.0/ring"

    @pytest.mark.parametrize("cache", ["fp8_ds_mla", "nvfp4_ds_mla"])
    @pytest.mark.parametrize(
        "version, rounds, follows",
        [
            ("0.32.1+cpu", False, False),
            ("0.33.0", True, True),
            # Its code is not that of its version, or nobody has looked at it.
            ("0.33.0", False, None),
            ("0.32.0", True, None),
            ("0.34.0", True, None),
        ],
    )
    def test_where_scales_lie_is_known_for_each_version_or_refused(
        self, cache, version, rounds, follows, monkeypatch
    ):
        monkeypatch.setattr(versions, "running", lambda: version)
        if rounds:

            def made(self, packed_block_stride_alignment=None): ...

            monkeypatch.setattr(DeepseekV4SWACache, "__init__", made)

        def engine():
            return v4("prefill", T(block=128, layout="BLHNC"), (2, 1, 2), v41_kinds(cache))

        # The records of V4 are the same in all.
        v4("prefill", T(block=256, layout="BLHNC"), (4, 128, 4))
        if follows is None:
            with pytest.raises(Unsupported, match=rf"layer '.*': records of \d+ bytes a token .* vLLM {version}"):
                engine()
            return
        manifest = engine().ranks[0].manifest.to_dict()
        pieces = manifest["groups"][0]["pieces"][:2]
        whole = sum(manifest["kinds"][piece["kind"]]["format"]["bytes"] for piece in pieces)
        data, scales = (piece["view"] for piece in pieces)
        assert (data["entry"] == scales["entry"] == whole) is follows
        assert (scales["offset"] - data["offset"] < whole) is follows

    @pytest.mark.parametrize(
        "version, says, blackwell, floats",
        [
            ("0.32.0", None, True, True),
            ("0.33.0", False, False, True),
            ("0.33.0", True, True, False),
            # Where it does not say so by that name any more.
            ("0.33.0", None, True, None),
            ("0.34.0", None, False, True),
            ("0.34.0", None, True, None),
        ],
    )
    def test_an_indexer_s_scales_are_what_the_engine_says(self, version, says, blackwell, floats, monkeypatch):
        running(monkeypatch, version, says, blackwell)

        def engine(layers=(4,)):
            return v4("prefill", T(block=256, layout="BLHNC"), layers)

        # Without an indexer nothing is asked.
        engine((128, 1))
        if floats is None:
            with pytest.raises(Unsupported, match=f"vLLM {version} does not say which numbers it writes as the scales"):
                engine()
            return
        formats = {kind["format"]["name"] for kind in engine().ranks[0].manifest.to_dict()["kinds"]}
        assert ("fp8_e8m0 four times" in formats) is not floats

    def test_unlike_scales_are_refused_with_both_and_like_ones_move(self, monkeypatch):
        side = T(block=256, layout="BLHNC", blocks=60)
        running(monkeypatch, "0.32.0", None, False)
        old = v4("prefill", side, (4,))
        running(monkeypatch, "0.33.0", True, True)
        new, other = (v4(name, side, (4,)) for name in ("decode", "prefill"))
        for p, d in ((old, new), (new, old)):
            with pytest.raises(kvferry.Incompatible, match="layers.0/indexer.scale") as caught:
                move(p, d, 300)
            values = {caught.value.source_value, caught.value.destination_value}
            assert values == {"fp8_e8m0 four times (4 bytes)", "f32 (4 bytes)"}
        move(other, new, 300)

    def test_records_of_4_bits_are_not_those_of_8(self):
        """vLLM's kernels for Blackwell prefer the former, and take either."""
        p = v4("prefill", T(block=128, layout="BLHNC"), (2, 1, 2), v41_kinds("nvfp4_ds_mla"))
        d = v4("decode", T(block=128, layout="BLHNC"), (2, 1, 2), v41_kinds("fp8_ds_mla"))
        with pytest.raises(kvferry.Incompatible, match="nvfp4_ds_mla .*fp8_ds_mla "):
            move(p, d, 30)


def running(monkeypatch, version, says, blackwell):
    """As if this were another vLLM, on another card."""
    monkeypatch.setattr(versions, "running", lambda: version)
    monkeypatch.setattr(current_platform, "is_device_capability_family", lambda family: blackwell, raising=False)
    if says is None:
        monkeypatch.delattr(deep_gemm, "mqa_logits_use_mx_scales", raising=False)
    else:
        monkeypatch.setattr(deep_gemm, "mqa_logits_use_mx_scales", lambda: says, raising=False)


def v41_kinds(cache):
    """The caches of V4.1's layers, by their compression."""
    window = v4_window(cache, content=528, scales=16, window=64)
    ring, latent = Ring(size=1024), v41_latent(2, cache)
    return {
        1: {"attn.swa_cache": window},
        2: {"attn.swa_cache": window, "attn.compressor.state_cache": ring, "attn": latent},
    }


@pytest.mark.parametrize(
    "p, d",
    [(T(), T()), (T(tp=1), T(tp=2)), (T(tp=4), T(tp=2)), (T(block=48), T(tp=2, block=32))],
    ids=["same", "up", "down", "blocks"],
)
@pytest.mark.parametrize(
    "layers",
    [
        [windowed_answers()] * 2,
        [with_sinks()] * 2,
        [Attention(4), Hidden()],
        [Apart(4)] * 3,
        [Nvfp4(4)] * 2,
        [Nvfp4ByHead(4)] * 2,
        [Records(4)] * 2,
        [Scaled(4, scales=(0.5, 2.0))] * 2,
        [Attention(4), Vectors(4)],
    ],
    ids=["r-swa", "sinks", "hidden", "apart", "nvfp4", "nvfp4 by head", "records", "scaled",
         "vectors"],
)
def test_every_byte(layers, p, d):
    for tokens in (1, 37, 90):
        move(Engine("prefill", layers, p), Engine("decode", layers, d), tokens)


@pytest.mark.parametrize("layers", [[Latent(), Ring(parts=2)] * 2, [Attention(4), mamba2(), Ring(parts=2)]])
@pytest.mark.parametrize("p, d", [(1, 1), (1, 2), (2, 1)])
def test_rings(layers, p, d, monkeypatch):
    # As the models that have them: pages side by side in a block.
    monkeypatch.setattr(pools, "MultipleOf", lambda _: MultipleOf(8))
    sides = [T(tp=tp, layout="BLHNC") for tp in (p, d)]
    for tokens in (1, 5, 40):
        move(Engine("prefill", layers, sides[0]), Engine("decode", layers, sides[1]), tokens)


def test_a_ring_is_one_block_however_long_the_prompt():
    layers = [Latent(), Ring(parts=2)]
    engine = Engine("prefill", layers, T(layout="BLHNC", block=128))
    groups = Groups(engine.config, engine.stages[0][0])
    ring = engine.group_of("model.layers.1.mixer")
    assert groups.recurrent[ring]
    assert groups.table(ring, [7], 1) == groups.table(ring, [7], 1000) == [7]
    assert groups.held_back == 1


def test_back_ends_with_other_orders_fit():
    for p, d in (([Attention(4)], [Apart(4)]), ([Apart(4)], [Attention(4)])):
        move(Engine("prefill", p, T(tp=2)), Engine("decode", d, T()), 40)


def test_four_bits_in_another_order_of_slots_fit():
    move(Engine("prefill", [Nvfp4(4)], T(tp=2)), Engine("decode", [Nvfp4ByHead(4)], T()), 40)


def test_scales_of_the_layer_are_part_of_the_format():
    made = Engine("prefill", [Scaled(4, scales=(0.5, 2.0))], T(tp=2))
    kinds = made.ranks[0].manifest.to_dict()["kinds"]
    assert {kind["format"]["name"] for kind in kinds} == {"fp8_e4m3, keys times 0.5, values times 2"}
    with pytest.raises(kvferry.Incompatible) as caught:
        move(made, Engine("decode", [Scaled(4, scales=(0.25, 2.0))], T()), 20)
    assert caught.value.kind == "format"
    assert "keys times 0.5" in caught.value.source_value
    assert "keys times 0.25" in caught.value.destination_value


class TestScalesOfHeads:
    """Each head of a layer has a scale of its own: a state of its own, then, whose format names it."""

    LAYERS = [Scaled(4, scales=((0.5, 0.25, 2.0, 4.0), 1.0))] * 2

    @pytest.mark.parametrize(
        "p, d", [(T(), T(tp=2)), (T(tp=4), T(tp=2)), (T(tp=2, block=48), T(block=32, layout="LBNHC"))]
    )
    def test_every_byte(self, p, d):
        for tokens in (1, 37, 90):
            move(Engine("prefill", self.LAYERS, p), Engine("decode", self.LAYERS, d), tokens)

    def test_another_scale_is_refused_with_both(self):
        other = [Scaled(4, scales=((0.5, 0.25, 3.0, 4.0), 1.0))] * 2
        with pytest.raises(kvferry.Incompatible) as caught:
            move(Engine("prefill", self.LAYERS, T()), Engine("decode", other, T(tp=2)), 20)
        assert caught.value.kind == "format" and caught.value.state == "layers.0/k.2"
        assert "times 2" in caught.value.source_value
        assert "times 3" in caught.value.destination_value

    def test_scales_for_other_heads_are_refused(self):
        with pytest.raises(kvferry.vllm.Unsupported, match="2 and 1 scales for the 4 heads"):
            Engine("prefill", [Scaled(4, scales=([0.5, 0.25], 1.0))], T())

    def test_scales_that_an_engine_computes_are_refused(self):
        engine = Engine("prefill", [Scaled(4)], T())
        engine.config.cache_config.calculate_kv_scales = True
        config, tensors = engine.stages[0]
        with pytest.raises(kvferry.vllm.Unsupported, match="computes for itself"):
            pools.Rank(engine, config, tensors, 0, 0)


class TestIndexers:
    """The keys of sparse indexers in every order that vLLM's kernels have."""

    def test_four_bits(self):
        kinds = {1: V4[1], 4: {**V4[4], "attn.indexer.k_cache": v4_indexer(content=68)}}
        for tokens in (3, 300, 515):
            p = v4("prefill", T(block=256, layout="BLHNC", blocks=120), (1, 4), kinds)
            move(p, v4("decode", T(block=256, layout="BLNHC", blocks=90), (1, 4), kinds), tokens)

    def test_eight_bits_are_not_four(self):
        kinds = {4: {**V4[4], "attn.indexer.k_cache": v4_indexer(content=68)}}
        p = v4("prefill", T(block=256, layout="BLHNC", blocks=120), (4,), kinds)
        with pytest.raises(kvferry.Incompatible, match="fp4_e2m1_pair"):
            move(p, v4("decode", T(block=256, layout="BLHNC", blocks=120), (4,)), 20)

    @pytest.mark.parametrize("blocks", [(16, 16), (32, 64), (64, 48)])
    def test_tiles(self, blocks, monkeypatch):
        monkeypatch.setattr(specs, "on_rocm", lambda: True)
        layers = [Latent(), rocm_indexer()]
        p, d = (Engine(name, layers, T(block=it)) for name, it in zip(("prefill", "decode"), blocks))
        for tokens in (1, 16, 37, 90):
            move(p, d, tokens)

    @pytest.mark.parametrize(
        "told, tokens, lanes",
        [({"n_per_tile": 32, "d_per_tile": 16}, 32, 2),
         ({"n_per_tile": 16, "d_per_tile": 16, "scale_lanes": 4}, 16, 4)],
    )
    def test_tiles_of_four_bits(self, told, tokens, lanes, monkeypatch):
        """As aiter tells vLLM; beside an engine whose blocks are not cut."""
        rocm_paged_mxfp4_indexer.rocm_paged_mxfp4_cache_layout.cache_clear()
        aiter = SimpleNamespace(cache_format=lambda *args: told)
        monkeypatch.setattr(rocm_paged_mxfp4_indexer, "_aiter", lambda: aiter)
        backend = "DEEPSEEK_V41_ROCM_MXFP4_INDEXER"
        cut = [Latent(), rocm_indexer(68, tokens, lanes, backend, ratio=2)]
        whole = [Latent(), rocm_whole()]
        for p, d in ((cut, cut), (cut, whole), (whole, cut)):
            source = Engine("prefill", p, T(block=128))
            target = Engine("decode", d, T(block=64))
            for count in (1, 3, 70, 150):
                move(source, target, count)

    def test_what_aiter_does_not_say_is_refused(self, monkeypatch):
        rocm_paged_mxfp4_indexer.rocm_paged_mxfp4_cache_layout.cache_clear()
        aiter = SimpleNamespace(cache_format=lambda *args: {"n_per_tile": 32, "k_width": 16})
        monkeypatch.setattr(rocm_paged_mxfp4_indexer, "_aiter", lambda: aiter)
        with pytest.raises(kvferry.vllm.Unsupported, match="does not say how it cuts a block"):
            Engine("prefill", [rocm_indexer(68, 32, 2, "DEEPSEEK_V41_ROCM_MXFP4_INDEXER")], T(block=64))


def rocm_whole():
    """The same keys where blocks are not cut."""
    it = rocm_indexer(68, backend="DEEPSEEK_V41_INDEXER", ratio=2)
    return Rows(it.make, it.backend, 2, 4, indexes=True)


def test_pages_in_host_memory_have_a_pool_of_their_own():
    """HiSparse keeps latents in host memory, and copies of some of them on the card, which do not move."""
    engine = Engine("prefill", [Latent(), Attention(2)], T(blocks=10))
    config, tensors = engine.stages[0]
    hot = replace(config.kv_cache_groups[0], layer_names=["model.layers.0.mixer.hisparse_hot"],
                  kv_cache_spec=HiSparseHotSpec(block_size=16, page_size=64, blocks_per_request=2),
                  enable_kv_transfer=False)
    groups = [
        replace(config.kv_cache_groups[0], layer_names=[layer], kv_cache_spec=spec,
                host_resident=layer == "model.layers.0.mixer")
        for layer, spec in engine.specs.items()
    ]
    config = replace(config, kv_cache_groups=[*groups, hot], hisparse_host_num_blocks=30)
    host = engine.ranks[0].kv_caches["model.layers.0.mixer"]
    caches = {**engine.ranks[0].kv_caches, "model.layers.0.mixer": torch.zeros(30, *host.shape[1:], dtype=host.dtype)}
    manifest = kvferry.vllm.manifest(
        engine.config, config, caches, tp_rank=0, pp_rank=0, engine="it", conv_order="SD",
        backends=dict.fromkeys(caches, "FLASH_ATTN"), layer_specs=engine.specs,
    ).to_dict()
    blocks = {group["pieces"][0]["state"]: group["blocks"] for group in manifest["groups"]}
    assert blocks == {"layers.0/latent": 30, "layers.1/k": 10}
    assert len(manifest["regions"]) == 2


class TestContextParallelism:
    """Ranks that take turns at tokens, in a prefill or a decode; vLLM's connector refuses most of it."""

    HYBRID = [Latent(), kda(), Latent(), kda()]
    #: A head is on several ranks, which share its tokens.
    HEADS = [Attention(2)] * 2

    @pytest.mark.parametrize(
        "p, d",
        [
            (T(tp=4, dcp=4), T(tp=2)),
            (T(tp=2), T(tp=4, dcp=2)),
            (T(tp=4, dcp=2, turn=4), T(tp=4, dcp=4, turn=16)),
            (T(pcp=2), T(tp=2)),
            (T(tp=2, pcp=2), T()),
            (T(pcp=4, dcp=4), T(tp=2)),
            (T(pcp=2, dcp=2, turn=8), T(tp=4, dcp=4)),
            (T(tp=2, pcp=2, dcp=4, turn=2), T(tp=2, dcp=2, block=32)),
            (T(tp=2), T(tp=2, pcp=2, dcp=2)),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("layers", [[Latent(192), Indexer()], HYBRID], ids=["mla", "hybrid"])
    def test_latents(self, layers, p, d):
        for tokens in (1, 33, 150):
            move(Engine("prefill", layers, p), Engine("decode", layers, d), tokens)

    @pytest.mark.parametrize(
        "p, d",
        [
            (T(tp=4, dcp=2), T(tp=2)),
            (T(), T(tp=8, dcp=4, turn=4)),
            (T(tp=8, dcp=2, turn=16), T(tp=4, dcp=2)),
            (T(tp=2, pcp=2), T(tp=4, dcp=2)),
            (T(tp=4, dcp=2, block=48), T(tp=1, block=32)),
        ],
        ids=str,
    )
    def test_heads(self, p, d):
        for layers in (self.HEADS, [Attention(2), mamba2(groups=1, heads=8)]):
            for tokens in (5, 70):
                move(Engine("prefill", layers, p), Engine("decode", layers, d), tokens)
