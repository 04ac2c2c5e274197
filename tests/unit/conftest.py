"""Tests that need neither vLLM nor torch: those of `tools/quick.sh`."""

from handmade import engines  # noqa: F401
