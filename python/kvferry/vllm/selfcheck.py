"""Does kvferry work in this environment? `python -m kvferry.vllm.selfcheck`

Looks at the versions, loads the connector as vLLM loads it, and hands a request over between two
processes on this machine with every transport, checking every byte; with a GPU, also from GPU memory
to GPU memory.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import logging
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError
from typing import Any

from .. import __version__, log_to
from .._loopback import hand_over
from . import versions
from .plugin import GROUP, NAME, PLUGIN

TRANSPORTS = ("local", "tcp", "nixl")
#: What a user gives to the two servers to begin with, and what must be added without the plug-in.
CONFIGS = {
    "prefill": {"kv_connector": NAME, "kv_role": "kv_producer"},
    "decode": {"kv_connector": NAME, "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"},
}
WITHOUT_PLUGIN = {"kv_connector_module_path": "kvferry.vllm"}
#: What compares a pair's answers with those of its decode server alone.
CANARY = "python -m kvferry.vllm.canary"


@dataclass
class Finding:
    """One line of the answer."""

    what: str
    #: `yes`, `no`, `-` where it does not matter here, or `?` where nobody knows.
    fits: str
    says: str
    #: What to do about it.
    advice: str = ""
    #: What only some readers want: shown with `--verbose`, and in JSON.
    details: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvferry.vllm.selfcheck", description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="how much to move with each transport")
    parser.add_argument("--json", action="store_true", help="answer as JSON, for programs")
    parser.add_argument("--verbose", action="store_true", help="also show details, and what the transports log")
    asked = parser.parse_args()
    if asked.mib < 1:
        parser.error(f"--mib is {asked.mib}, but must be 1 or more")
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    log = logging.getLogger("kvferry")
    log.setLevel(logging.DEBUG)
    level = "debug" if asked.verbose else "error"
    log_to(log, level)
    # vLLM says a lot while it is loaded.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    findings = []
    if not asked.json:
        print(f"kvferry {__version__}, Python {platform.python_version()}\n")
    for finding in look(asked.mib, level):
        findings.append(finding)
        if not asked.json:
            mark = {"yes": "ok", "no": "NO", "-": "--", "?": "??"}[finding.fits]
            print(f"  {mark}  {finding.what:<14} {finding.says}", flush=True)
            if finding.advice:
                print(f"      {'':<14} {finding.advice}", flush=True)
            if finding.details and asked.verbose:
                print(f"      {'':<14} {finding.details}", flush=True)
    wrong = [finding.what for finding in findings if finding.fits == "no"]
    if asked.json:
        print(json.dumps({"works": not wrong, "findings": [asdict(one) for one in findings]}))
    elif wrong:
        print(f"\nnot ready: see {', '.join(wrong)}")
    else:
        print("\nready:")
        for server in CONFIGS:
            print(f"  {server:<8} --kv-transfer-config '{json.dumps(config(server))}'")
    return 1 if wrong else 0


def look(mib: int, level: str = "error") -> Iterator[Finding]:
    vllm = version("vllm")
    if vllm is None:
        newest = [it for it in versions.TRIED if it not in versions.WITHOUT_KERNELS][-1]
        yield Finding("vllm", "no", "is not installed here", f"pip install 'vllm=={newest}.*'")
    else:
        if versions.is_tried(vllm):
            tried = ", ".join(versions.TRIED)
            without = f" ({', '.join(versions.WITHOUT_KERNELS)} without its compiled code)"
            yield Finding("vllm", "yes", f"{vllm}; tried, also in pairs of different ones: {tried}{without}")
        else:
            yield Finding("vllm", "?", versions.untried(vllm), f"try it before you trust it: {CANARY}")
        if mixed := versions.mixed():
            files = f"{', '.join(mixed[:3])}{' …' if len(mixed) > 3 else ''} (name and size)"
            yield Finding("vllm", "?", f"{len(mixed)} of its files are not those that were installed: {files}",
                          "install it anew: Python of one version beside compiled parts of another writes other bytes")
        yield plugin()
        yield connector()
        yield askable()
    gpus = graphics()
    yield Finding("gpu", "-", ", ".join(gpus) if gpus else "none found")
    for transport in TRANSPORTS:
        # Without a GPU, nixl is a choice.
        yield moved(transport, "cpu", mib, transport == "tcp", level)
    if gpus:
        # What caches on a GPU go through by themselves; then its ways: inside a node, and across.
        yield moved("gpu", "cuda:0", mib, True, level)
        for transport in ("cuda", "tcp", "nixl"):
            yield moved(transport, "cuda:0", mib, False, level)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except PackageNotFoundError:
        return None


def plugin() -> Finding:
    """Whether vLLM knows the connector by its name, from its own search for plug-ins."""
    if registered():
        return Finding("plug-in", "yes", f"vLLM knows {NAME} by its name")
    allowed = os.environ.get("VLLM_PLUGINS")
    if not any(point.name == PLUGIN for point in importlib.metadata.entry_points(group=GROUP)):
        says = f"is not installed: there is no entry point '{PLUGIN}' of the group {GROUP}"
        advice = "install kvferry with pip, rather than by a path"
    elif allowed is not None and PLUGIN not in allowed.split(","):
        says = f"is not loaded: VLLM_PLUGINS is '{allowed}', which leaves it out"
        advice = f"add '{PLUGIN}' to VLLM_PLUGINS"
    else:
        says = "is not loaded, although it is installed"
        advice = "look for 'Failed to load plugin' in vLLM's log"
    path = json.dumps(WITHOUT_PLUGIN).strip("{}")
    return Finding(
        "plug-in", "-", says, f"{advice}; or give {path}, which does not work inside a MultiConnector"
    )


def registered() -> bool:
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        KVConnectorFactory.get_connector_class_by_name(NAME)
    except Exception:
        return False
    return True


def config(server: str) -> dict[str, str]:
    return CONFIGS[server] if registered() else CONFIGS[server] | WITHOUT_PLUGIN


def connector() -> Finding:
    """The connector, loaded by vLLM's own factory, with every hook as vLLM calls it."""
    try:
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        found = KVConnectorFactory.get_connector_class(KVTransferConfig(**config("decode")))
    except Exception as error:
        return Finding("connector", "no", f"does not load: {error}")
    wrong = versions.differences(found)
    if wrong:
        return Finding("connector", "no", "; ".join(wrong), "install a release for this vLLM")
    return Finding("connector", "yes", f"{found.__name__} loads, and its hooks are vLLM's")


