"""kvferry for vLLM: describe a running engine's cache, and hand requests over between engines."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import FerryConnector
    from .describe.manifest import dump, manifest
    from .refusal import Unsupported

__all__ = ["FerryConnector", "Unsupported", "dump", "manifest"]

#: Loaded when they are asked for: vLLM loads the plug-in in each of its processes, and most of them
#: need nothing else of this package.
_WHERE = {
    "FerryConnector": "connector",
    "Unsupported": "refusal",
    "dump": "describe.manifest",
    "manifest": "describe.manifest",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
