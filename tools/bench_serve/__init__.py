"""`vllm bench serve` on pairs of servers: what `tools/bench-serve.sh` runs. Servers are forked from this process: what
they
find in the environment is set here."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "engines"))

import environment  # noqa: E402

environment.forked(os.environ)
