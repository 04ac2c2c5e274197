"""Models whose last layers share caches, as vLLM runs Gemma 3n and 4: its own models keep nothing for these layers,
and its back end for models of transformers keeps the same numbers once more. Every byte, on pools that vLLM lays
out."""

import random

import kvferry
import pytest
from kept import Attention
from kept import Topology as T
from moving import transfer
from pools import Engine

TYPES = ["sliding_attention", "full_attention"] * 3
LAYERS = [Attention(4, window=24) if it.startswith("sliding") else Attention(4) for it in TYPES]
NAMES = [f"model.layers.{number}.self_attn.attn" for number in range(6)]
#: Whose numbers the last two layers look at.
MAKERS = {NAMES[4]: NAMES[2], NAMES[5]: NAMES[3]}


def engine(name, shares, side, shared=2):
    kept = 6 - shared if shares else 6
    told = {"layer_types": TYPES, "num_kv_shared_layers": shared}
    return Engine(name, LAYERS[:kept], side, NAMES[:kept], told=told)


@pytest.mark.parametrize(
    "p, d",
    [
        (T(), T()),
        (T(tp=2), T()),
        (T(), T(tp=2, block=32)),
        (T(tp=4, layout="LBNHC"), T(tp=2, layout="BLHNC")),
        (T(hma=False), T()),
        (T(), T(hma=False)),
        (T(cpu=True, block=32), T(tp=2)),
    ],
)
@pytest.mark.parametrize("p_shares", [True, False])
@pytest.mark.parametrize("d_shares", [True, False])
def test_every_byte_comes(p, d, p_shares, d_shares):
    source, target = engine("prefill", p_shares, p), engine("decode", d_shares, d)
    for tokens in (5, 33, 90):
        transfer(source, target, tokens, random.Random(tokens), makers=MAKERS)


def test_what_shares_has_the_name_of_what_it_shares():
    states = {
        (piece["state"], piece["view"]["offset"])
        for group in engine("decode", False, T()).ranks[0].manifest.to_dict()["groups"]
        for piece in group["pieces"]
    }
    assert len(states) == 12
    assert sorted({state for state, _ in states}) == [
        f"layers.{layer}/{side}" for layer in range(4) for side in "kv"
    ]


@pytest.mark.parametrize("shared", [0, 6, 7])
def test_a_model_without_shared_layers_keeps_its_own(shared):
    """A number that leaves no layer to share from means nothing."""
    manifest = engine("decode", False, T(), shared).ranks[0].manifest.to_dict()
    states = {piece["state"] for group in manifest["groups"] for piece in group["pieces"]}
    assert states == {f"layers.{layer}/{side}" for layer in range(6) for side in "kv"}


@pytest.mark.parametrize("p, d", [(2, 0), (0, 2), (2, 4)])
@pytest.mark.parametrize("d_shares", [True, False])
def test_other_numbers_of_shared_layers_are_refused_with_both(p, d, d_shares):
    """Even where P keeps all that D wants: a layer that shares on one side alone makes another model of it."""
    source, target = engine("prefill", True, T(), p), engine("decode", d_shares, T(), d)
    told = f"'num_kv_shared_layers' differs: '{p}' on the source .*'{d}' on the destination.*same model and settings"
    with pytest.raises(kvferry.Incompatible, match=told) as caught:
        transfer(source, target, 40, random.Random(0), makers=MAKERS)
    assert (caught.value.kind, caught.value.fact) == ("identity", "num_kv_shared_layers")
