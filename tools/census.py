#!/usr/bin/env python3
"""The census: everything in the installed vLLM that keeps a cache, what kvferry makes of it, and what
vLLM's own connector (NixlConnector) does with it.

    tools/census.sh            writes crates/kvferry-models/facts/census.json and docs/census.md
    tools/census.sh --check    fails where they are not what would be written

Names come from vLLM's source, which is read and not run: it has parts for GPUs that do not load here. What
kvferry makes of a name is looked up in the connector's own tables (`kvferry.vllm.specs`); what vLLM's
connector does is told below, each time with the line of its source that shows it.
"""

import ast
import json
import sys
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from kvferry.vllm import specs

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "crates/kvferry-models/facts/census.json", ROOT / "docs/census.md"
SOURCE = Path(find_spec("vllm").origin).parent
NIXL = "distributed/kv_transfer/kv_connector/v1/nixl"

#: What NixlConnector does, why, and the file and the text in it that show it.
PAGES_BY_BLOCK = (
    "serves",
    "moves whole blocks",
    f"{NIXL}/tp_mapping.py",
    "return issubclass(spec_type, AttentionSpec)",
)
NIXL_SPECS = {
    "FullAttentionSpec": PAGES_BY_BLOCK,
    "RSWASpec": PAGES_BY_BLOCK,
    "SinkFullAttentionSpec": PAGES_BY_BLOCK,
    "ChunkedLocalAttentionSpec": PAGES_BY_BLOCK,
    "CrossAttentionSpec": (
        "refuses",
        "vLLM runs no encoder-decoder model with a connector",
        "v1/core/sched/scheduler.py",
        "Encoder-decoder models are not currently supported with KV connectors",
    ),
    "HiddenStateCacheSpec": PAGES_BY_BLOCK,
    "SlidingWindowSpec": (
        "serves",
        "moves the last blocks that a window may reach",
        f"{NIXL}/base_scheduler.py",
        "if isinstance(g.kv_cache_spec, SlidingWindowSpec)",
    ),
    "MLAAttentionSpec": (
        "serves",
        "reads each block from one rank",
        f"{NIXL}/base_worker.py",
        "layer_spec, (MLAAttentionSpec, SlidingWindowMLASpec)",
    ),
    "SlidingWindowMLASpec": (
        "serves",
        "reads each block from one rank; where pages of several sizes share a group it moves all blocks",
        f"{NIXL}/base_worker.py",
        "layer_spec, (MLAAttentionSpec, SlidingWindowMLASpec)",
    ),
    "CircularBufferSpec": (
        "serves",
        "moves the ring whole",
        f"{NIXL}/base_worker.py",
        "isinstance(layer_spec, CircularBufferSpec)",
    ),
    "MambaSpec": (
        "serves some",
        "with convolution states stored channels first; not all types of states",
        f"{NIXL}/base_worker.py",
        "3-read Mamba conv transfer requires DS conv state layout.",
    ),
}
SPLIT = "distributed/kv_transfer/kv_connector/v1/ssm_conv_transfer_utils.py"
NO_SPLIT = ("refuses", "has no split for its states", SPLIT, "raise NotImplementedError(")
NIXL_STATES = {
    "MAMBA1": ("serves", "", SPLIT, "MAMBA1"),
    "MAMBA2": (
        "serves some",
        "wrong bytes for one group shared by several ranks, and for other numbers of speculative tokens",
        SPLIT,
        "MAMBA2",
    ),
    "GDN_ATTN": ("serves some", "wrong bytes for other numbers of speculative tokens", SPLIT, "GDN_ATTN"),
    "SHORT_CONV": NO_SPLIT,
    "LINEAR": NO_SPLIT,
    "CUSTOM": NO_SPLIT,
}
#: It compares the names of back ends and the cache data type, and moves bytes.
NIXL_BACKENDS = (
    "serves",
    "with the same back end on both sides",
    f"{NIXL}/metadata.py",
    '"attn_backend_name"',
)
#: Back ends that vLLM does not choose where there is a connector.
NIXL_NO_BACKEND = (
    "refuses",
    "vLLM does not choose it where there is a connector",
    "v1/attention/backend.py",
    "if use_kv_connector and not cls.supports_kv_connector():",
)
NIXL_QUANTISED = (
    "serves",
    "with the same cache data type on both sides; scales outside of the pages are not compared",
    f"{NIXL}/metadata.py",
    '"cache_dtype"',
)

#: Where layers that keep a cache are defined.
SCOPE = (
    "vllm.model_executor.models",
    "vllm.models",
    "vllm.model_executor.layers.attention",
    "vllm.model_executor.layers.mamba",
    "vllm.model_executor.layers.mla",
    "vllm.v1.attention.backends.mla.sparse_swa",
)
REGISTRY = {
    "_TEXT_GENERATION_MODELS": "text",
    "_MULTIMODAL_MODELS": "several inputs",
    "_SPECULATIVE_DECODING_MODELS": "draft",
}
#: Whose language model is another architecture of this list.
BACKBONE = "init_vllm_registered_model"


