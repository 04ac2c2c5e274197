"""Compares kvferry's manifests with what the installed vLLM computes for the same inputs.

For every preset and a spread of topologies: the same groups with the same layers in the same order, the
same block and kernel block sizes, the same page sizes, and every state of every rank at the same bytes
with the same strides. Where kvferry says that the engine cannot run a case, vLLM must refuse it too, and
the other way round.
"""

import json
import os
import subprocess
from pathlib import Path

import modules
import msgspec
import pytest
import reference

ROOT = Path(__file__).parents[2]
PRESETS = sorted(p.stem for p in reference.PRESETS.glob("*.json") if p.stem != "SOURCES")

TOPOLOGIES = [
    *(f"tp={tp}" for tp in (1, 2, 3, 4, 6, 8, 16, 32)),
    *(f"tp={tp},pp={pp}" for tp, pp in ((1, 2), (2, 2), (2, 3), (4, 4), (1, 5))),
    *(f"tp=2,block={block}" for block in (16, 32, 64, 128, 400)),
    *(f"tp=2,block={block},kernel={kernel}" for block, kernel in ((128, 64), (64, 16), (48, 16))),
    *(f"tp={tp},kernel={kernel}" for tp in (1, 4) for kernel in (16, 32, 64, 128)),
    *(f"tp=2,layout={layout}" for layout in ("LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")),
    *(f"tp=2,pp=2,layout={layout}" for layout in ("LBNHC", "BLHNC", "BHLNC")),
    *(f"tp=2,block=64,kernel=64,layout={layout}" for layout in ("LHBNC", "BLHNC", "BLNHC")),
    *(f"tp={tp},conv=ds,spec={spec}" for tp, spec in ((1, 0), (2, 3), (4, 1))),
    *(f"tp={tp},conv=sd,spec={spec}" for tp, spec in ((2, 2), (8, 4))),
    "tp=2,blocks=18525",
    "tp=2,hma=off",
    "tp=2,hma=off,caching=off,layout=BLHNC",
    "tp=1,caching=off",
    "tp=8,dcp=2",
    "tp=16,dcp=2,interleave=16",
    "tp=32,dcp=4,interleave=64,block=64",
    "pcp=2",
    "tp=2,pcp=2,pp=2",
    "tp=4,pcp=2,dcp=8,interleave=4",
    "pcp=4,dcp=4",
    "tp=4,dcp=3",
]
CONFIGS = ROOT / "tests/vllm/configs"
DRAFTS = [
    # One layer more in one bucket than in another: padded instead of split.
    ("gpt-oss-20b", str(CONFIGS / "one-layer-draft.json")),
    ("falcon-h1-7b", str(CONFIGS / "falcon-draft.json")),
    # Latents beside a sliding window, whose pages cannot be made equal.
    (str(CONFIGS / "tiny-sparse.json"), str(CONFIGS / "sliding-draft.json")),
    ("kimi-k2.5", str(CONFIGS / "sliding-draft.json")),
    ("kimi-linear-48b-a3b", str(CONFIGS / "sliding-draft.json")),
    ("kimi-k2.5", "kimi-k2.5-eagle3"),
    ("kimi-k2.5", "kimi-k2.5-eagle3-mla"),
    ("kimi-k3", "kimi-k3-eagle3-mla"),
    ("deepseek-v3", "mtp"),
    ("deepseek-v3.2", "mtp"),
    ("glm-5", "mtp"),
    ("qwen3.5-27b", "mtp"),
    ("nemotron-3-super-120b-a12b", "mtp"),
    ("deepseek-v4-flash", "mtp"),
]
CASES = [(name, None) for name in PRESETS] + DRAFTS


def ask_kvferry(name, draft, topologies):
    """kvferry's answers, from its example program."""
    program = os.environ.get("KVFERRY_MANIFESTS")
    assert program, "KVFERRY_MANIFESTS must name the example program that prints manifests"
    cases = [{"model": name, "draft": draft, "topology": topology} for topology in topologies]
    text = "\n".join(json.dumps(case) for case in cases)
    run = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert len(lines) == len(cases)
    return [msgspec.json.decode(line) for line in lines]


compared = {"equal": 0, "refused": 0}


#: Models whose kernels take other blocks than most.
OWN = {
    "deepseek-v4": ["block=256", "tp=8,block=512", "kernel=256", "pp=2", "pp=3", "tp=4,block=256,layout=BLNHC"],
    "deepseek-v4.1": ["block=128", "block=64", "kernel=128", "pp=2", "tp=8,pp=2", "tp=4,spec=6", "tp=4,spec=12"],
}


