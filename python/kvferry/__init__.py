"""Move KV caches and recurrent states between LLM engines that look nothing alike.

A rank's memory is described by facts (`Manifest`). `compile` intersects a destination's facts with
those of the ranks it is to read from and answers with a `Plan`, or raises `Incompatible` with the
reason. A plan yields the copies of a request from both sides' block tables.
"""

import atexit

from ._core import Ending, Manifest, Plan, Scheduler, Summary, Worker, compile, finish, version
from ._errors import AgentError, Error, Incompatible, ManifestError, RequestError
from ._log import log_to

__version__ = version()

# What compiles kernels gives its memory back when the process ends, also while a thread works with it.
atexit.register(finish)

__all__ = [
    "AgentError",
    "Ending",
    "Error",
    "Incompatible",
    "Manifest",
    "ManifestError",
    "Plan",
    "RequestError",
    "Scheduler",
    "Summary",
    "Worker",
    "compile",
    "log_to",
]