#: Architectures that use the encoder of a model which also has a decoder with cross attention: they
#: have no such layer themselves.
ENCODER_ALONE = {
    "MoonshotKimiaForCausalLM",
    "MossTranscribeDiarizeForConditionalGeneration",
    "UltravoxModel",
    "VoxtralForConditionalGeneration",
    "VoxtralRealtimeGeneration",
}


class Unknown(Exception):
    """Something in vLLM that the tables do not name."""


# The rows.


def census() -> dict:
    layers = Layers()
    return {
        "vllm": version("vllm").partition("+")[0],
        "specs": [spec(name) for name in spec_classes()],
        "states": [state(name) for name in members("MambaAttentionBackendEnum")],
        "quantisation": [quantised(name) for name in quantisation_modes()],
        "backends": [backend(name, places) for name, places in sorted(backend_names().items())],
        "architectures": [
            architecture(name, kind, layers.reached(module, cls))
            for kind, name, module, cls in architectures()
        ],
    }


def spec(name: str) -> dict:
    if name in specs.PAGES:
        ours = row(name, "described", specs.PAGES[name].value)
    elif name in specs.REFUSED:
        ours = row(name, "refused", specs.REFUSED[name])
    elif name in specs.NOT_A_CACHE:
        return row(name, "not a cache", specs.NOT_A_CACHE[name])
    else:
        raise Unknown(f"the cache spec class {name}")
    return ours | nixl(NIXL_SPECS.get(name), f"the cache spec class {name}")


def state(name: str) -> dict:
    kind = specs.RECURRENT.get(name)
    if kind is not None:
        ours = row(name, "described", f"as {kind}")
    elif name == "CUSTOM":
        ours = row(name, "refused", "a type that a plug-in brings")
    else:
        raise Unknown(f"the type of states {name}")
    return ours | nixl(NIXL_STATES.get(name), f"the type of states {name}")


def quantised(name: str) -> dict:
    if name not in specs.QUANTISED:
        raise Unknown(f"the quantisation mode {name}")
    where = specs.QUANTISED[name]
    why = "plain numbers" if where is None else f"scales {where}"
    return row(name, "described", why) | nixl(NIXL_QUANTISED, name)


def backend(name: str, places: list[str]) -> dict:
    if name in specs.BACKENDS:
        ours = row(name, "described", specs.BACKENDS[name].value)
    elif name in specs.REFUSED_BACKENDS:
        ours = row(name, "refused", specs.REFUSED_BACKENDS[name])
    else:
        raise Unknown(f"the attention back end {name} of {', '.join(places)}")
    told = NIXL_BACKENDS if any(map(takes_connectors, places)) else NIXL_NO_BACKEND
    return ours | {"classes": places} | nixl(told, name)


def takes_connectors(place: str) -> bool:
    """Whether a back end's class says nothing else of connectors than that it works with them."""
    home, cls = place.rsplit(".", 1)
    path = f"{home.replace('.', '/')}.py"
    node = next((it for it in classes(path) if it.name == cls), None) if (SOURCE / path).is_file() else None
    for item in node.body if node is not None else ():
        if isinstance(item, ast.FunctionDef) and item.name == "supports_kv_connector":
            return any(
                isinstance(part, ast.Constant) and part.value is True for part in ast.walk(item)
            )
    return True


def architecture(name: str, kind: str, found: tuple[dict[str, list[str]], list[str], bool]) -> dict:
    """`found`: layers and the spec classes that they ask for, types of states, and whether the language
    model is another architecture."""
    layers, states, backbone = found
    asked = sorted({cls for classes in layers.values() for cls in classes})
    if name in ENCODER_ALONE:
        asked.remove("CrossAttentionSpec")
        layers = {layer: classes for layer, classes in layers.items() if layer != "CrossAttention"}
    kept = [cls for cls in asked if cls not in specs.NOT_A_CACHE]
    whys = [f"{cls}: {specs.REFUSED[cls]}" for cls in kept if cls in specs.REFUSED]
    theirs = {NIXL_SPECS[cls][0] for cls in kept} | {NIXL_STATES[it][0] for it in states}
    told = {"kind": kind, "layers": sorted(layers), "specs": kept, "states": states}
    if not kept and not backbone:
        return row(name, "not a cache", "keeps nothing of a prompt") | told
    if whys:
        ours = row(name, "refused", "; ".join(whys))
    else:
        ours = row(name, "described", "" if kept else "as its language model")
    order = ("refuses", "serves some", "serves", "moves nothing")
    verdict = next((it for it in order if it in theirs), "as its language model")
    return ours | told | {"nixl": verdict}