@pytest.mark.parametrize(("name", "draft"), CASES, ids=lambda value: Path(str(value)).stem)
def test_manifests_equal_vllm(name, draft):
    own = [it for start, more in OWN.items() if name.startswith(f"{start}-") for it in more]
    for what, count in judge(name, draft, TOPOLOGIES + own).items():
        compared[what] += count


def judge(name, draft, topologies):
    """Fails where kvferry and vLLM say different things. How many topologies were equal, and how many both
    refuse."""
    problems, counted = [], {"equal": 0, "refused": 0}
    for topology, ours in zip(topologies, ask_kvferry(name, draft, topologies)):
        try:
            theirs = reference.answer(name, draft, topology)
        except REFUSALS as error:
            counted["refused"] += 1
            if "cannot run" not in ours.get("error", ""):
                problems.append(f"{topology}: vLLM refuses ({error!r}), kvferry says {str(ours)[:80]}")
            continue
        if "error" in ours:
            problems.append(f"{topology}: vLLM does not refuse, kvferry says {ours['error']}")
            continue
        try:
            compare(topology, ours, theirs)
            counted["equal"] += 1
        except AssertionError as error:
            problems.append(f"{topology}: {error}")
    if problems:
        pytest.fail(f"{len(problems)} topologies differ:\n" + "\n".join(problems[:5]), pytrace=False)
    return counted


REFUSALS = (reference.Refused, AssertionError, ValueError, NotImplementedError, ZeroDivisionError)


def test_enough_was_compared():
    assert compared["equal"] > 1200, compared
    assert compared["refused"] > 100, compared
    print(compared)


def compare(topology, ours, theirs):
    asked = reference.parse(topology)
    tp = asked.get("tp", 1)
    assert ours["stages"] == [0] + [end for _, end in theirs["bounds"]], topology
    pcp = asked.get("pcp", 1)
    assert len(ours["manifests"]) == tp * pcp * len(theirs["stages"])
    # The states of every layer, in the order of registration, which both sides list by group.
    for stage, answer in enumerate(theirs["stages"]):
        start, end = theirs["bounds"][stage]
        assert len(ours["groups"]) == len(answer["groups"]), topology
        states = {}
        for mine, group in zip(ours["groups"], answer["groups"]):
            here = [
                (layer, page)
                for layer, page in zip(mine["layers"], mine["pages"])
                if start <= layer["layer"] < end
            ]
            layers = [theirs["layers"][name] for name in group["names"]]
            assert [(l["layer"], l["sort"]) for l, _ in here] == [
                (l["index"], l["sort"]) for l in layers
            ], topology
            assert [page for _, page in here] == group["pages"], topology
            if mine["block"] is not None:
                assert (mine["block"], mine["kernel"]) == (group["block"], group["kernel"]), topology
            for (layer, _), name in zip(here, group["names"]):
                states[name] = layer["states"]
        for shared in range(pcp):
            for rank in range(tp):
                number = (stage * pcp + shared) * tp + rank
                manifest = ours["manifests"][number]["manifest"]
                assert manifest["rank"] == number, topology
                check_rank(topology, manifest, answer, theirs["layers"], states, rank, tp, asked)
                check_turns(topology, manifest, asked, rank * pcp + shared)


def check_turns(topology, manifest, asked, place):
    """Ranks take turns at tokens as vLLM's groups of ranks do: those of a prefill come first."""
    dcp, turn = asked.get("dcp", 1), asked.get("interleave", 1)
    own = place % dcp * turn
    shared = {"modulus": dcp * turn, "held": [own, own + turn]}
    everything = {"modulus": 1, "held": [0, 1]}
    for group in manifest["groups"]:
        grows = group["tokens_per_block"] is not None
        for piece in group["pieces"]:
            assert piece["phase"] == (shared if grows and dcp > 1 else everything), topology


def check_rank(topology, manifest, answer, layers, states, rank, tp, asked):
    assert manifest["regions"][0]["bytes"] == answer["bytes"], topology
    pieces = {}
    for group in manifest["groups"]:
        assert group["blocks"] == answer["blocks"]
        assert group["null_block"] == 0
        for piece in group["pieces"]:
            pieces[piece["state"]] = (piece, manifest["kinds"][piece["kind"]], group)
    if "kv" in asked:
        # Records of their own stay as they are.
        states = {
            name: names if "role" in layers[name] else quantised(names, pieces)
            for name, names in states.items()
        }
    assert set(pieces) == {state for names in states.values() for state in names}
    for name, views in answer["views"].items():
        layer = layers[name]
        mine = [pieces[state] for state in states[name]]
        where = (topology, rank, states[name])
        if "role" in layer:
            check_rows(where, layer, mine, views[0], answer, name in answer["sliding"])
        elif layer["sort"] in ("attention", "sliding", "mla") and "kv" in asked:
            check_quantised(where, mine, views[0], answer["blocks"])
        elif layer["sort"] in modules.ATTENTION:
            blocks, keeps = answer["blocks"], name in answer["sliding"]
            turns = asked.get("dcp", 1)
            check_attention(where, layer, mine, views[0], rank, tp, blocks, keeps, turns)
        else:
            check_states(where, layer, mine, views, rank, tp, asked)


