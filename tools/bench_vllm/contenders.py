"""Who takes part, by name."""

import shutil

import rivals
from vllm.platforms import current_platform

from .models import hybrid

DEVICE = "cuda" if current_platform.is_cuda() else "cpu"
TRANSPORTS = ("nixl", "tcp", "cuda" if current_platform.is_cuda() else "local")
AGAIN = "again"
CONTENDERS = [f"{transport}{way}" for transport in TRANSPORTS for way in ("", "+push")]
#: On a CPU vLLM's kernels know one layout only.
RIVALS = rivals.NAMES if DEVICE == "cuda" else rivals.NAMES[:2]
CONTENDERS += RIVALS


def is_rival(contender):
    return contender in RIVALS


def wrong_with(contender, model):
    """Why there is no such contender, said before engines start for it; None where there is."""
    name, at, rate = contender.partition("@")
    there = [*CONTENDERS, AGAIN]
    if name not in there:
        return f"there are {', '.join(there)}, and {name or 'nothing'} is none of them"
    if name == AGAIN and hybrid(model):
        return f"vLLM's kernels for CPUs cannot go on from a state, and {model} has some"
    if not at:
        return None
    if name.partition("+")[0] != "tcp":
        return "only tcp goes over the link whose rate is given behind '@'"
    if not rate.isdecimal() or int(rate) == 0:
        return f"'{rate}' is not a rate in MB/s: a whole number above 0, as in {name}@140"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    return f"a link of a given rate needs {' and '.join(missing)} (iproute2)" if missing else None
