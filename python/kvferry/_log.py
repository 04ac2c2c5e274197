"""What the compiled part has to say, in Python's `logging`."""

from __future__ import annotations

import logging
import os
import threading

from ._core import log_level, log_lines

#: The process in which a thread already listens: one does not survive a fork.
_listens: int | None = None


def log_to(logger: logging.Logger, level: str = "info") -> None:
    """Logs what the agents and transports of this process say to `logger`, from now on: handshakes,
    refusals with their reasons, failed and late loads, expired leases; with `debug` also where each
    request's time went. `level` is `off`, `error`, `warning`, `info` or `debug`.
    """
    global _listens
    log_level(level)
    if _listens != os.getpid():
        _listens = os.getpid()
        threading.Thread(target=_listen, args=(logger,), name="kvferry-log", daemon=True).start()


def _listen(logger: logging.Logger) -> None:
    while True:
        for level, line in log_lines(timeout=60.0):
            logger.log(level, "kvferry: %s", line)
