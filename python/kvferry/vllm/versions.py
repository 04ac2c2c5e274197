"""The versions of vLLM that the connector is tried with, and what is not the same in all of them.

Engines of different versions hand over to each other: what they must agree on is in their manifests. Where vLLM says by
itself what differs, it is asked; a version's number is for what nothing else says.
"""

from __future__ import annotations

import csv
import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
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


def build() -> str:
    """That version, and what else is in its place: an upgrade that was cut short leaves Python of one version beside
    compiled parts of another, and neither says so. Their sizes do, beside those that the installation wrote down."""
    if not (wrong := mixed()):
        return running()
    told = hashlib.sha256("\n".join(wrong).encode()).hexdigest()[:8]
    return f"{running()} with {len(wrong)} files of another build ({told})"


@cache
def mixed() -> list[str]:
    """Files of the vLLM that runs that are not those that were installed."""
    import vllm

    return foreign(Path(str(vllm.__file__)).parents[1])


def foreign(site: Path) -> list[str]:
    """Files of vLLM that are not those that were installed, with their sizes. None where nothing was written down: what
    is built where it lies has a version of its own."""
    found = []
    for record in site.glob("vllm*.dist-info/RECORD"):
        lines = list(csv.reader(record.read_text().splitlines()))
        if not any(line[:1] == ["vllm/__init__.py"] for line in lines):
            continue
        for name, _, size in lines:
            if name.startswith("vllm/") and name.endswith((".py", ".so")) and size:
                file = site / name
                there = file.stat().st_size if file.exists() else None
                if there != int(size):
                    found.append(f"{name} {there}")
    return sorted(found)


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


def interleaves_v41_records() -> bool | None:
    """Whether the scales of a token of DeepSeek-V4.1 (528 and 288 bytes) follow its data, as in vLLM 0.33, or
    those of all tokens the data of all, as before: same name, same size, same spec. Only where the kernel that writes
    them cannot be asked; None where nothing here says it. 0.33 rounds a block's stride up to whole records for it."""
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

    rounds = "packed_block_stride_alignment" in inspect.signature(DeepseekV4SWACache.__init__).parameters
    known = minor(running())
    if known in TRIED and rounds is (known not in BEFORE_33):
        return rounds
    return None


def has_float_scales() -> bool | None:
    """Whether the scale of an indexer's 8-bit key is a float32. Since 0.33, vLLM writes four equal exponents (UE8M0) in
    its place on Blackwell, and everything else is the same. None where nothing here says it."""
    from vllm.platforms import current_platform
    from vllm.utils import deep_gemm

    says = getattr(deep_gemm, "mqa_logits_use_mx_scales", None)
    if says is not None:
        return not says()
    known = minor(running()) in BEFORE_33 or not current_platform.is_device_capability_family(100)
    return True if known else None
