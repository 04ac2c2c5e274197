"""kvferry for vLLM: describe a running engine's cache."""

from .describe import dump, manifest
from .facts import Unsupported

__all__ = ["Unsupported", "dump", "manifest"]
