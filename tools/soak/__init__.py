"""A soak: what `tools/soak.sh` runs. Servers are forked from this process: what they find in the environment is set
here."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "engines"))
# Behind the others: it has a `families` of its own.
sys.path.append(str(ROOT / "tools" / "train"))

import environment  # noqa: E402

environment.forked(os.environ)
