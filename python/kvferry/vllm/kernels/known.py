"""Who writes a state, as a manifest says it: what it wrote when it was asked, or else its code.

Plain numbers that were found where they are described need no word: their format says all. What is a name (a record, a
scale's encoding, an order that no kernel could be asked for) means what the code that writes it makes of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..._memory import FORMATS
from .. import versions
from ..describe.specs import Fact
from .code import Code
from .probe import Answer, Places

#: Numbers whose bytes mean the same whoever writes them.
PLAIN = frozenset(FORMATS[f"torch.{it}"][0] for it in ("bfloat16", "float16", "float32"))
#: What changes how vLLM writes a cache, beside its version and the card.
SWITCHES = ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_USE_DEEP_GEMM_E8M0")
#: Functions that write what no kernel that can be called alone does: by the module of the layer's class, and the first
#: of its states.
BY_LAYER = {
    ("models.deepseek_v4.", "indexer"): (
        "models.deepseek_v4.common.ops.fused_compress_quant_cache", "compress_norm_rope_store_triton"),
    ("models.deepseek_v4.compressor", "latent"): (
        "models.deepseek_v4.common.ops.save_partial_states", "SavePartialStatesKernel"),
    ("models.deepseek_v41.compressor", "ring"): (
        "models.deepseek_v41.common.ops.fused_compress_quant_cache", "fused_save_compress_norm"),
    ("models.deepseek_v41.", "latent"): (
        "models.deepseek_v41.common.ops.fused_compress_quant_cache", "rope_quant_insert"),
    ("models.deepseek_v41.attention", "indexer"): (
        "models.deepseek_v41.common.ops.indexer_k_store", "indexer_k_norm_rope_store"),
    ("model_executor.models.extract_hidden_states", "hidden"): (
        "model_executor.models.extract_hidden_states", "basic_cache"),
}  # fmt: skip
#: Those that write in place of what can be asked wherever their module is loaded: a model's own, fused with more.
FUSED = {
    "latent": ("models.deepseek_v32.common.kernels", "fused_norm_rope"),
    "indexer": ("models.deepseek_v32.common.kernels", "fused_norm_rope"),
}
#: What the code of some writers was found to write, by `tools/fingerprints.sh`.
TABLE = Path(__file__).with_name("fingerprints.json")


def writers_of(
    module: Any, backend: Any, answer: Answer | None, named: Mapping[str, Places], formats: Mapping[str, str]
) -> dict[str, Fact]:
    """By state: who writes it, where its format does not say what its bytes mean."""
    first = next(iter(formats), "")
    fused = fused_writer(first)
    if fused is not None:
        answer = None
    found = {}
    for state, format_ in formats.items():
        if answer is not None and format_ in PLAIN:
            continue
        code = code_of(backend, fused or _by_layer(module, first))
        wrote: str | None
        if answer is not None:
            name, wrote = answer.writer, answer.digest(named[state])
        else:
            name, wrote = code[0], table().get(f"{code[2]} {format_} {state}")
        where = f"{name} of vLLM {versions.build()}, {backend.get_name()} on {card()}"
        found[state] = {"name": where, "bytes": wrote, "code": code[1]}
    return found


def fused_writer(state: str) -> tuple[str, str] | None:
    import sys

    made = FUSED.get(state)
    return made if made is not None and f"vllm.{made[0]}" in sys.modules else None


def code_of(backend: Any, writer: tuple[str, str] | None) -> tuple[str, str, str]:
    """The name of a writer; what stands in for what it writes, a digest of its code and the card where that is all
    there is to it, or the version, the card and the switches; and the digest."""
    if writer is not None and (digest := _code().digest(*writer)):
        return writer[1], f"source {digest}, {card()}", digest
    switches = ", ".join(f"{name}={os.environ[name]}" for name in SWITCHES if os.environ.get(name))
    told = f"vLLM {versions.build()}, {backend.get_name()}, {card()}" + (f", {switches}" if switches else "")
    return f"the kernels of {backend.get_name()}", told, ""


@cache
def card() -> str:
    """The family of cards, or of processors, that kernels are made for."""
    import platform

    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return f"{platform.machine()} processors"
    capability = current_platform.get_device_capability()
    if capability is not None and current_platform.is_cuda():
        return f"CUDA cards of capability {capability.major}.x"
    return f"{current_platform.device_name} {current_platform.get_device_name()}"


@cache
def table() -> dict[str, str]:
    return dict(json.loads(TABLE.read_text())["found"]) if TABLE.exists() else {}


@cache
def _code() -> Code:
    import vllm

    return Code(Path(str(vllm.__file__)).parent)


def _by_layer(module: Any, state: str) -> tuple[str, str] | None:
    here = type(module).__module__.removeprefix("vllm.")
    return next((made for (where, it), made in BY_LAYER.items() if it == state and here.startswith(where)), None)
