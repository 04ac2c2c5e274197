"""Whether an engine with vLLM's stock NixlConnector runs the same model in the same way: its compatibility hash, and
what is likely to differ where the hash does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from ..refusal import refuse
from .wire import VERSIONS, Introduction


def check(introduction: Introduction, vllm_config: Any) -> None:
    """Raises `Unsupported` unless all ranks have the hash that this engine would have with that connector."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata

    version = metadata.NIXL_CONNECTOR_VERSION
    if version not in VERSIONS:
        raise refuse(
            "",
            f"vLLM's NixlConnector is of version {version} here, and kvferry understands "
            f"{', '.join(map(str, VERSIONS))}: use FerryConnector on the other engine, or a release of kvferry for "
            "this vLLM",
        )
    backend = get_current_attn_backends(vllm_config)[0].get_name()

    def hash_of(config: Any, mode: str = "pull") -> str:
        return str(metadata.compute_nixl_compatibility_hash(config, backend, mode))

    own = hash_of(vllm_config)
    for number, theirs in enumerate(introduction.hashes()):
        if theirs == own:
            continue
        told = list(introduction.ranks())[number]
        why: str | None
        if told.attn_backend_name != backend:
            why = f"its attention back end is {told.attn_backend_name}, and {backend} here"
        elif theirs == hash_of(vllm_config, "push"):
            why = "it writes (NixlPushConnector), and an engine with kvferry reads"
        else:
            why = next((why for config, why in _others(vllm_config) if hash_of(config) == theirs), None)
        if why is None:
            model = vllm_config.model_config
            why = (
                "one or more of these are not the same there: vLLM's version, that of its connector "
                f"({version} here), the model's name ({model.model!r}), its data type ({model.dtype}), KV heads, "
                f"head size or layers, the cache's data type ({vllm_config.cache_config.cache_dtype}), the draft "
                "model"
            )
        raise refuse(
            "",
            f"rank {number} of the engine without kvferry at {introduction.place.address} has another "
            f"compatibility hash ({theirs[:12]}…, and {own[:12]}… here): {why}. Start both alike, or use "
            "FerryConnector there, too, which says what differs",
        )


def _others(vllm_config: Any) -> Iterator[tuple[Any, str]]:
    """What this engine would be if one thing were otherwise, and what that is."""
    import torch

    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        own = vllm_config.model_config.dtype
        if dtype != own:
            yield (
                _with(vllm_config, "model_config", dtype=dtype),
                f"its data type is {dtype}, and {own} here",
            )
    own = vllm_config.cache_config.cache_dtype
    for cache in ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"):
        if cache != own:
            yield (
                _with(vllm_config, "cache_config", cache_dtype=cache),
                f"the data type of its cache is {cache}, and {own} here",
            )
    own = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    yield (
        _with(vllm_config, "scheduler_config", disable_hybrid_kv_cache_manager=not own),
        f"--disable-hybrid-kv-cache-manager is {not own} there, and {bool(own)} here",
    )
    if vllm_config.speculative_config is not None:
        without = copy.copy(vllm_config)
        without.speculative_config = None
        yield without, "it has no draft model"


def _with(vllm_config: Any, part: str, **values: Any) -> Any:
    changed = copy.copy(getattr(vllm_config, part))
    for name, value in values.items():
        object.__setattr__(changed, name, value)
    config = copy.copy(vllm_config)
    object.__setattr__(config, part, changed)
    return config
