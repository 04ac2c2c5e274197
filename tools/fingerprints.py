"""The table of fingerprints that ships, and the page about it (`tools/fingerprints.sh`)."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from interpreted import indexer_store, ring_store, rope_quant_insert, running, source

# isort: split
import torch
from kvferry.vllm.kernels import deepseek, known, probe
from kvferry.vllm.kernels.code import Code

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "python/kvferry/vllm/kernels/fingerprints.json"
PAGE = ROOT / "docs/fingerprints.md"
VERSIONS = ("0.32.0", "0.33.0")
#: Entries of a block that is written.
ENTRIES = 4


def cases(version):
    """What can be called: which kernel of which function, on which cards, and each state's format, bytes and axes."""
    changes = "mqa_logits_use_mx_scales" in Code(source(version)).bound("utils.deep_gemm")
    insert = running("it", rope_quant_insert=rope_quant_insert(version))
    rope = known.BY_LAYER["models.deepseek_v41.", "latent"]
    for content, data, cache in ((528, 512, "fp8_ds_mla"), (288, 256, "nvfp4_ds_mla"), (584, 576, "fp8_ds_mla")):
        lengths = {"latent": (ENTRIES,), "latent.scale": (ENTRIES,)}
        kernel = deepseek.TwoParts(insert, SimpleNamespace(state_content_size_bytes=content), lengths)
        states = {"latent": (f"{cache} {content}", data), "latent.scale": (f"{cache} {content} scales", content - data)}
        yield kernel, rope, "all but Blackwell" if content == 584 else "Blackwell", content, states
    keys = known.BY_LAYER["models.deepseek_v41.attention", "indexer"]
    floats, exponents = ("f32", 4), ("fp8_e8m0 four times", 4)
    for cards, is_mx in (("all but Blackwell", False), ("Blackwell", changes)):
        scale = exponents if is_mx else floats
        lengths = {"indexer": (ENTRIES, 128), "indexer.scale": (ENTRIES, 1)}
        store = indexer_store(version, exponents=is_mx)
        states = {"indexer": ("fp8_e4m3", 1), "indexer.scale": scale}
        yield deepseek.Keys(store, None, lengths), keys, cards, 132, states
    lengths = {"ring": (1, ENTRIES, 1024)}
    layer = running("it", fused_save_compress_norm=ring_store(version))
    ring = known.BY_LAYER["models.deepseek_v41.compressor", "ring"]
    yield deepseek.Ring(layer, lengths), ring, "all", 4096, {"ring": ("f32", 4)}


