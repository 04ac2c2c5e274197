"""The versions of vLLM that the connector is tried with, and what is not the same in all of them.

Engines of different versions hand over to each other: what they must agree on is in their manifests. Where vLLM says by
itself what differs, it is asked; a version's number is for what nothing else says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

#: Tried with real engines, in pairs of different versions, too (`tools/test-versions.sh`).
TRIED = ("0.31", "0.32", "0.33")
#: Those of them whose compiled code was not there: an older version's was in its place (`tools/vllm-env.sh`).
WITHOUT_KERNELS = ("0.33",)
#: Those of them that write caches as all versions before 0.33 did.
BEFORE_33 = ("0.31", "0.32")

#: What protects an engine whatever its version, in words.
STILL_CHECKED = (
    "its hooks are compared with ours when it starts, caches, types of states and attention back ends that "
    "have not been seen before are refused by name, kernels that can be asked are asked where they write, "
    "every plan is proven before a byte moves, and audits compare what D got with what P has"
)


def running() -> str:
    """The version of vLLM in this process."""
    import vllm

    return str(vllm.__version__)


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def is_tried(version: str) -> bool:
    return minor(version) in TRIED


def untried(version: str) -> str:
    """What to say of a version that nobody has tried."""
    return (
        f"vLLM {version} has not been tried with this release of kvferry ({', '.join(TRIED)} have). "
        f"What still holds: {STILL_CHECKED}"
    )


def differences(connector: type) -> list[str]:
    """Hooks that vLLM does not have, or calls with other arguments."""
    found = []
    for name, ours in vars(connector).items():
        ours = getattr(ours, "__func__", ours)
        if name.startswith("_") or not inspect.isfunction(ours):
            continue
        bases = [base for base in connector.__mro__[1:] if hasattr(base, name)]
        if not bases:
            if not LATER_HOOKS.get(name, lambda: False)():
                found.append(f"vLLM has no hook {name}")
            continue
        theirs = getattr(bases[0], name)
        wanted, taken = arguments(getattr(theirs, "__func__", theirs)), arguments(ours)
        if wanted != taken:
            found.append(f"vLLM calls {name}({', '.join(wanted)}), not ({', '.join(taken)})")
    found += [f"vLLM asks for {name}" for name in sorted(getattr(connector, "__abstractmethods__", ()))]
    return found


def arguments(hook: Callable[..., Any]) -> list[str]:
    """Their names, but for those that only collect what is left."""
    every = inspect.signature(hook).parameters.values()
    return [one.name for one in every if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


def _spares_all_that_is_loaded() -> bool:
    """Whether vLLM zeroes no new block that is being loaded, in whatever group, and so need not ask."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return hasattr(KVCacheManager, "get_zeroing_block_ids_in_range")


#: Hooks that vLLM has not always had, and whether it can do without.
LATER_HOOKS: dict[str, Callable[[], bool]] = {
    "get_loaded_kv_cache_group_ids": _spares_all_that_is_loaded,
    # The worker refuses it then.
    "supports_sleep_mode": lambda: True,
}


def knows_v41_records() -> bool:
    """Whether the records of DeepSeek-V4.1 (528 and 288 bytes a token) lie as they are described here: data of all
    tokens first, then their scales. vLLM 0.33 puts each token's scales behind its data, under the same name, with the
    same size and the same spec, so that nothing says it but the version that writes them."""
    return minor(running()) in BEFORE_33


def has_float_scales() -> bool:
    """Whether the scale of an indexer's 8-bit key is the float32 that it is described as here. Since 0.33, vLLM writes
    four equal exponents (UE8M0) in its place on Blackwell, and everything else is the same."""
    from vllm.platforms import current_platform
    from vllm.utils import deep_gemm

    says = getattr(deep_gemm, "mqa_logits_use_mx_scales", None)
    if says is not None:
        return not says()
    return minor(running()) in BEFORE_33 or not current_platform.is_device_capability_family(100)