def check_attention(where, layer, mine, view, rank, tp, blocks, keeps_window, turns):
    _, heads, tokens, _ = view["shape"]
    block, head, token, number = view["strides"]
    ratio = view["shape"][0] // blocks
    offset = view["offset"]
    for piece, kind, group in mine:
        placed = piece["view"]
        assert placed["offset"] == offset, where
        assert placed["block"] == block * ratio, where
        if layer["sort"] != "indexer":
            assert placed["entry"] == token, where
        if ratio > 1:
            assert placed["kernel"] == {"entries": tokens, "stride": block}, where
        else:
            assert placed["kernel"] is None, where
        assert group["tokens_per_block"] == tokens * ratio * turns, where
        bounds = piece["bounds"]
        if layer["sort"] in ("attention", "sliding"):
            assert placed["axes"] == [head, number], where
            # KV heads go to ranks as QKVParallelLinear loads them.
            total = layer["heads"]
            first = rank // (tp // total) if tp >= total else rank * (total // tp)
            assert bounds[0] == [first, first + heads], where
            window = {"tokens": layer["window"] if keeps_window else None, "chunk": 1, "extra": 0}
            assert group["window"] == window, where
            # A layer that looks less far than its group keeps says so, unless blocks are used again.
            looks = {"tokens": layer["window"], "chunk": 1, "extra": 0}
            less = "caching=off" in where[0] and looks != window
            assert piece["need"] == (looks if less else None), where
        elif layer["sort"] == "mla":
            assert placed["axes"] == [number] and bounds == [[0, layer["size"]]], where
        else:
            # Not a record for each token, as the tensor's shape has it: vLLM's kernels keep all keys
            # of a kernel block, then all its scales.
            number = kind["format"]["bytes"]
            assert placed["axes"] == [number] and bounds[0][0] == 0, where
            assert placed["entry"] == bounds[0][1] * number, where
            offset += placed["entry"] * tokens
            continue
        size = kind["format"]["bytes"]
        for axis, (low, high) in enumerate(bounds):
            if axis == len(bounds) - 1:
                size *= high - low
        offset += size
    # Nothing of a token's content is left out.
    content = view["shape"][3] * view["size"] * (tokens if layer["sort"] == "indexer" else 1)
    assert offset - view["offset"] == content, where


#: Cache data types, for models with heads, latents and indexers, and latents with states beside them.
KV = ["fp8", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "nvfp4",
      "fp8_ds_mla", "nvfp4_ds_mla"]
SIDES = ["tp=1", "tp=2", "tp=8", "tp=2,pp=2", "tp=2,block=64,kernel=64", "tp=2,layout=BLHNC",
         "tp=2,layout=LBNHC"]
#: One model of each kind goes through all of them.
KEPT = ["llama-3.1-8b", "deepseek-v3.2", "kimi-linear-48b-a3b", "deepseek-v3", "deepseek-v4-flash", "deepseek-v4.1-flash",
        "gpt-oss-20b", "mamba2-2.7b", "mimo-v2-flash", "nemotron-h-8b-base-8k", "qwen3-next-80b-a3b"]


@pytest.mark.parametrize("name", PRESETS)
def test_quantised_pages_equal_vllm(name):
    sides, least = (SIDES, 5) if name in KEPT else (SIDES[:2], 1)
    assert judge(name, None, [f"{side},kv={kv}" for kv in KV for side in sides])["equal"] >= least


def quantised(names, pieces):
    """The states of a layer that are there instead of its keys and values, or its latents."""
    layer, _, first = names[0].rpartition("/")
    if first not in ("k", "latent"):
        return names
    instead = ("k", "k.scale", "v", "v.scale", "kv", "latent")
    return [f"{layer}/{state}" for state in instead if f"{layer}/{state}" in pieces]


def check_quantised(where, mine, view, blocks):
    """All pieces together are the page: what lies where inside is `test_presets`' to compare."""
    count, slots, tokens, content = view["shape"]
    ratio, total = count // blocks, 0
    for piece, kind, group in mine:
        assert piece["view"]["block"] == view["strides"][0] * ratio, where
        bytes_ = kind["format"]["bytes"]
        for low, high in piece["bounds"]:
            bytes_ *= high - low
        total += bytes_ * tokens
    assert mine[0][0]["view"]["offset"] == view["offset"], where
    assert total == slots * tokens * content * view["size"], where


