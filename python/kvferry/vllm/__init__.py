"""kvferry for vLLM: describe a running engine's cache, and hand requests over between engines."""

from typing import TYPE_CHECKING, Any

from .describe import dump, manifest
from .refusal import Unsupported

if TYPE_CHECKING:
    from .connector import FerryConnector

__all__ = ["FerryConnector", "Unsupported", "dump", "manifest"]


def __getattr__(name: str) -> Any:
    # Only an engine needs the connector, and it takes all of vLLM with it.
    if name == "FerryConnector":
        from .connector import FerryConnector

        return FerryConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
