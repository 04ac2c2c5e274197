"""Every state element, on pools that vLLM itself lays out.

P's pools are filled as its kernels would fill them. Each D rank's plan is compiled from the manifests
that `kvferry.vllm` makes of the tensors, and its copies are carried out with memmove. Then D's whole
memory, byte by byte, must be what D's own kernels would have written, and nothing else may have
changed.
"""

import random
from dataclasses import replace

import kvferry
import pytest
import torch
from kept import (
    Attention,
    Indexer,
    Latent,
    Topology,
    delta_net,
    kda,
    linear,
    mamba1,
    mamba2,
    short_conv,
)
from moving import transfer
from pools import Cannot, Engine


def alternate(first, second, count=6):
    return [first if i % 3 == 0 else second for i in range(count)]


MODELS = {
    "gqa": [Attention(4)] * 4,
    "mha": [Attention(24)] * 3,
    "one head": [Attention(1)] * 3,
    "keys and values of two sizes": [Attention(6, 32, 16)] * 3,
    "sliding": alternate(Attention(4), Attention(4, window=24)),
    "sliding, other heads": alternate(Attention(2, 64), Attention(4, window=40)),
    "chunked": alternate(Attention(4), Attention(4, chunk=32)),
    "mla": [Latent()] * 4,
    "mla, indexer": [Latent(192), Indexer()] * 3,
    "mamba1": alternate(Attention(4), mamba1()),
    "mamba2": alternate(Attention(4), mamba2()),
    "mamba2, one group": alternate(Attention(4), mamba2(groups=1)),
    "mamba2 alone": [mamba2()] * 3,
    "mamba2 and attention in one layer": [Attention(4), mamba2(groups=1)] * 3,
    "delta net": alternate(Attention(2), delta_net()),
    "kda": alternate(Latent(), kda()),
    "short conv": alternate(Attention(4), short_conv()),
    "linear": alternate(Attention(4), linear()),
    "several kinds": [Attention(4), mamba2(), short_conv(), Attention(4, window=24), linear(), kda()],
}
NAMES = {
    "mla, indexer": [f"model.layers.{i // 2}.{'attn' if i % 2 == 0 else 'indexer'}" for i in range(6)],
    "mamba2 and attention in one layer": [
        f"model.layers.{i // 2}.{'attn' if i % 2 == 0 else 'mixer'}" for i in range(6)
    ],
}


def engine(name, model, side):
    return Engine(name, MODELS[model], side, NAMES.get(model))


def pair(model, p, d, tokens, draw=None, cached=None):
    draw = draw or random.Random(0)
    source, target = engine("prefill", model, p), engine("decode", model, d)
    return transfer(source, target, tokens, draw, cached)


T = Topology
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "p, d",
    [
        (T(), T()),
        (T(tp=1), T(tp=2)),
        (T(tp=2), T(tp=1)),
        (T(conv="DS", blocks=30), T(conv="SD", layout="BLHNC")),
        (T(pp=2), T(tp=2)),
        (T(block=48), T(block=32)),
    ],
    ids=["same", "up", "down", "layouts", "pp2 to tp2", "blocks"],
)
def test_every_kind_of_state(model, p, d):
    for tokens in (1, 37, 90):
        try:
            assert pair(model, p, d, tokens) > 0
        except Cannot as reason:
            pytest.fail(f"vLLM cannot run this: {reason}")


