"""The rows of the census: what kvferry makes of each name, beside what vLLM's own connector does with it."""

from importlib.metadata import version

from kvferry.vllm.describe import specs

from .nixl import (
    NIXL_BACKENDS,
    NIXL_NO_BACKEND,
    NIXL_QUANTISED,
    NIXL_SPECS,
    NIXL_STATES,
    Unknown,
    nixl,
)
from .source import (
    Layers,
    architectures,
    backend_names,
    members,
    quantisation_modes,
    spec_classes,
    takes_connectors,
)

#: Architectures that use the encoder of a model which also has a decoder with cross attention: they
#: have no such layer themselves.
ENCODER_ALONE = {
    "MoonshotKimiaForCausalLM",
    "MossTranscribeDiarizeForConditionalGeneration",
    "UltravoxModel",
    "VoxtralForConditionalGeneration",
    "VoxtralRealtimeGeneration",
}


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
