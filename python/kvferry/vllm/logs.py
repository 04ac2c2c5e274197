"""The connector's log, among vLLM's own."""

from __future__ import annotations

import copy
import logging

from .._log import LEVELS, log_to

#: A child of vLLM's logger: it goes where vLLM's lines go, in their format.
logger = logging.getLogger("vllm.kvferry")


def start(level: str) -> None:
    """Logs from this level on, whatever vLLM's own level is."""
    logger.setLevel(LEVELS[level])
    theirs = logging.getLogger("vllm").handlers
    if logger.propagate and any(handler.level > LEVELS[level] for handler in theirs):
        # vLLM's level is that of its handlers, which would hold back what is asked for here.
        logger.propagate = False
        for handler in theirs:
            ours = copy.copy(handler)
            ours.setLevel(LEVELS[level])
            logger.addHandler(ours)
    log_to(logger, level)
