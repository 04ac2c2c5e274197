"""What an engine's kernels were asked at its start, seen from inside its process."""

import time
from types import SimpleNamespace

from kvferry.vllm.kernels import asking
from kvferry.vllm.kernels.asking import Asking

_ASKED = []


def remember():
    report = Asking.report

    def report_seen(self):
        _ASKED.append(self)
        report(self)

    Asking.report = report_seen


def own_time():
    """Where other tests run on the same machine, what counts is the process's own time."""
    asking.time = SimpleNamespace(monotonic=time.process_time)


def answers(_engine):
    """Back ends that were asked, those that could not be with the reason, and the seconds it took."""
    (made,) = _ASKED
    return made._asked, made._not_asked, made._seconds