def rows(version, called):
    """What each kernel of a version writes; of the one that runs, if none is named."""
    code = Code(source(version))
    for kernel, writer, cards, content, states in cases(version):
        number = torch.float32 if "ring" in states else torch.uint8
        answer = probe.ask(kernel, torch.zeros(2, 1, ENTRIES, content // number.itemsize, dtype=number))
        for state, (name, size) in states.items():
            axes = {"ring": ("part", "slot", "dim")}.get(state, ("token", "dim"))[: len(kernel.states[state])]
            # The last of a window's scales is padding, which follows nothing.
            spare = state == "latent.scale" and content == 584
            found = answer.places(state, axes, size - spare)
            places = probe.Places(axes, found.at, size)
            yield {
                "version": called, "cards": cards, "writer": writer[1], "state": state, "format": name,
                "where": str(places), "bytes": answer.digest(places), "code": code.digest(*writer),
            }  # fmt: skip


def page(told):
    text = """# Fingerprints

*Made by `tools/fingerprints.sh`.* A name (of a record, or of a scale's encoding) means what the code that writes it
makes of it. [Versions of vLLM](vllm.md#versions-of-vllm) has the rules. Here is what was found.

## What kernels wrote
DeepSeek-V4.1's kernels of both versions, carried out by Triton's interpreter on a CPU: a fixed input, a page of 4
entries that was poisoned, and where the bytes of each state were found. Equal digests mean that the plan only has to move bytes.

| kernel | cards | state | vLLM | where the first byte of each is | what it wrote |
|---|---|---|---|---|---|
"""
    by = sorted(told["rows"], key=lambda it: (it["writer"], it["format"], it["state"], it["cards"], it["version"]))
    for it in by:
        text += (
            f"| `{it['writer']}` | {it['cards']} | {it['state']} as {it['format']} | {it['version']} | {it['where']} | "
            f"`{it['bytes']}` |\n"
        )
    text += """
## Each kind in each pair
What holds where one side is the first and the other the second, in either direction. *Asked*: each engine asks its own
kernel when it starts, and the pair is served where both wrote the same. *Code*: the text of what writes it, and of all
that it calls, stands in, on one family of cards. *Version*: what writes it is compiled, or fused with the model's
arithmetic, and served between equal versions, cards and switches alone. In brackets: where it ran, and *never* where it did not.

| kind | 0.32 and 0.32, one family of cards | 0.32 and 0.33, one family | 0.33 and 0.33, one family | two families |
|---|---|---|---|---|
"""
    for kind, how, ran in KINDS:
        if isinstance(how, tuple):
            before, after = (told["code"][version][how[1]] for version in VERSIONS)
            same = "served: its code is the same" if before == after else "refused: its code is another"
            cells = ["code: served", f"code: {same}", "code: served", "refused"]
        elif how == "asked":
            cells = [f"asked ({ran[0]})", f"asked ({ran[1]})", f"asked ({ran[2]})", f"asked ({ran[3]})"]
        elif how == "refused":
            cells = [f"refused: {ran}"] * 4
        else:
            cells = ["version: served", "refused", "version: served", "refused"]
        text += f"| {kind} | {' | '.join(cells)} |\n"
    return text + """
Beside these, Blackwell's scales of 8-bit indexers have a format of their own with 0.33, so that 0.33 there is refused
with any other card and with 0.32, whatever its kernels answer.
"""


CPU = ("0.32 on CPU and H200", "0.33's Python over 0.32's kernels, on CPU", "the same", "never")
TRITON = ("interpreter", "interpreter", "interpreter", "interpreter, but for the card's own rounding")
NEVER = ("never", "never", "never", "never")
H200 = ("0.32 on the H200", "never", "never", "never")
#: Every kind that is described: how its meaning is known, and where that ran.
KINDS = (
    ("keys and values, of back ends that offer an update", "asked", CPU),
    ("the same with 8 bits and scales of the layer", "asked", H200),
    ("records with their scales (INT4, INT8, FP8 per token and head, NVFP4, TurboQuant, UltraQuant)", "asked", NEVER),
    ("keys and values of HPC_ATTN and MiniMax-M3, written in the midst of attention", "version", ()),
    ("latents of MLA (plain, and 8 bits)", "asked", CPU),
    ("latents of 656 and 352 bytes (`fp8_ds_mla`, `nvfp4_ds_mla`)", "asked", NEVER),
    ("V4.1's compressed latents of 584, 528 and 288 bytes", "asked", TRITON),
    ("V4's and V4.1's windows of 584 and 528 bytes (compiled)", "asked", NEVER),
    ("V4's compressed latents", "version", ()),
    ("V4's open groups", ("code", "SavePartialStatesKernel"), ()),
    ("V4.1's open groups (ring)", "asked", TRITON),
    ("V4.1's indexers", "asked", TRITON),
    ("V4's indexers", ("code", "compress_norm_rope_store_triton"), ()),
    ("indexers of DeepSeek-V3.2 and GLM-5 where vLLM's own operator stores them", "asked", H200),
    ("the same, and its latents, where the model's fused kernel does", ("code", "fused_norm_rope"), ()),
    ("Mamba, Mamba2, gated delta rule, KDA, short convolutions", "asked", CPU),
    ("linear attention", "version", ()),
    ("hidden states", ("code", "basic_cache"), ()),
    ("other rings and vectors (GLM-5-next, QSA)", "version", ()),
    ("STEP5, Octave, caches of plug-ins (`CUSTOM`)", "refused", "not described"),
)  # fmt: skip


def codes(version):
    """The digests of functions that stand in for what they write."""
    code = Code(source(version))
    return {name: code.digest(where, name) for where, name in {*known.BY_LAYER.values(), *known.FUSED.values()}}


def main():
    told = {"rows": [row for version in VERSIONS for row in rows(version, version)]}
    told["found"] = {f"{it['code']} {it['format']} {it['state']}": it["bytes"] for it in told["rows"]}
    told["code"] = {version: dict(sorted(codes(version).items())) for version in VERSIONS}
    TABLE.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(told))


if __name__ == "__main__":
    main()
