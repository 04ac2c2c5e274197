"""Real models: what `kvferry.vllm` makes of vLLM's objects, and what kvferry's own rules say.

`kvferry-models` describes a model from its `config.json` alone; `kvferry.vllm` from the specs, tensors
and configuration objects of vLLM. For every preset and many topologies the two must be one: the same
states by the same names, of the same kinds, in the same boxes, at the same bytes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import kvferry.vllm
import msgspec
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))
import reference  # noqa: E402
from vllm.v1.worker.utils import allocate_kv_cache  # noqa: E402

PRESETS = sorted(p.stem for p in reference.PRESETS.glob("*.json") if p.stem != "SOURCES")
TOPOLOGIES = [
    "tp=1",
    "tp=2",
    "tp=8",
    "tp=32",
    "tp=2,pp=2",
    "tp=2,block=128,kernel=64",
    "tp=2,layout=BLNHC",
    "tp=4,conv=ds,spec=3",
    "tp=2,conv=sd,spec=1",
    "tp=16,dcp=2,interleave=16",
    "tp=2,pcp=2",
    "pcp=4,dcp=4",
]


@pytest.fixture
def objects(monkeypatch):
    """What vLLM's functions were given and answered, while `reference` lets them work."""
    seen = {"kernels": []}
    configs, kernels = reference.get_kv_cache_configs, reference.prepare_kernel_block_sizes

    def get_kv_cache_configs(vllm_config, *args):
        seen["vllm"] = vllm_config
        seen["configs"] = configs(vllm_config, *args)
        seen["kernels"].clear()
        return seen["configs"]

    def prepare_kernel_block_sizes(*args):
        seen["kernels"].append(kernels(*args))
        return seen["kernels"][-1]

    monkeypatch.setattr(reference, "get_kv_cache_configs", get_kv_cache_configs)
    monkeypatch.setattr(reference, "prepare_kernel_block_sizes", prepare_kernel_block_sizes)
    return seen


def ask_rules(name, topologies):
    program = os.environ.get("KVFERRY_MANIFESTS")
    assert program, "KVFERRY_MANIFESTS must name the example program that prints manifests"
    cases = [{"model": name, "draft": None, "topology": topology} for topology in topologies]
    text = "\n".join(json.dumps(case) for case in cases)
    run = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    return [msgspec.json.decode(line) for line in run.stdout.splitlines()]


def describe(objects, topology, layers):
    """The manifests of all ranks, from vLLM's objects; tensors without memory behind them."""
    asked = reference.parse(topology)
    layout = objects["vllm"].cache_config.get_resolved_kv_cache_layout()
    manifests = []
    for stage, (config, kernels) in enumerate(zip(objects["configs"], objects["kernels"])):
        tensors = allocate_kv_cache(config, torch.device("meta"), layout, kernels)
        ranks = [(pcp, tp) for pcp in range(asked.get("pcp", 1)) for tp in range(asked.get("tp", 1))]
        for pcp, rank in ranks:
            manifest = kvferry.vllm.manifest(
                objects["vllm"],
                config,
                tensors,
                tp_rank=rank,
                pp_rank=stage,
                pcp_rank=pcp,
                engine="engine",
                backends={layer: layers[layer]["backend"].get_name() for layer in tensors},
            )
            manifests.append(manifest.to_dict())
    return manifests


def facts(manifest):
    """A manifest without names of groups, order of kinds, and addresses."""
    groups = []
    for group in manifest["groups"]:
        pieces = {}
        for piece in group["pieces"]:
            view = dict(piece["view"])
            lengths = [end - start for start, end in piece["bounds"]]
            # The stride of a single index says nothing.
            view["axes"] = [stride for stride, n in zip(view["axes"], lengths) if n > 1]
            kind = manifest["kinds"][piece["kind"]]
            pieces[piece["state"]] = (kind, piece["bounds"], piece["phase"], piece["need"], view)
        facts = {key: group[key] for key in ("blocks", "null_block", "tokens_per_block")}
        if pieces:
            facts["window"] = group["window"]
        groups.append((facts, pieces, group["scratch"]))
    return groups, manifest["rank"], manifest["label"], [r["bytes"] for r in manifest["regions"]]


@pytest.mark.parametrize("name", [name for name in PRESETS if not reference.is_gone(name)])
def test_presets_are_described_alike(name, objects):
    compared = 0
    for topology, ours in zip(TOPOLOGIES, ask_rules(name, TOPOLOGIES)):
        if "error" in ours:
            continue
        layers = reference.answer(name, None, topology)["layers"]
        theirs = describe(objects, topology, layers)
        assert len(theirs) == len(ours["manifests"])
        for mine, other in zip(ours["manifests"], theirs):
            expected, found = facts(mine["manifest"]), facts(other)
            for (_, pieces, _), (_, others, _) in zip(expected[0], found[0]):
                for state in pieces:
                    assert others.get(state) == pieces[state], (topology, state)
            assert found == expected, topology
        compared += 1
    assert compared >= 2, "kvferry's rules refuse nearly all topologies"
