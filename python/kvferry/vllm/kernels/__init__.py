"""Asks the engine's own kernels where they write."""
