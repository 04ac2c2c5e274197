"""Saying no: caches that kvferry cannot describe."""

from .._refusal import Unsupported, refuse

__all__ = ["Unsupported", "refuse"]