def check_rows(where, layer, mine, view, answer, keeps_window):
    """Compressed and sliding latents, what is not compressed yet, and indexers: all records of a block,
    then all scales. A ring is one entry for a sequence."""
    blocks, _, entries, content = view["shape"]
    assert blocks == answer["blocks"], where
    offset, ring = view["offset"], layer["role"] == "ring"
    planes = (entries * content * view["size"],) if ring else layer["planes"]
    assert len(mine) == len(planes), where
    for (piece, kind, group), plane in zip(mine, planes):
        placed, rate = piece["view"], layer.get("rate", 1)
        assert placed["offset"] == offset, where
        assert placed["block"] == view["strides"][0] and placed["kernel"] is None, where
        held = [high - low for low, high in piece["bounds"]]
        bytes_ = kind["format"]["bytes"]
        for length in held:
            bytes_ *= length
        assert bytes_ == plane, where
        window = {"tokens": layer["window"] if keeps_window else None, "chunk": 1, "extra": 0}
        if ring:
            assert held == [1, entries, content * view["size"] // 4], where
            assert group["tokens_per_block"] is None and kind["law"]["open"] == 1, where
            return
        assert placed["entry"] == plane, where
        assert group["tokens_per_block"] == entries * rate, where
        assert kind["law"] == {"entries": 1, "tokens": rate, "open": 0}, where
        if layer["role"] in ("window", "open"):
            assert group["window"] == window, where
        offset += plane * entries
    # Nothing of an entry's content is left out.
    assert offset - view["offset"] == entries * content * view["size"], where


def check_states(where, layer, mine, views, rank, tp, asked):
    position = 0
    for view in views:
        # The pieces of this tensor: sections of a convolution, or one whole state.
        conv = len(view["shape"]) == 3 and not (layer["sort"] == "mamba1" and view is views[1])
        if conv:
            ds = asked.get("conv", "sd") == "ds"
            channels, columns = view["shape"][1:] if ds else view["shape"][:0:-1]
            channel, column = view["strides"][1:] if ds else view["strides"][:0:-1]
            offset, seen = view["offset"], 0
            while seen < channels:
                piece, kind, group = mine[position]
                position += 1
                placed, bounds = piece["view"], piece["bounds"]
                count = bounds[0][1] - bounds[0][0]
                assert placed["offset"] == offset, where
                assert placed["block"] == view["strides"][0], where
                assert placed["axes"] == [channel, column], where
                spare = asked.get("spec", 0) if layer["sort"] != "mamba1" else 0
                assert bounds[1] == [0, columns - spare], where
                assert group["tokens_per_block"] is None
                offset += count * channel
                seen += count
            assert seen == channels, where
        else:
            piece, kind, group = mine[position]
            position += 1
            placed, bounds = piece["view"], piece["bounds"]
            assert placed["offset"] == view["offset"], where
            assert placed["block"] == view["strides"][0], where
            assert placed["axes"] == view["strides"][1:], where
            assert [high - low for low, high in bounds] == view["shape"][1:], where
            first = bounds[0][1] - bounds[0][0]
            assert bounds[0][0] == rank * first, where
            assert kind["format"]["bytes"] == view["size"], where
    assert position == len(mine), where


def test_sections_equal_vllms_split():
    """The sections of a convolution are those that vLLM's own connector derives from the spec."""
    from types import SimpleNamespace

    from vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils import (
        derive_mamba_conv_split,
    )

    os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"
    for name in ("nemotron-h-8b-base-8k", "qwen3-next-80b-a3b", "kimi-linear-48b-a3b",
                 "jamba-1.5-mini", "zamba2-7b"):
        for tp in (1, 2):
            topology = f"tp={tp},conv=ds"
            theirs = reference.answer(name, None, topology)
            ours = ask_kvferry(name, None, [topology])[0]["manifests"][0]["manifest"]
            states = theirs["stages"][0]["views"]
            layer = next(n for n, l in theirs["layers"].items() if l["sort"] not in modules.ATTENTION)
            kind = theirs["layers"][layer]["sort"]
            shapes = [view["shape"][1:] for view in states[layer]]
            sizes = {2: reference.torch.bfloat16, 4: reference.torch.float32}
            spec = SimpleNamespace(
                shapes=shapes,
                dtypes=[sizes[view["size"]] for view in states[layer]],
                mamba_type=reference.MAMBA_TYPES[kind],
            )
            split = derive_mamba_conv_split(spec, tp)
            index = theirs["layers"][layer]["index"]
            widths = [
                piece["bounds"][0][1] - piece["bounds"][0][0]
                for group in ours["groups"]
                for piece in group["pieces"]
                if piece["state"].startswith(f"layers.{index}/conv")
            ]
            assert tuple(widths) == tuple(split.local_proj_dims), name
