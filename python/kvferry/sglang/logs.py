"""The back end's log, among SGLang's own."""

from __future__ import annotations

import logging

from .._log import LEVELS, log_to

#: Its lines go where SGLang's go, in their format.
logger = logging.getLogger("sglang.kvferry")


def start(level: str) -> None:
    """Logs from this level on, whatever SGLang's own level is."""
    logger.setLevel(LEVELS[level])
    log_to(logger, level)
