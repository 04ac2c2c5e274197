"""Rarer kinds of caches: every byte, on pools that vLLM itself lays out (see test_geometry)."""

import random

import kvferry
import kvferry.vllm
import pools
import pytest
from kvferry.vllm.groups import Groups
from kept import Attention, Indexer, Latent, Topology, kda, mamba2
from kept_more import (
    Apart,
    Hidden,
    Nvfp4,
    Nvfp4ByHead,
    Records,
    Ring,
    Scaled,
    Vectors,
    v4_compressor,
    v4_indexer,
    v4_latent,
    v4_window,
    v41_latent,
    windowed_answers,
    with_sinks,
)
from pools import Engine
from test_geometry import transfer
from vllm.v1.attention.backend import MultipleOf

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

    def test_the_next_version(self):
        kinds = {
            1: {"attn.swa_cache": v4_window(content=528, scales=16, window=64)},
            2: {
                "attn.swa_cache": v4_window(content=528, scales=16, window=64),
                "attn.compressor.state_cache": Ring(size=1024),
                "attn": v41_latent(2),
            },
        }
        for tokens in (1, 7, 129, 300):
            p = v4("prefill", T(block=128, layout="BLHNC", blocks=60), (2, 1, 2), kinds)
            d = v4("decode", T(block=128, layout="BLHNC", blocks=60, spec=3), (2, 1, 2), kinds)
            move(p, d, tokens)
        # A ring has slots for the drafts of a step: others are other rings.
        d = v4("decode", T(block=128, layout="BLHNC", blocks=60, spec=12), (2, 1, 2), kinds)
        with pytest.raises(kvferry.Incompatible, match="slot=8.*slot=16") as caught:
            move(p, d, 30)
        assert caught.value.state == "layers.0/ring"


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


def test_scales_that_cannot_be_compared_are_refused():
    with pytest.raises(kvferry.vllm.Unsupported, match=r"a scale for each head \(\[0.5, 0.25"):
        Engine("prefill", [Scaled(2, scales=([0.5, 0.25], 1.0))], T())


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
