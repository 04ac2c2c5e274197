"""What is written: the page of the book."""

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/census.md"


def page(data: dict) -> str:
    kept = [it for it in data["architectures"] if it["kvferry"] != "not a cache"]
    counts = {}
    for name in ("specs", "states", "quantisation", "backends"):
        rows = [it for it in data[name] if it["kvferry"] != "not a cache"]
        counts[name] = f"{sum(it['kvferry'] == 'described' for it in rows)} of {len(rows)}"
    described = sum(it["kvferry"] == "described" for it in kept)
    text = f"""# What of vLLM is described

A census of vLLM {data["vllm"]}: everything in it that keeps a cache, what kvferry makes of it, and what
vLLM's own connector (NixlConnector) does with it. `tools/census.sh` writes this page from vLLM's source and the
connector's tables; a test fails by name where vLLM has something that is not here.

Described: {counts["specs"]} classes of caches, {counts["states"]} types of recurrent states,
{counts["quantisation"]} quantisation modes, {counts["backends"]} attention back ends, and {described} of
{len(kept)} architectures that keep a cache. Whatever is not named here is refused when an engine starts,
with its name: nothing is guessed.

"Described" says that kvferry knows where every byte of it lies. For most back ends of GPUs that was read in
vLLM's source and not run; the tests in `tests/python` lay out every kind of page by vLLM's own functions and
compare each byte. On CPUs vLLM itself quantises to FP8 with scales of the layer and to nothing else. Not in this
vLLM, and refused by name: `rwkv7` (it never ran it) and `phi4flash` (it did until 0.10.2). What is refused
below is also refused by vLLM where there is a connector, or a plug-in's. Whether a pair of engines fits is decided
for the pair: [Will my pair work?](planning.md) Whether the name of a format means the same on both sides is asked of their
kernels ([what each kind is known by](fingerprints.md)).

## Classes of caches
"""
    text += table(data["specs"], ["class", "kvferry", "how, or why not", "NixlConnector", "seen in"])
    text += "\n## Types of recurrent states\n"
    text += table(data["states"], ["type", "kvferry", "how, or why not", "NixlConnector", "seen in"])
    text += "\n## Quantisation\n"
    text += table(data["quantisation"], ["mode", "kvferry", "how", "NixlConnector", "seen in"])
    text += """
Scales of the layer, or of each of its heads, are part of a state's format: where those of the two sides differ,
the pair is refused with both values. `kvferry plan` takes cache data types as `kv=fp8`, and scales as
`kscale=0.5,vscale=2`.

## Attention back ends
"""
    text += table(data["backends"], ["name", "kvferry", "order, or why not", "NixlConnector", "seen in"])
    text += "\n## Architectures\nBy the layers that they can have.\n\n"
    text += "| layers | caches | kvferry | NixlConnector | architectures |\n|---|---|---|---|---|\n"
    groups: dict[tuple, list[str]] = {}
    for it in kept:
        layers = ", ".join([*it["layers"], *it["states"]]) or "its language model's"
        key = (layers, ", ".join(it["specs"]), verdict(it), it["nixl"])
        groups.setdefault(key, []).append(it["name"])
    for key, names in sorted(groups.items(), key=lambda it: (-len(it[1]), it[0])):
        text += "| " + " | ".join((*key, ", ".join(sorted(names)))) + " |\n"
    none = sorted(it["name"] for it in data["architectures"] if it["kvferry"] == "not a cache")
    return text + f"\nThese keep nothing of a prompt: {', '.join(none)}.\n"


def verdict(it: dict) -> str:
    return f"{it['kvferry']}: {it['why']}" if it["kvferry"] == "refused" else it["kvferry"]


def table(rows: list[dict], heads: list[str]) -> str:
    text = "| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|\n"
    for it in rows:
        theirs = ": ".join(part for part in (it.get("nixl", ""), it.get("nixl_why", "")) if part)
        source = it.get("nixl_source", "").removeprefix("distributed/kv_transfer/kv_connector/")
        cells = (f"`{it['name']}`", it["kvferry"], it["why"], theirs, f"`{source}`" if source else "")
        text += "| " + " | ".join(cells) + " |\n"
    return text