def row(name: str, kvferry: str, why: str) -> dict:
    return {"name": name, "kvferry": kvferry, "why": why}


def nixl(told: tuple[str, str, str, str] | None, what: str) -> dict:
    if told is None:
        raise Unknown(f"what NixlConnector does with {what}")
    verdict, why, file, text = told
    for number, line in enumerate((SOURCE / file).read_text().splitlines(), 1):
        if text in line:
            return {"nixl": verdict, "nixl_why": why, "nixl_source": f"{file}:{number}"}
    raise Unknown(f"{file} no longer says '{text}', which showed what NixlConnector does with {what}")


# vLLM's source.


@cache
def module(name: str) -> tuple[Path, ast.Module] | None:
    path = SOURCE.parent / Path(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file, ast.parse(file.read_text())
    return None


def classes(path: str) -> list[ast.ClassDef]:
    tree = ast.parse((SOURCE / path).read_text())
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def spec_classes() -> list[str]:
    """KVCacheSpec and all that derive from it."""
    found = ["KVCacheSpec"]
    for node in classes("v1/kv_cache_interface.py"):
        if any(isinstance(base, ast.Name) and base.id in found for base in node.bases):
            found.append(node.name)
    return found


def enum_values(node: ast.ClassDef) -> list[str]:
    return [
        target.id
        for item in node.body
        if isinstance(item, ast.Assign)
        for target in item.targets
        if isinstance(target, ast.Name)
    ]


def quantisation_modes() -> list[str]:
    return next(
        enum_values(node)
        for node in classes("v1/kv_cache_interface.py")
        if node.name == "KVQuantMode"
    )


def members(enum: str) -> list[str]:
    found = classes("v1/attention/backends/registry.py")
    return next(enum_values(node) for node in found if node.name == enum)


def backend_names() -> dict[str, list[str]]:
    """What back ends call themselves, and the classes that do."""
    found: dict[str, list[str]] = {}
    for folder in ("v1/attention", "model_executor/layers/attention", "model_executor/models", "models"):
        for file in sorted((SOURCE / folder).rglob("*.py")):
            # Those of a prefill alone keep nothing.
            if "prefill" in file.parent.name:
                continue
            text = file.read_text()
            if "def get_name" not in text:
                continue
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and (name := own_name(node)) is not None:
                    place = file.relative_to(SOURCE).with_suffix("")
                    found.setdefault(name, []).append(".".join((*place.parts, node.name)))
    return found


def own_name(node: ast.ClassDef) -> str | None:
    if not node.name.endswith("Backend"):
        return None
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "get_name":
            for part in ast.walk(item):
                if isinstance(part, ast.Return) and isinstance(part.value, ast.Constant):
                    return str(part.value.value)
    return None


def architectures() -> list[tuple[str, str, str, str]]:
    """The list of each architecture, its name, and the module and class behind it."""
    found = module("vllm.model_executor.models.registry")
    assert found is not None
    listed = []
    for node in found[1].body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id in REGISTRY:
            for name, (home, cls) in ast.literal_eval(node.value).items():
                if not home.startswith("vllm."):
                    home = f"vllm.model_executor.models.{home}"
                listed.append((REGISTRY[target.id], name, home, cls))
    return listed


class Layers:
    """Which layers an architecture can have: all that its class mentions, directly or not."""

    @staticmethod
    @cache
    def names(home: str) -> dict[str, list]:
        """What a module defines or imports, by name."""
        found = module(home)
        names: dict[str, list] = {}
        if found is None:
            return names

        def look(body: list[ast.stmt]) -> None:
            for node in body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    names.setdefault(node.name, []).append(node)
                elif isinstance(node, ast.ImportFrom):
                    origin = imported(home, found[0], node)
                    for alias in node.names:
                        names.setdefault(alias.asname or alias.name, []).append((origin, alias.name))
                elif isinstance(node, ast.If):
                    look(node.body + node.orelse)
                elif isinstance(node, ast.Try):
                    look(node.body + [s for h in node.handlers for s in h.body] + node.orelse)
                elif isinstance(node, ast.Assign):
                    for target in node.targets:
                        if isinstance(target, ast.Name):
                            names.setdefault(target.id, []).append(node)

        look(found[1].body)
        return names

    def reached(self, home: str, cls: str) -> tuple[dict[str, list[str]], list[str], bool]:
        seen, todo = set(), [(home, cls)]
        layers: dict[str, list[str]] = {}
        states: set[str] = set()
        while todo:
            place = todo.pop()
            if place in seen:
                continue
            seen.add(place)
            own, types, further = self.step(*place)
            layers |= own
            states |= types
            todo += further
        return layers, sorted(states), any(name == BACKBONE for _, name in seen)

    @classmethod
    @cache
    def step(cls, home: str, name: str) -> tuple[dict[str, list[str]], set[str], list]:
        """What a name is: a layer or not, and what else it mentions."""
        layers: dict[str, list[str]] = {}
        states: set[str] = set()
        further: list[tuple[str, str]] = []
        for found in cls.names(home).get(name, []):
            if isinstance(found, tuple):
                further += [found] if found[0].startswith(SCOPE) else []
                continue
            parts: list[ast.AST] = [found]
            if isinstance(found, ast.ClassDef):
                asked, types = asked_specs(found), state_types(found)
                states |= types
                if asked:
                    layers[found.name] = asked
                if asked or types:
                    # A layer's own code mentions other layers only to tell itself apart.
                    parts = list(found.bases)
            further += [it for part in parts for it in mentioned(home, part)]
        return layers, states, sorted(set(further))


def imported(home: str, file: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = home.split(".") if file.name == "__init__.py" else home.split(".")[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, *([node.module] if node.module else [])])


def mentioned(home: str, node: ast.AST) -> list[tuple[str, str]]:
    found = []
    file = module(home)
    assert file is not None
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.append((home, part.id))
        elif isinstance(part, ast.ImportFrom):
            origin = imported(home, file[0], part)
            if origin.startswith(SCOPE):
                found += [(origin, alias.name) for alias in part.names]
    return found


def method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == name:
            return item
    return None


def asked_specs(node: ast.ClassDef) -> list[str]:
    """The spec classes that a layer's `get_kv_cache_spec` makes or passes on."""
    found = method(node, "get_kv_cache_spec")
    if found is None:
        return []
    calls = (part.func for part in ast.walk(found) if isinstance(part, ast.Call))
    made = {call.id for call in calls if isinstance(call, ast.Name) and call.id.endswith("Spec")}
    return sorted(made)


def state_types(node: ast.ClassDef) -> set[str]:
    found = method(node, "mamba_type")
    if found is None:
        return set()
    return {
        part.attr
        for part in ast.walk(found)
        if isinstance(part, ast.Attribute)
        and isinstance(part.value, ast.Name)
        and part.value.id == "MambaAttentionBackendEnum"
    }


# The page.


def page(data: dict) -> str:
    kept = [it for it in data["architectures"] if it["kvferry"] != "not a cache"]
    counts = {}
    for name in ("specs", "states", "quantisation", "backends"):
        rows = [it for it in data[name] if it["kvferry"] != "not a cache"]
        counts[name] = f"{sum(it['kvferry'] == 'described' for it in rows)} of {len(rows)}"
    described = sum(it["kvferry"] == "described" for it in kept)
    text = f"""# What of vLLM is described

A census of vLLM {data["vllm"]}: everything in it that keeps a cache, what kvferry makes of it, and what
vLLM's own connector (NixlConnector) does with it. `tools/census.sh` writes this page and
`crates/kvferry-models/facts/census.json` from vLLM's source and the connector's tables; a test fails by
name where vLLM has something that is not here. `kvferry models --all` prints it.

Described: {counts["specs"]} classes of caches, {counts["states"]} types of recurrent states,
{counts["quantisation"]} quantisation modes, {counts["backends"]} attention back ends, and {described} of
{len(kept)} architectures that keep a cache. Whatever is not named here is refused when an engine starts,
with its name: nothing is guessed.

"Described" says that kvferry knows where every byte of it lies. For most back ends of GPUs that was read in
vLLM's source and not run; the tests in `tests/python` lay out every kind of page by vLLM's own functions and
compare each byte. On CPUs vLLM itself quantises to FP8 with scales of the layer and to nothing else. Not in this
vLLM, and refused by name: `rwkv7` (it never ran it) and `phi4flash` (it did until 0.10.2). What is refused
below is also refused by vLLM where there is a connector, or a plug-in's. Whether a pair of engines fits is decided
for the pair: [Will my pair work?](planning.md)

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


def written() -> dict[Path, str]:
    data = census()
    lists = {
        key: "[\n" + ",\n".join(f"    {json.dumps(it)}" for it in rows) + "\n  ]"
        for key, rows in data.items()
        if isinstance(rows, list)
    }
    parts = [f'  "vllm": {json.dumps(data["vllm"])}', *(f'  "{key}": {it}' for key, it in lists.items())]
    return {DATA: "{\n" + ",\n".join(parts) + "\n}\n", PAGE: page(data)}


def main() -> None:
    try:
        files = written()
    except Unknown as error:
        sys.exit(f"{error}: the tables of kvferry.vllm.specs and of this program do not name it yet")
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    if sys.argv[1:] == ["--check"]:
        if stale:
            sys.exit(f"stale: {', '.join(map(str, stale))}; run tools/census.sh")
        return
    for path in stale:
        path.write_text(files[path])


if __name__ == "__main__":
    main()