class TestWhatOthersRefuseOrGetWrong:
    """What vLLM 0.32's own connector refuses or moves to the wrong place, one by one."""

    def test_tp_that_does_not_divide(self):
        pair("mha", T(tp=3), T(tp=2), 50)
        pair("mamba2 alone", T(tp=3), T(tp=2), 50)
        pair("mamba2 alone", T(tp=2), T(tp=3), 50)
        pair("mha", T(tp=6), T(tp=4), 50)

    def test_larger_blocks_on_the_source(self):
        pair("gqa", T(block=64), T(block=16), 150)
        pair("mamba2", T(block=96), T(block=64), 150)

    def test_blocks_that_do_not_divide_with_more_ranks_on_the_source(self):
        pair("gqa", T(tp=4, block=48), T(tp=2, block=32), 150)

    @pytest.mark.parametrize("p, d", [(8, 2), (2, 8), (8, 4), (6, 3), (12, 1)])
    def test_more_ranks_than_heads(self, p, d):
        model = "gqa" if p != 6 and p != 12 else "one head"
        pair(model, T(tp=p), T(tp=d), 40)

    @pytest.mark.parametrize("p", LAYOUTS)
    @pytest.mark.parametrize("d", LAYOUTS)
    def test_any_layout_to_any_other_with_heads_split(self, p, d):
        pair("gqa", T(tp=1, layout=p), T(tp=2, layout=d), 40)

    @pytest.mark.parametrize("model", ["mamba2", "delta net", "short conv", "several kinds"])
    @pytest.mark.parametrize(
        "p, d",
        [
            (T(pp=2), T()),
            (T(), T(pp=2)),
            (T(pp=2), T(pp=3)),
            (T(pp=2), T(tp=2)),
            (T(pp=2, tp=2), T(pp=3, tp=1)),
        ],
        ids=["P", "D", "both", "pp2 to tp2", "both and tp"],
    )
    def test_hybrids_under_pipeline_parallelism(self, model, p, d):
        try:
            pair(model, p, d, 70)
        except Cannot as reason:
            assert "a stage without layers of a group" in str(reason)

    @pytest.mark.parametrize("p, d", [(1, 2), (2, 1), (2, 4), (4, 2), (3, 2)])
    @pytest.mark.parametrize("conv", ["SD", "DS"])
    def test_mamba2_with_one_group(self, p, d, conv):
        model = [Attention(12), mamba2(groups=1), mamba2(groups=1)]
        source = Engine("prefill", model, T(tp=p, conv="SD"))
        target = Engine("decode", model, T(tp=d, conv=conv))
        transfer(source, target, 40, random.Random(p))

    @pytest.mark.parametrize("model", ["mamba2", "delta net", "kda", "short conv", "several kinds"])
    @pytest.mark.parametrize("p, d", [(0, 3), (3, 0), (2, 1)])
    @pytest.mark.parametrize("orders", [("SD", "SD"), ("DS", "DS"), ("SD", "DS"), ("DS", "SD")])
    def test_different_numbers_of_speculative_tokens(self, model, p, d, orders):
        pair(model, T(spec=p, conv=orders[0]), T(tp=2, spec=d, conv=orders[1]), 40)

    def test_different_state_formats_are_refused(self):
        p, d = T(), T(state_dtype=torch.bfloat16)
        with pytest.raises(kvferry.Incompatible) as caught:
            pair("mamba2", p, d, 40)
        error = caught.value
        assert (error.kind, error.state) == ("format", "layers.1/ssm")
        assert (error.source_value, error.destination_value) == ("f32 (4 bytes)", "bf16 (2 bytes)")
        with pytest.raises(kvferry.Incompatible):
            pair("gqa", T(), T(dtype=torch.float16), 40)

    def test_different_models_are_refused(self):
        source = Engine("prefill", [Attention(4)] * 2, T())
        for layers in ([Attention(8)] * 2, [Attention(4, 64)] * 2, [Attention(4)] * 3, [Latent()] * 2):
            with pytest.raises(kvferry.Incompatible):
                transfer(source, Engine("decode", layers, T()), 20, random.Random(0))

    @pytest.mark.parametrize("p, d", [(32, 16), (16, 32), (16, 64), (None, 16)])
    def test_kernel_blocks_and_cached_prefixes(self, p, d):
        # Manager blocks of several kernel blocks, in other numbers on the two sides, and a prefix
        # that D has already.
        source = Engine("prefill", MODELS["mamba2"], T(block=64, kernel=p))
        target = Engine("decode", MODELS["mamba2"], T(block=128, kernel=d, tp=2))
        assert len(target.groups) > 1
        size = target.block_tokens(0)
        tokens = 2 * size + 11
        cached = [size if target.block_tokens(g) else 0 for g in range(len(target.groups))]
        transfer(source, target, tokens, random.Random(3), cached)

    def test_a_side_without_the_hybrid_manager(self):
        # It keeps every token of a sliding window; the pair fits all the same, in both directions.
        for model in ("sliding", "sliding, other heads", "chunked"):
            for tokens in (5, 33, 90):
                pair(model, T(hma=False), T(), tokens)
                pair(model, T(hma=False), T(hma=False, tp=2), tokens)
                pair(model, T(), T(hma=False), tokens)
                pair(model, T(tp=2, block=48), T(hma=False, block=32, layout="LBNHC"), tokens)

    def test_a_side_without_the_hybrid_manager_that_uses_blocks_again(self):
        # Another request may share a shorter prefix, and look at what never came.
        pair("sliding", T(hma=False), T(hma=False, caching=True), 90)
        with pytest.raises(kvferry.Incompatible, match="turn prefix caching off") as caught:
            pair("sliding", T(), T(hma=False, caching=True), 90)
        assert (caught.value.kind, caught.value.state) == ("window", "layers.1/k")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "p, d", [((1, 32), (1, 32)), ((1, 32), (2, 64)), ((2, 96), (1, 64)), ((4, 64), (2, 32))]
)
@pytest.mark.parametrize("model", ["gqa", "sliding", "mamba2"])
def test_the_order_of_the_cpu_back_end(model, p, d, dtype):
    # vLLM's own CPU kernel writes both what is moved and what is expected.
    p = T(tp=p[0], block=p[1], cpu=True, dtype=dtype)
    d = T(tp=d[0], block=d[1], cpu=True, dtype=dtype)
    pair(model, p, d, 77)


