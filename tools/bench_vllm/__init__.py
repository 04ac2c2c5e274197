"""How long a handover keeps D from its first token: what `tools/bench-vllm.sh` runs.

Engines are forked from this process: what they find in the environment is set here, before anything imports vLLM.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "engines"))

import environment  # noqa: E402

environment.forked(os.environ)
# Of the rival alone.
os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
# The rival serves states in this order only.
os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"
