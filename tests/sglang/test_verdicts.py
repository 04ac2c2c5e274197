"""What `kvferry plan --engine sglang` says of a pair, beside SGLang's own functions: who is asked for what, which heads and which
channels of a convolution land where, and what is refused."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.configs.mamba_utils import KimiLinearStateShape, Mamba2StateShape
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.common.staging_buffer import compute_head_slice_params
from sglang.srt.disaggregation.utils import compute_mamba_state_slice_blocks

PRESETS = Path(__file__).parents[2] / "crates" / "kvferry-models" / "presets"
PAIRS = [(1, 1), (1, 2), (2, 1), (4, 2), (2, 8), (8, 2), (3, 2), (2, 3), (3, 6), (6, 3)]
MODELS = ["llama-3.1-8b", "qwen3-32b", "nemotron-h-8b-base-8k", "falcon-h1-0.5b", "granite-4.0-h-tiny", "qwen3-next-80b-a3b",
          "qwen3.5-27b", "kimi-linear-48b-a3b", "lfm2-1.2b", "deepseek-v3"]


def said(model, prefill, decode):
    """The command's answer; None where the engine does not run with so many ranks."""
    words = ["plan", "--engine", "sglang", "--model", model, "--prefill", prefill, "--decode", decode, "--tokens", "64", "--json"]
    made = subprocess.run([os.environ["KVFERRY_COMMAND"], *words], capture_output=True, text=True)
    if made.returncode == 0:
        return json.loads(made.stdout)
    assert "do not divide" in made.stderr or "neither divide" in made.stderr, made.stderr
    return None


class Decode:
    """As much of SGLang's manager on the decode side as says whom a rank asks."""

    def __init__(self, ranks, rank, stages=1, page=1):
        self.attn_tp_size, self.kv_args = ranks, SimpleNamespace(engine_rank=rank, page_size=page, state_types=())
        self.attn_cp_size, self.attn_cp_rank, self.pp_size, self.pp_rank, self.dcp_size = 1, 0, stages, 0, 1
        self.is_mla_backend = self.is_hybrid_mla_backend = self.enable_all_cp_ranks_for_transfer = False
        self.kv_cache_dtype_str, self.kv_layout, self.dsv41_spec_layout, self.prefill_info_table = "auto", None, None, {}

    _resolve_rank_mapping = conn.CommonKVManager._resolve_rank_mapping
    try_ensure_parallel_info = conn.CommonKVManager.try_ensure_parallel_info


def info(ranks, stages=1, page=1):
    return {"attn_tp_size": ranks, "attn_cp_size": 1, "dp_size": 1, "pp_size": stages, "page_size": page, "kv_cache_dtype": "auto",
            "follow_bootstrap_room": True}


def sources(p, d, rank):
    """The prefill ranks that a decode rank asks."""
    asked = conn.PrefillServerInfo(**info(p))
    Decode(d, rank)._resolve_rank_mapping(asked)
    return asked.target_tp_ranks


def held(sizes, ranks, rank):
    """Which numbers of several sections, one after the other, a rank holds; of one that does not divide, all."""
    found, first = [], 0
    for size in sizes:
        each = size // ranks if size % ranks == 0 else size
        at = first + (rank * each if each != size or ranks == 1 else 0)
        found += range(at, at + each)
        first += size
    return found


def heads_land(heads, p, d):
    """Whether each decode rank gets the heads that are its own."""
    def of(ranks, rank):
        first = rank * heads // ranks
        return list(range(first, first + max(1, heads // ranks)))

    for rank in range(d):
        landed = [None] * len(of(d, rank))
        for source in sources(p, d, rank):
            begin, count, at, _ = compute_head_slice_params(p, d, source, rank, heads)
            landed[at : at + count] = of(p, source)[begin : begin + count]
        if landed != of(d, rank):
            return False
    return True


def channels_land(sizes, groups, p, d):
    """The same of a convolution's channels."""
    for rank in range(d):
        own = held(sizes, d, rank)
        landed = [None] * len(own)
        for source in sources(p, d, rank):
            there = held(sizes, p, source)
            if p == d:
                landed = there
                continue
            for begin, at, count in compute_mamba_state_slice_blocks(len(there), len(own), p, d, rank, source, groups):
                landed[at : at + count] = there[begin : begin + count]
        if landed != own:
            return False
    return True


def convolution(config):
    """The sections of a model's convolution, and what SGLang knows of them."""
    family = config["model_type"]
    if family in ("nemotron_h", "falcon_h1", "granitemoehybrid"):
        heads = config.get("mamba_num_heads") or config["mamba_n_heads"]
        dim = config.get("mamba_head_dim") or config["mamba_d_head"]
        groups = config.get("n_groups") or config["mamba_n_groups"]
        n = config.get("ssm_state_size") or config["mamba_d_state"]
        inner = heads * dim
        shape = Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=inner, n_groups=groups, num_heads=heads, head_dim=dim, state_size=n, conv_kernel=4
        )
        return [inner, groups * n, groups * n], shape.conv_shard_groups
    if "linear_num_key_heads" in config:
        key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        # As its own configuration of these models says it.
        return [key, key, value], [key, key, value]
    if family == "kimi_linear":
        linear = config["linear_attn_config"]
        shape = KimiLinearStateShape.create(tp_world_size=1, num_heads=linear["num_heads"], head_dim=linear["head_dim"])
        return [linear["num_heads"] * linear["head_dim"]] * 3, shape.conv_shard_groups
    return ([config["hidden_size"]], None) if family == "lfm2" else None


@pytest.mark.parametrize("name", MODELS)
def test_what_is_said_of_a_pair_is_what_its_functions_do(name):
    config = json.loads((PRESETS / f"{name}.json").read_text())
    config = config.get("text_config", config)
    latent, seen = "kv_lora_rank" in config, set()
    for p, d in PAIRS:
        answer = said(name, f"tp={p}", f"tp={d}")
        if answer is None:
            continue
        assert answer["works"], (p, d)
        outcome = answer["engine"]["outcome"]
        asked = [source for rank in range(d) for source in sources(p, d, rank)]
        if any(source >= p for source in asked):
            expected = "refuses"
        else:
            right = latent or heads_land(config["num_key_value_heads"], p, d)
            sections = convolution(config)
            right = right and (sections is None or channels_land(*sections, p, d))
            expected = "works" if right else "silently wrong"
        assert outcome == expected, (p, d, answer["engine"])
        seen.add(outcome)
    assert seen >= ({"works", "silently wrong"} if name[:6] in ("nemotr", "falcon", "granit") else {"works"})


def test_what_it_refuses_its_functions_refuse(monkeypatch):
    for prefill, decode, ours, theirs in [
        ("block=16", "block=1", Decode(1, 0, page=1), info(1, page=16)),
        ("pp=4", "pp=2", Decode(1, 0, stages=2), info(1, stages=4)),
    ]:
        assert said("llama-3.1-8b", prefill, decode)["engine"]["outcome"] == "refuses"
        answer = SimpleNamespace(status_code=200, json=lambda theirs=theirs: theirs)
        monkeypatch.setattr(conn.requests, "get", lambda *_, **__: answer)
        with pytest.raises((RuntimeError, AssertionError)):
            ours.try_ensure_parallel_info("127.0.0.1:1")
    assert said("llama-3.1-8b", "pp=4", "tp=1")["engine"]["outcome"] == "works"