def test_cpu_to_another_back_end():
    pair("gqa", T(cpu=True, block=32), T(tp=2), 50)
    pair("gqa", T(layout="LBNHC"), T(tp=2, cpu=True, block=32), 50)


@pytest.mark.parametrize("p, d", [((2, 1), (1, 1)), ((1, 1), (2, 1)), ((4, 2), (2, 1)), ((2, 16), (4, 4))])
@pytest.mark.parametrize("model", ["mla", "mla, indexer"])
def test_decode_context_parallelism(model, p, d):
    # TP ranks take turns at tokens: sizes and turns differ.
    p = T(tp=p[0], dcp=p[0], turn=p[1])
    d = T(tp=d[0], dcp=d[0], turn=d[1])
    pair(model, p, d, 150)


def test_overlaid_groups_that_destroy_each_other_are_refused():
    # vLLM does not choose this layout for layers of different shapes: a block of one group would lie
    # on several blocks of another.
    layers = alternate(Attention(2, 64), Attention(4, 32, window=24))
    Engine("prefill", layers, T(layout="LBHNC"), forced=True)
    with pytest.raises(kvferry.ManifestError) as caught:
        Engine("prefill", layers, T(layout="LHBNC"), forced=True)
    assert caught.value.kind == "unsound_overlay"


def draw_side(draw):
    return Topology(
        tp=draw.choice([1, 1, 2, 2, 3, 4, 6]),
        pp=draw.choice([1, 1, 1, 2, 3]),
        block=draw.choice([16, 32, 48, 64, 80]),
        kernel=draw.choice([None, None, 16, 32]),
        layout=draw.choice(LAYOUTS),
        conv=draw.choice(["SD", "DS"]),
        spec=draw.choice([0, 0, 1, 3]),
        blocks=draw.choice([24, 40, 61]),
        cpu=draw.random() < 0.15,
    )


@pytest.mark.parametrize("model", MODELS)
def test_random_pairs(model):
    draw = random.Random(model)
    done = 0
    for _ in range(2000):
        sides = [draw_side(draw), draw_side(draw)]
        sides = [
            replace(s, layout="LBHNC", kernel=None, block=max(32, s.block // 32 * 32)) if s.cpu else s
            for s in sides
        ]
        try:
            source, target = engine("prefill", model, sides[0]), engine("decode", model, sides[1])
        except Cannot:
            continue
        sizes = [target.block_tokens(group) for group in range(len(target.groups))]
        limit = min(200, 6 * min([size for size in sizes if size] or [64]))
        tokens = draw.randint(0, limit)
        cached = [
            draw.randint(0, tokens // size) * size if size else draw.choice([0, tokens])
            for size in sizes
        ]
        transfer(source, target, tokens, draw, cached)
        done += 1
        if done == 12:
            return
    raise AssertionError(f"vLLM ran only {done} of the pairs")
