"""Engines made by hand, and vLLM in the environment that stands in for a running engine's."""

import sys
from pathlib import Path

import stand_in  # noqa: F401  first: it sets the environment up

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

# isort: split
from handmade import engines  # noqa: E402, F401
