"""Saying no: caches that kvferry cannot describe."""

from __future__ import annotations

from ._errors import Error


class Unsupported(Error):
    """A cache that kvferry cannot describe: which layer, why, and what to do."""

    #: What the engine calls the layer; empty where it is about the engine as a whole.
    layer: str


def refuse(layer: str, message: str) -> Unsupported:
    place = f"layer '{layer}': " if layer else ""
    return Unsupported(place + message, kind="unsupported", layer=layer)
