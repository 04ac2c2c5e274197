"""Loads that wait for the GPU, and words about what is written (`written.py`)."""

from ..._starter import Event, Starter

__all__ = ["Event", "Starter"]
