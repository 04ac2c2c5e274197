"""DeepSeek-V4.1's pages by the kernels of two versions of vLLM themselves, which Triton's interpreter carries out: each
is described as its kernel answers, and the plan makes a page of one version out of the other's, byte by byte."""

from stand_in import Backend  # noqa: F401  first: it sets the environment up

# isort: split
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvferry
import pools
import pytest
import torch
from kept import Topology
from kept_more import Ring, Rows, v4_window, v41_latent
from kvferry.vllm import versions
from kvferry.vllm.refusal import Unsupported
from test_kinds import move, v4, v4_indexer
from vllm.v1.attention.backend import MultipleOf

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

# isort: split
from interpreted import indexer_store, ring_store, rope_quant_insert, running

OLD, NEW = None, "0.33.0"
SIDE = Topology(block=16, layout="BLHNC", blocks=16)
ANGLES = torch.linspace(0, 40, 512 * 32).view(512, 32)
TURNS = torch.cat([ANGLES.cos(), ANGLES.sin()], dim=-1)


@dataclass(frozen=True, kw_only=True)
class Written(Rows):
    """Latents that vLLM's own kernel writes."""

    insert: Any
    asked: bool = True
    called = "rope_quant_insert"

    def states(self, seed, tokens, side):
        numbers = torch.randn(tokens // self.ratio, 512, generator=torch.Generator().manual_seed(seed))
        return numbers.to(torch.bfloat16)

    def write(self, side, rank, tensor, table, states, first, last):
        if states is None:
            return super().write(side, rank, tensor, table, states, first, last)
        entries = torch.arange(first // self.ratio, last // self.ratio)
        size = tensor.shape[2]
        assert tensor.shape[0] == side.blocks
        slots = torch.tensor(table)[entries // size] * size + entries % size
        self.store(states[entries], entries, tensor.squeeze(1), slots)

    def store(self, states, entries, cache, slots):
        self.insert(states, entries, TURNS, cache, slots, 1)

    @property
    def module(self):
        return running(self.backend, **{self.called: self.insert}) if self.asked else object()


@dataclass(frozen=True, kw_only=True)
class Keys(Written):
    """An indexer's keys."""

    called = "indexer_k_norm_rope_store"

    def states(self, seed, tokens, side):
        return super().states(seed, tokens, side)[:, :128].contiguous()

    def store(self, states, entries, cache, slots):
        self.insert(states, entries, TURNS, torch.ones(128), 1e-6, cache, slots, 1, False)


def engine(name, version, cache, monkeypatch, edit=lambda text: text):
    """An engine whose latents are compressed, and of a window, by the kernel of a version."""
    monkeypatch.setattr(versions, "interleaves_v41_records", lambda: version == NEW)
    monkeypatch.setattr(versions, "build", lambda: version or "0.32.0")
    insert = rope_quant_insert(version, edit=edit)
    kept = v41_latent(2, cache)
    window = v4_window(cache, content=528, scales=16, window=48, block=16)
    # What writes a window is compiled: it does as the kernel of its version, and cannot be asked here.
    latents = [
        Written(it.make, it.backend, it.ratio, it.scales, it.window, insert=by, asked=it is kept)
        for it, by in ((kept, insert), (window, rope_quant_insert(version)))
    ]
    return v4(name, SIDE, (2,), {2: {"attn.swa_cache": latents[1], "attn": latents[0]}})


def written(engine):
    """By state: the digest of what was written."""
    manifest = engine.ranks[0].manifest.to_dict()
    pieces = [piece for group in manifest["groups"] for piece in group["pieces"]]
    found = {piece["state"]: manifest.get("writers", {}).get(str(piece["kind"])) for piece in pieces}
    assert all(it is None or it["bytes"] for it in found.values())
    return {state: it["bytes"] for state, it in found.items() if it is not None}


@pytest.mark.parametrize(
    "p, d, cache",
    [(OLD, NEW, "fp8_ds_mla"), (NEW, OLD, "fp8_ds_mla"), (NEW, NEW, "fp8_ds_mla"), (OLD, NEW, "nvfp4_ds_mla")],
)
def test_a_page_of_one_version_becomes_the_other_s(p, d, cache, monkeypatch):
    source, target = engine("prefill", p, cache, monkeypatch), engine("decode", d, cache, monkeypatch)
    assert len(written(source)) == 2 and written(source) == written(target)
    # Whole blocks, and one that is filled in part.
    move(source, target, 11)


def changed(before, after):
    def edit(text):
        assert before in text or "_rope_quant_insert_mxfp8_kernel" not in text
        return text.replace(before, after)

    return edit


class TestAWriterThatChanges:
    """0.33's own kernel, and the same with a line of it changed."""

    RECORD = "    values = page + (slot % CACHE_BLOCK) * 528\n    scales = values + 512\n"

    def pair(self, monkeypatch, before, after):
        source = engine("prefill", NEW, "fp8_ds_mla", monkeypatch)
        return source, engine("decode", NEW, "fp8_ds_mla", monkeypatch, changed(before, after))

    def test_a_renamed_variable_is_the_same(self, monkeypatch):
        source, target = self.pair(monkeypatch, "encoded", "what_is_stored")
        assert written(source) == written(target)
        kvferry.compile(target.ranks[0].manifest, [source.ranks[0].manifest])

    def test_what_only_lies_elsewhere_is_converted(self, monkeypatch):
        other = self.RECORD.replace("528\n", "528 + 16\n").replace("values + 512", "values - 16")
        source, target = self.pair(monkeypatch, self.RECORD, other)
        assert written(source) == written(target)
        move(source, target, 9)

    def test_another_order_inside_a_record_is_refused_with_both_writers(self, monkeypatch):
        store = "tl.store(values + d, tl.reshape(fp8"
        source, target = self.pair(monkeypatch, store, store.replace("+ d", "+ (d ^ 1)"))
        with pytest.raises(kvferry.Incompatible, match="both sides call its elements fp8_ds_mla 528") as caught:
            kvferry.compile(target.ranks[0].manifest, [source.ranks[0].manifest])
        assert caught.value.kind == "writer" and caught.value.state.endswith("/latent")
        for said in (caught.value.source_value, caught.value.destination_value):
            assert said.startswith("rope_quant_insert of vLLM 0.33.0, FLASHMLA_MEGA_ATTN_DSV41 on ")
        assert caught.value.source_value != caught.value.destination_value

    def test_records_that_lie_over_each_other_are_refused(self, monkeypatch):
        with pytest.raises(Unsupported, match="where the kernel of FLASHMLA_MEGA_ATTN_DSV41 keeps 'latent"):
            self.pair(monkeypatch, self.RECORD, self.RECORD.replace("* 528", "* 500"))


def indexed(name, version, exponents, monkeypatch):
    monkeypatch.setattr(versions, "has_float_scales", lambda: not exponents)
    monkeypatch.setattr(versions, "build", lambda: version or "0.32.0")
    it = v4_indexer()
    store = indexer_store(version, exponents=exponents)
    keys = Keys(it.make, "DEEPSEEK_V41_INDEXER", 4, 4, indexes=True, insert=store)
    return v4(name, SIDE, (4,), {4: {"k_cache": keys}})


@pytest.mark.parametrize(
    "p, d", [((OLD, False), (NEW, False)), ((NEW, True), (NEW, True)), ((OLD, False), (NEW, True))]
)
def test_keys_of_an_indexer_move_where_their_scales_are_alike(p, d, monkeypatch):
    source, target = (indexed(name, *it, monkeypatch) for name, it in (("prefill", p), ("decode", d)))
    if p[1] == d[1]:
        # A float is a plain number.
        assert len(written(source)) == 1 + p[1] and written(source) == written(target)
        move(source, target, 21)
        return
    with pytest.raises(kvferry.Incompatible, match=r"f32 \(4 bytes\).* fp8_e8m0 four times"):
        move(source, target, 21)


def test_rings_lie_as_both_versions_write_them(monkeypatch):
    monkeypatch.setattr(pools, "MultipleOf", lambda _: MultipleOf(8))
    for version in (OLD, NEW):
        it = Ring(size=1024)
        layer = running("CompressorBackend", fused_save_compress_norm=ring_store(version))
        monkeypatch.setattr(Ring, "module", layer, raising=False)
        made = v4("prefill", SIDE, (2,), {2: {"attn": v41_latent(2), "attn.compressor.state_cache": it}})
        # Plain numbers, found where they were described: nothing more need be said.
        assert written(made) == {}