def askable() -> Finding:
    """Which of vLLM's back ends can be asked at a server's start where they write, and which cannot."""
    from .describe import specs
    from .kernels import writers as kernels

    asked, not_asked = [], {}
    for name, backend in specs.attention_backends():
        why = kernels.offers_update(backend)
        if why is None:
            asked.append(name)
        elif name in specs.SIDE_BY_SIDE:
            not_asked[name] = f"{why}; known by its code"
        else:
            not_asked[name] = f"{why}; refused"
    for name, kind in specs.RECURRENT.items():
        if kernels.updates(kind):
            asked.append(name)
        else:
            not_asked[name] = "its kernels cannot be called alone; known by their code"
    cannot = "; ".join(f"{name} ({why})" for name, why in sorted(not_asked.items()))
    says = f"{len(asked)} kinds of caches can be asked where they are written, {len(not_asked)} cannot"
    return Finding("kernels", "yes" if asked else "no", says, details=f"not {cannot}" if cannot else "")


def nixl() -> str:
    """The NIXL that this release is tested with, as `pip install 'kvferry[nixl]'` has it."""
    try:
        needed = importlib.metadata.requires("kvferry") or []
    except PackageNotFoundError:
        # It lies in a path, and was not installed.
        needed = []
    return next((one.split(";")[0].strip() for one in needed if one.startswith("nixl")), "nixl")


def graphics() -> list[str]:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]


def moved(
    transport: str, device: str, mib: int, needed: bool, level: str = "error"
) -> Finding:
    """What came of a request that one process hands to another."""
    what = transport if device == "cpu" else f"{transport} {device}"
    try:
        return Finding(what, "yes", str(hand_over(transport, device, mib, level)))
    except Exception as error:
        advice = f"pip install '{nixl()}'" if transport == "nixl" else ""
        return Finding(what, "no" if needed else "-", f"does not work here: {error}", advice)


if __name__ == "__main__":
    sys.exit(main())
