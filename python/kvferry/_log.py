"""What the compiled part has to say, in Python's `logging`."""

from __future__ import annotations

import atexit
import logging
import os
import threading

from ._core import log_level, log_lines

#: What users call them.
LEVELS = {
    "off": logging.CRITICAL + 10,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}

_logger: logging.Logger | None = None
#: The process in which a thread already listens: one does not survive a fork.
_listens: int | None = None


def log_to(logger: logging.Logger, level: str = "info") -> None:
    """Logs what the agents and transports of this process say to `logger`, from now on: handshakes,
    refusals with their reasons, failed and late loads, expired leases; with `debug` also where each
    request's time went. `level` is `off`, `error`, `warning`, `info` or `debug`.
    """
    global _logger, _listens
    log_level(level)
    _logger = logger
    if _listens != os.getpid():
        _listens = os.getpid()
        threading.Thread(target=_listen, name="kvferry-log", daemon=True).start()
        # What is said last is often what matters.
        atexit.register(_hand_over, 0.0)


def _listen() -> None:
    while True:
        _hand_over(60.0)


def _hand_over(timeout: float) -> None:
    for level, line in log_lines(timeout):
        if _logger is not None:
            _logger.log(level, "kvferry: %s", line)
